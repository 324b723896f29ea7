"""Pure decisions: no file, no clock, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import layout
from ..errors import LayoutError
from ..types import Bytes, EntryClass, Source
from ..util.buffers import common_prefix_length

MIB = 1 << 20
LAST_EXPIRY = 1 << 62  # so that no sum leaves the integers of SQLite
# A delta must save this part of a state (1 / 8). With states of 0.4, 4 and 31 MiB, whatever was shared, a put took about as
# long shared as whole, and a get from disk up to twice as long (0.2 for 0.1 ms, 1.4 for 1.0): less would not pay for the
# parent that is read with it, more would leave out conversations that share a system prompt and little else.
DEFAULT_SHARE = 8


# Stored prefixes that a put tries as its base, the longest first. The next one saves less where the layouts are alike; it is
# tried because the longest may be damaged, or of another layout.
BASES_TRIED = 2


# How long a chain may be. Each link costs a get about 80 us beside its bytes, and a MiB of a state takes 310 us to get whole:
# so many links for each MiB cost a fifth of that. A few more are free, since small states are quick to read anyway.
LINKS_PER_MIB = 0.75
FREE_LINKS = 16
# A link that makes a chain too long is folded into the next put, which would otherwise be stored against it: the two deltas are
# composed. Its bytes are then written twice, so only a small link is folded, which costs no more than a put does anyway.
# Rewriting links of a few MiB each would be most of what a conversation writes.
FOLDED_BYTES = 256 << 10
# The longest chain that a put makes; beyond it, half of the chain is left out. SQLite's recursion and every reader bear more.
MAX_LINKS = 500


def too_long(n_links: int, size: int) -> bool:
    """Whether a chain of so many links, for a state of `size` bytes, takes too long to read."""
    return n_links > FREE_LINKS + LINKS_PER_MIB * size / MIB


def budget_bytes(mib: float) -> int:
    """A budget in MiB as bytes; -1 stays 'no limit'."""
    return -1 if mib < 0 else int(mib * MIB)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys have in common."""
    return common_prefix_length(np.frombuffer(a, "<i4", len(a) // 4), np.frombuffer(b, "<i4", len(b) // 4))


def least_saved(min_saved: int | None, size: int) -> int:
    """The bytes by which a delta must be smaller than its state of `size` bytes; None is a share that pays for any size."""
    return size // DEFAULT_SHARE if min_saved is None else min_saved


def expires_at(now: int, ttl: int | None) -> int | None:
    return None if ttl is None else min(now + ttl, LAST_EXPIRY)


def merged_class(
    old: tuple[EntryClass, Source], new: tuple[EntryClass, Source]
) -> tuple[EntryClass, Source]:
    """The class of an entry whose tokens are put again: a default class does not replace one that was asked for."""
    return old if new == ("normal", "default") else new


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry as auto-learning sees it: `shared` tokens come from its parent already (0: whole)."""

    key: bytes  # tokens, int32 little-endian
    bytes_per_token: float
    shared: int


def _saves(e: Candidate, n_tokens: int, min_saved: int | None) -> bool:
    size = int(e.bytes_per_token * (len(e.key) // 4))
    return n_tokens > e.shared and (n_tokens - e.shared) * e.bytes_per_token >= least_saved(min_saved, size)


def prefix_to_learn(entries: Sequence[Candidate], min_saved: int | None, times: int = 3) -> bytes:
    """The longest common prefix of `times` entries by which each of them would save min_saved bytes; b"" for none.

    Entries must be sorted by key: those with the longest common prefix are neighbours.
    """
    best = b""
    for at in range(len(entries) - times + 1):
        group = entries[at : at + times]
        n = common_tokens(group[0].key, group[-1].key)
        if 4 * n > len(best) and all(_saves(e, n, min_saved) for e in group):
            best = group[0].key[: 4 * n]
    return best


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a state can be cut: at any token, or at the counts of its checkpoints."""

    any: bool
    counts: tuple[int, ...]

    def serves(self, n_tokens: int) -> bool:
        return self.any or n_tokens in self.counts


def layout_of(state: Bytes) -> layout.Layout | None:
    """The layout of a state; None where it is not understood."""
    try:
        return layout.parse(state)
    except LayoutError:
        return None


def cuts_of(main: Bytes, n_tokens: int) -> Cuts:
    """Where the engine could go on from inside this state; nowhere, where its layout is not understood."""
    return cuts_in(layout_of(main), n_tokens)


def cuts_in(found: layout.Layout | None, n_tokens: int) -> Cuts:
    """`cuts_of` a state whose layout was parsed before."""
    if found is None:
        return Cuts(False, ())
    if found.can_crop:
        return Cuts(True, ())
    counts = {c.n_tokens for c in found.checkpoints or () if 0 < c.n_tokens < n_tokens}
    return Cuts(False, tuple(sorted(n for n in counts if found.crop_limit(n) == n)))
