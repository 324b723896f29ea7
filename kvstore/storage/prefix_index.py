"""The token-prefix index: which stored entry shares the longest prefix with a token sequence.

Keys are the little-endian int32 bytes of the tokens, ordered by memcmp. Whatever that order is, the entries that share
the longest prefix with a request are the ones next to it, so two seeks in a b-tree answer, whatever the number of
entries. An entry that can only serve certain prefixes as a whole (its own, or up to a checkpoint) is found by walking
from the request towards shorter prefixes: each seek gives either a stored prefix, or a shorter bound for the next. Where
that takes more than a few steps, `prefix_filter` answers instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from ..types import Tokens
from . import queries, queries_prefixes
from .db import Connection
from .policy import common_tokens
from .prefix_filter import PrefixFilters
from .queries import signed, unsigned

Rows = Iterator[tuple[int, bytes, "int | None"]]
# Steps (15 us each) before the filter is used. Most stores need one or two, and never load the hashes.
WALK_STEPS = 8


class Index(Protocol):
    """(id, tokens, expires_at) of entries in the order of their tokens, nearest first; `cut`: can be cut anywhere."""

    def at_or_before(self, cut: bool, key: bytes) -> Rows: ...

    def after(self, key: bytes) -> Rows:
        """Those that can be cut anywhere."""
        ...

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

    def after(self, key: bytes) -> Rows:
        return queries.after(self._c, self._fingerprint, key)

    def cut_at_or_before(self, key: bytes) -> Rows:
        return queries.cut_at_or_before(self._c, self._fingerprint, key)


def key_of(tokens: Tokens) -> bytes:
    """The index key of tokens of shape (n,), int32."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


class TooLong(Exception):
    """A walk that takes more steps than allowed."""


def _stored_prefixes(
    rows: Callable[[bytes], Rows], key: bytes, most: int | None
) -> Iterator[tuple[int, int, int | None]]:
    """(id, n_tokens, expires_at) of every row that is a prefix of `key`, longest first. Raises TooLong after `most` rows."""
    bound = key
    seen = 0
    while bound:
        shorter = b""
        for id, tokens, expires_at in rows(bound):
            if seen == most:
                raise TooLong
            seen += 1
            n = common_tokens(tokens, key)
            if 4 * n == len(tokens):
                yield id, n, expires_at
            else:
                shorter = key[: 4 * n]
                break
        bound = shorter


def _whole(
    c: Connection, fingerprint: int, key: bytes, now: int, cut: bool, most: int | None, *, base: bool = False
) -> Iterator[tuple[int, int]]:
    """(id, n_tokens) of the live entries, or of the bases, whose tokens are a prefix of `key`, longest first, by the walk."""

    def rows(bound: bytes) -> Rows:
        return queries.at_or_before(c, fingerprint, cut, bound, base=base)

    for id, n, expires_at in _stored_prefixes(rows, key, most):
        if expires_at is None or expires_at > now:
            yield id, n


@dataclass(frozen=True, slots=True)
class StoredPrefixes:
    """The entries whose tokens are a prefix of `key`, longest first, as one walk found them: signed ids.

    Damaged and expired rows may be among them: `chosen` looks at each.
    """

    fingerprint: int
    key: bytes
    can_be_cut: tuple[int, ...]
    others: tuple[int, ...]

    def chosen(self, c: Connection, now: int, what: str, limit: int = -1) -> list[tuple[int, int]]:
        """(id, n_tokens) of those that are live, longest first.

        what: only those that are "removable" (normal, without images), or "any". At most `limit` of those that can be cut, and
        of the others.
        """
        rows: list[tuple[int, int]] = []
        for ids in (self.can_be_cut, self.others):
            if ids:
                rows += queries_prefixes.chosen(c, ids, self.fingerprint, self.key, now, what, limit)
        return sorted(((unsigned(id), n) for id, n in rows), key=lambda found: -found[1])


def stored_prefixes(
    c: Connection, filters: PrefixFilters, fingerprint: int, key: bytes, now: int, *, committed: bool = True
) -> StoredPrefixes:
    """The stored prefixes of `key`, itself among them. committed=False: `c` is in a transaction that writes."""
    found: list[tuple[int, ...]] = []
    for cut in (True, False):
        try:
            ids = [signed(id) for id, _ in _whole(c, fingerprint, key, now, cut, WALK_STEPS)]
        except TooLong:
            ids = _by_index(c, filters, fingerprint, key, now, cut, False, committed)
        found.append(tuple(ids))
    return StoredPrefixes(fingerprint, key, *found)


def find_bases(
    c: Connection, filters: PrefixFilters, fingerprint: int, key: bytes, now: int, limit: int, *, committed: bool = True
) -> list[tuple[int, int]]:
    """(id, n_tokens) of the `limit` longest entries and bases whose tokens are a prefix of `key` (or all of it).

    What a delta may be made against; of the same tokens, entries before bases.
    """
    found: list[tuple[int, int, int]] = []
    for base, cut in ((0, True), (0, False), (1, True), (1, False)):
        walk = _whole(c, fingerprint, key, now, cut, WALK_STEPS, base=bool(base))
        try:
            found += [(n, -base, id) for id, n in islice(walk, limit)]
        except TooLong:
            ids = _by_index(c, filters, fingerprint, key, now, cut, bool(base), committed)
            chosen = queries_prefixes.chosen(c, ids, fingerprint, key, now, "base" if base else "any", limit)
            found += [(n, -base, unsigned(id)) for id, n in chosen]
    return [(id, n) for n, _, id in sorted(dict.fromkeys(found), reverse=True)[:limit]]


def _by_index(
    c: Connection, filters: PrefixFilters, fingerprint: int, key: bytes, now: int, cut: bool, base: bool, committed: bool
) -> list[int]:
    """The signed ids of stored prefixes of `key`, longest first, where the walk takes too many steps."""
    if cut or base:
        return queries.whole_by_end(c, fingerprint, key)
    if not queries_prefixes.complete(c):
        return [signed(id) for id, _ in _whole(c, fingerprint, key, now, cut, None)]
    held = filters.of(fingerprint)
    with held.lock:
        return held.whole(c, fingerprint, key, now, committed=committed)


def _longest_whole(
    c: Connection, filters: PrefixFilters, fingerprint: int, key: bytes, now: int
) -> tuple[int, int] | None:
    """(id, n_tokens) of the live entry that serves the most leading tokens of `key`, all of its own or those of a cut."""
    found = None
    most = WALK_STEPS if queries_prefixes.complete(c) else None
    try:
        for rows in (
            lambda bound: queries.at_or_before(c, fingerprint, False, bound),
            lambda bound: queries.cut_at_or_before(c, fingerprint, bound),
        ):
            for id, n, expires_at in _stored_prefixes(rows, key, most):
                if expires_at is None or expires_at > now:
                    found = (id, n) if found is None or n > found[1] else found
                    break
    except TooLong:
        held = filters.of(fingerprint)
        with held.lock:
            longest = held.longest(c, fingerprint, key, now, committed=True)
        return None if longest is None else (unsigned(longest[0]), longest[1])
    return found


def longest(
    c: Connection, filters: PrefixFilters, fingerprint: int, key: bytes, now: int
) -> tuple[int, int] | None:
    """(id, n_common) of the live entry that can serve the most leading tokens of `key`; None where none serves any."""
    best: tuple[int, int] | None = None
    runs = filters.runs_of(fingerprint)
    for before in (True, False):
        found = runs.nearest(c, fingerprint, key, now, before=before)
        n = 0 if found is None else common_tokens(found[1], key)
        if found is not None and n > (0 if best is None else best[1]):
            best = (found[0], n)
    whole = _longest_whole(c, filters, fingerprint, key, now)
    return whole if whole is not None and (best is None or whole[1] > best[1]) else best


def prefixes_in(index: Index, key: bytes, now: int) -> Iterator[tuple[int, int]]:
    """(id, n_tokens) of the live entries whose tokens are a prefix of `key` (or all of it), by the walk alone.

    Longest first among those that can be cut, then among the others.
    """
    for cut in (True, False):
        for id, n, expires_at in _stored_prefixes(functools.partial(index.at_or_before, cut), key, None):
            if expires_at is None or expires_at > now:
                yield id, n


def longest_in(index: Index, key: bytes, now: int, most: int | None = None) -> tuple[int, int] | None:
    """`longest` by the walk alone. Raises TooLong after `most` steps."""
    best: tuple[int, int] | None = None

    def offer(id: int, n: int) -> None:
        nonlocal best
        if n and (best is None or n > best[1]):
            best = (id, n)

    for neighbours in (index.at_or_before(True, key), index.after(key)):
        for step, (id, tokens, expires_at) in enumerate(neighbours):
            if expires_at is None or expires_at > now:
                offer(id, common_tokens(tokens, key))
                break
            if step == most:
                raise TooLong
    for rows in (functools.partial(index.at_or_before, False), index.cut_at_or_before):
        for id, n, expires_at in _stored_prefixes(rows, key, most):
            if expires_at is None or expires_at > now:
                offer(id, n)
                break
    return best
