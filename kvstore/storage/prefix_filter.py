"""The hashes of the table `prefixes` in RAM: which prefixes of a request an entry that cannot be cut can serve as a whole.

Walking the prefix index takes a step for each place where stored entries part from the request: 67 ms among 4,000 entries
that each continue the same document at another token. Here all prefixes of the request are hashed at once and tested in a
bitmap; what is left is looked up, longest first, and read from the file. Hits that are stale or collide cost that read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..util.hashing import prefix_hashes
from . import queries_prefixes
from .db import Connection
from .expired_runs import ExpiredRuns
from .queries_prefixes import PrefixRow

Ints = npt.NDArray[np.int64]
NEVER = (1 << 63) - 1
DEAD = -1
# Bits of the bitmap a hash: 1 of 32 prefixes that nobody stored passes, 125 of a request of 4,000 tokens.
BITS_EACH = 32
# Rows that are sorted anew at each read of new ones; more are merged with the others, 10 ms for 100,000.
RECENT_ROWS = 2048
# Rows that may be gone from the file before all are read again.
STALE_ROWS = 1024


class _Level:
    """Rows sorted by hash, those of one hash in a group with the latest expiry among them."""

    def __init__(self, rows: Ints) -> None:
        """rows: int64 of shape (6, n): row, entry, n_tokens, cut, hash, expires_at."""
        order = np.argsort(rows[4], kind="stable")
        self.rows = rows[:, order]
        self.hashes, self.starts = np.unique(self.rows[4], return_index=True)
        self.stops = np.append(self.starts[1:], rows.shape[1])
        self.expires = np.maximum.reduceat(self.rows[5], self.starts) if len(self.starts) else np.empty(0, np.int64)
        self._bits = max(8, int(len(self.hashes) * BITS_EACH - 1).bit_length()) if len(self.hashes) else 8
        self._bitmap = np.zeros(1 << (self._bits - 3), np.uint8)
        at = self._places(self.hashes)
        np.bitwise_or.at(self._bitmap, at >> np.uint64(3), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8))

    def _places(self, hashes: Ints) -> npt.NDArray[np.uint64]:
        places: npt.NDArray[np.uint64] = hashes.view(np.uint64) >> np.uint64(64 - self._bits)
        return places

    def probe(self, hashes: Ints, now: int) -> tuple[Ints, Ints]:
        """(index in `hashes`, group) of those that a live row has, in the order of `hashes`."""
        if not len(self.hashes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at = self._places(hashes)
        passed = np.flatnonzero((self._bitmap[at >> np.uint64(3)] >> (at & np.uint64(7)).astype(np.uint8)) & 1)
        group = np.searchsorted(self.hashes, hashes[passed])
        group[group == len(self.hashes)] = 0
        found = (self.hashes[group] == hashes[passed]) & (self.expires[group] > now)
        return passed[found], group[found]

    def bury(self, group: int, at: int) -> None:
        """Notes that a row is gone."""
        self.rows[5, at] = DEAD
        self.expires[group] = self.rows[5, self.starts[group] : self.stops[group]].max()


def _array(rows: Sequence[PrefixRow]) -> Ints:
    flat = [value for r in rows for value in (*r[:5], NEVER if r[5] is None else r[5])]
    array: Ints = np.array(flat, np.int64).reshape(-1, 6).T.copy()
    return array


class PrefixFilter:
    """The rows of one fingerprint, read as they are needed. The caller must hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._base = self._recent = _Level(np.empty((6, 0), np.int64))
        self._last = 0
        self._buried = self._added = 0

    def levels(self, c: Connection, fingerprint: int, committed: bool) -> list[_Level]:
        """All rows that `c` sees, after reading those that are new.

        committed=False keeps nothing of what a transaction sees that may be rolled back.
        """
        if committed and self._buried + self._added > STALE_ROWS + self._base.rows.shape[1] // 2:
            self._clear()
        new = _array(queries_prefixes.rows_after(c, fingerprint, self._last))
        if not new.size:
            return [self._base, self._recent]
        if not committed:
            return [self._base, self._recent, _Level(new)]
        first = not self._last
        self._last = int(new[0].max())
        self._added += 0 if first else new.shape[1]
        recent = np.concatenate((self._recent.rows, new), axis=1)
        if recent.shape[1] <= RECENT_ROWS:
            self._recent = _Level(recent)
        else:
            self._base = _Level(np.concatenate((self._base.rows, recent), axis=1))
            self._recent = _Level(np.empty((6, 0), np.int64))
        return [self._base, self._recent]

    def longest(self, c: Connection, fingerprint: int, key: bytes, now: int, *, committed: bool) -> tuple[int, int] | None:
        """(signed id, n_tokens) of the live entry that serves the most leading tokens of `key` as a whole or at a cut."""
        newest: int | None = None
        for level, group, n in self._candidates(self.levels(c, fingerprint, committed), key, now):
            start, stop = level.starts[group], level.stops[group]
            left = level.rows[5, start:stop].copy()
            while left.size and left.max() > now:
                at = int(left.argmax())
                row = int(level.rows[0, start + at])
                if queries_prefixes.serves(c, row, fingerprint, key, now):
                    return int(level.rows[1, start + at]), n
                left[at] = DEAD
                if not committed:
                    continue
                # A row above the newest that this reader sees may have been written since.
                newest = queries_prefixes.newest(c) if newest is None else newest
                if row <= newest and not queries_prefixes.row_there(c, row):
                    level.bury(group, start + at)
                    self._buried += 1
        return None

    def whole(self, c: Connection, fingerprint: int, key: bytes, now: int, *, committed: bool) -> list[int]:
        """The signed ids of entries whose tokens are likely a prefix of `key`, or all of it; longest first."""
        ids: list[int] = []
        for level, group, _ in self._candidates(self.levels(c, fingerprint, committed), key, now):
            rows = level.rows[:, level.starts[group] : level.stops[group]]
            ids += rows[1, (rows[3] == 0) & (rows[5] > now)].tolist()
        return ids

    @staticmethod
    def _candidates(levels: Iterable[_Level], key: bytes, now: int) -> Iterator[tuple[_Level, int, int]]:
        """(level, group, n_tokens) of live rows whose hash a prefix of `key` has, longest first."""
        hashes = prefix_hashes(key)
        listed = list(levels)
        probed = [level.probe(hashes, now) for level in listed]
        which = np.concatenate([np.full(len(at), i) for i, (at, _) in enumerate(probed)])
        at = np.concatenate([at for at, _ in probed])
        groups = np.concatenate([group for _, group in probed])
        for i in np.argsort(at, kind="stable")[::-1]:
            level, group, n = listed[which[i]], int(groups[i]), int(at[i]) + 1
            if level.rows[2, level.starts[group]] == n:
                yield level, group, n


class PrefixFilters:
    """A filter, and the expired runs, of each fingerprint that is asked for; shared by all that work on one file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filters: dict[int, PrefixFilter] = {}
        self._runs: dict[int, ExpiredRuns] = {}

    def runs_of(self, fingerprint: int) -> ExpiredRuns:
        with self._lock:
            return self._runs.setdefault(fingerprint, ExpiredRuns())

    def of(self, fingerprint: int) -> PrefixFilter:
        with self._lock:
            return self._filters.setdefault(fingerprint, PrefixFilter())
