"""The token-prefix index: which stored entry shares the longest prefix with a token sequence.

Keys are the little-endian int32 bytes of the tokens, ordered by memcmp. Whatever that order is, the entries that share
the longest prefix with a request are the ones next to it, so two seeks in a b-tree answer, whatever the number of
entries. An entry that can only serve certain prefixes as a whole (its own, or up to a checkpoint) is found by walking
from the request towards shorter prefixes: each seek gives either a stored prefix, or a shorter bound for the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from . import queries
from .db import Connection
from .policy import common
from .records import Tokens

Rows = Iterator[tuple[int, bytes, "int | None"]]


class Index(Protocol):
    """(id, tokens, expires_at) of entries in the order of their tokens, nearest first; `cut`: can be cut anywhere."""

    def at_or_before(self, cut: bool, key: bytes) -> Rows: ...

    def after(self, cut: bool, key: bytes) -> Rows: ...

    def cut_at_or_before(self, key: bytes) -> Rows:
        """The same of the checkpoints of entries that cannot be cut anywhere: `tokens` are those up to a checkpoint."""
        ...


class FileIndex:
    """The entries of a fingerprint in the file."""

    def __init__(self, c: Connection, fingerprint: int) -> None:
        self._c = c
        self._fingerprint = fingerprint

    def at_or_before(self, cut: bool, key: bytes) -> Rows:
        return queries.at_or_before(self._c, self._fingerprint, cut, key)

    def after(self, cut: bool, key: bytes) -> Rows:
        return queries.after(self._c, self._fingerprint, cut, key)

    def cut_at_or_before(self, key: bytes) -> Rows:
        return queries.cut_at_or_before(self._c, self._fingerprint, key)


def key_of(tokens: Tokens) -> bytes:
    """The index key of tokens of shape (n,), int32."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _stored_prefixes(rows: Callable[[bytes], Rows], key: bytes) -> Iterator[tuple[int, int, int | None]]:
    """(id, n_tokens, expires_at) of every row that is a prefix of `key`, longest first."""
    bound = key
    while bound:
        shorter = b""
        for id, tokens, expires_at in rows(bound):
            n = common(tokens, key)
            if 4 * n == len(tokens):
                yield id, n, expires_at
            else:
                shorter = key[: 4 * n]
                break
        bound = shorter


def prefixes_of(c: Connection, fingerprint: int, key: bytes, now: int) -> Iterator[tuple[int, int]]:
    """`prefixes_in` of the file."""
    return prefixes_in(FileIndex(c, fingerprint), key, now)


def prefixes_in(index: Index, key: bytes, now: int) -> Iterator[tuple[int, int]]:
    """(id, n_tokens) of the live entries whose tokens are a prefix of `key` (or all of it), of either kind.

    Longest first among those that can be cut, then among the others.
    """
    for cut in (True, False):

        def rows(bound: bytes, cut: bool = cut) -> Rows:
            return index.at_or_before(cut, bound)

        for id, n, expires_at in _stored_prefixes(rows, key):
            if expires_at is None or expires_at > now:
                yield id, n


def longest(c: Connection, fingerprint: int, key: bytes, now: int) -> tuple[int, int] | None:
    """`longest_in` of the file."""
    return longest_in(FileIndex(c, fingerprint), key, now)


def longest_in(index: Index, key: bytes, now: int) -> tuple[int, int] | None:
    """(id, n_common) of the live entry that can serve the most leading tokens of `key`; None where none serves any."""
    best: tuple[int, int] | None = None

    def offer(id: int, n: int) -> None:
        nonlocal best
        if n and (best is None or n > best[1]):
            best = (id, n)

    for neighbours in (index.at_or_before(True, key), index.after(True, key)):
        for id, tokens, expires_at in neighbours:
            if expires_at is None or expires_at > now:
                offer(id, common(tokens, key))
                break
    for rows in (functools.partial(index.at_or_before, False), index.cut_at_or_before):
        for id, n, expires_at in _stored_prefixes(rows, key):
            if expires_at is None or expires_at > now:
                offer(id, n)
                break
    return best
