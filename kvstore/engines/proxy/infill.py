"""The prompt that llama-server makes of an /infill request: learned from what a slot holds after one.

The server puts special tokens around the prefix and the suffix, and before them the other files of the request. It tells
nobody which tokens these are, and cuts what is longer than a part of its batch. So nothing is guessed before it was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...types import Tokens

DEFAULT_BATCH = 2048

@dataclass(frozen=True)
class Pieces:
    """The tokens of the texts of a request. extra: file name and text of each other file."""

    prefix: list[int]
    prompt: list[int]
    suffix: list[int]
    extra: list[tuple[list[int], list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Fim:
    """The special tokens, whether the suffix comes first, what stands before them, and how much of the texts was taken."""

    pre: int
    suf: int
    mid: int
    suffix_first: bool
    head: list[int]
    n_prefix: int
    n_suffix: int


@dataclass
class InfillFrame:
    """What was seen of a server's prompts. `n_batch` is None as long as no text was cut."""

    fim: _Fim | None = None
    bare: list[int] | None = None  # the head without other files
    repo: list[int] = field(default_factory=list)  # before the first other file
    separator: list[int] | None = None  # before each other file
    names: bool = False  # whether the name of the file follows the separator
    tail: list[int] = field(default_factory=list)  # after the last one
    n_batch: int | None = None

    def predict(self, pieces: Pieces, n_ctx: int) -> Tokens | None:
        """The tokens of a prompt; None where it has something that was not seen yet."""
        fim = self.fim
        head = self._head(pieces, n_ctx)
        if fim is None or head is None:
            return None
        n_prefix, n_suffix = len(pieces.prefix), len(pieces.suffix)
        if self.n_batch is not None:
            quarter = self.n_batch // 4
            n_prefix = min(n_prefix, 3 * quarter)
            n_suffix = min(n_suffix, max(0, quarter - 2 - len(pieces.prompt)))
        prefix = [fim.pre, *pieces.prefix[len(pieces.prefix) - n_prefix :], *pieces.prompt]
        suffix = [fim.suf, *pieces.suffix[:n_suffix]]
        body = suffix + prefix if fim.suffix_first else prefix + suffix
        return np.array([*head, *body, fim.mid], np.int32)

    def _head(self, pieces: Pieces, n_ctx: int) -> list[int] | None:
        if not pieces.extra:
            return self.bare
        if self.separator is None:
            return None
        extra = [*self.repo]
        for name, text in pieces.extra:
            extra += [*self.separator, *(name if self.names else ()), *text]
        # The server cuts the front of what does not fit beside a batch.
        fits = len(extra) + len(self.tail) <= n_ctx - (self.n_batch or DEFAULT_BATCH)
        return extra + self.tail if fits else None

    def learn(self, pieces: Pieces, seen: list[int]) -> bool:
        """Learns from the tokens of a prompt; whether it was understood."""
        found = _parse(pieces, seen, suffix_first=False) or _parse(pieces, seen, suffix_first=True)
        if found is None:
            return False
        if pieces.extra and not self._learn_extra(pieces, found.head):
            return False
        if not pieces.extra:
            self.bare = found.head
        self.fim = found
        if found.n_prefix < len(pieces.prefix):
            self.n_batch = found.n_prefix // 3 * 4
        elif found.n_suffix < len(pieces.suffix):
            self.n_batch = 4 * (found.n_suffix + 2 + len(pieces.prompt))
        return True

    def _learn_extra(self, pieces: Pieces, head: list[int]) -> bool:
        name, text = pieces.extra[0]
        for names in (True, False):
            first = [*name, *text] if names else text
            for at in range(1, len(head) - len(first) + 1):
                if head[at : at + len(first)] != first:
                    continue
                # With names, one token says that a file begins; without them, a line of text does.
                repo, separator = (head[: at - 1], head[at - 1 : at]) if names else ([], head[:at])
                end = at + len(first)
                for other, content in pieces.extra[1:]:
                    chunk = [*separator, *(other if names else ()), *content]
                    if head[end : end + len(chunk)] != chunk:
                        break
                    end += len(chunk)
                else:
                    self.repo, self.separator, self.names, self.tail = repo, separator, names, head[end:]
                    self.bare = repo + self.tail
                    return True
        return False


def _parse(pieces: Pieces, seen: list[int], *, suffix_first: bool) -> _Fim | None:
    """Finds the texts in a prompt, from its end: the last token is the middle."""
    if len(seen) < 3:
        return None
    rest, mid = seen[:-1], seen[-1]
    n_prefix = n_suffix = pre = suf = 0
    for part in ("prefix", "suffix") if suffix_first else ("suffix", "prefix"):
        if part == "suffix":
            n_suffix = next((n for n in range(len(pieces.suffix), -1, -1) if _ends(rest, pieces.suffix[:n])), 0)
            rest = rest[: len(rest) - n_suffix]
        else:
            if not _ends(rest, pieces.prompt):
                return None
            rest = rest[: len(rest) - len(pieces.prompt)]
            pairs = zip(reversed(pieces.prefix), reversed(rest), strict=False)
            n_prefix = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(pieces.prefix), len(rest)))
            rest = rest[: len(rest) - n_prefix]
        if not rest:
            return None
        if part == "suffix":
            suf = rest[-1]
        else:
            pre = rest[-1]
        rest = rest[:-1]
    if n_prefix < len(pieces.prefix) and (n_prefix == 0 or n_prefix % 3):
        return None
    if len({pre, suf, mid}) < 3:
        return None
    return _Fim(pre, suf, mid, suffix_first, rest, n_prefix, n_suffix)


def _ends(tokens: list[int], end: list[int]) -> bool:
    return len(end) <= len(tokens) and tokens[len(tokens) - len(end) :] == end
