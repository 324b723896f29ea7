"""The nearest live entry in the order of tokens, past those that expired and are still in the file.

Expired entries are deleted in the background. They stay while live entries are stored against them, or in a read-only
store. A run of expired entries is walked once and remembered: a walk past 30,000 took 60 ms.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from . import queries, queries_blobs
from .db import Connection

Found = tuple[int, bytes]
PASSED = 64  # expired neighbours that are passed one by one
RUNS_KEPT = 64
NEW_KEPT = 256  # entries written since a run was walked, beyond which it is walked again


@dataclass(frozen=True, slots=True)
class _Run:
    """Token keys between which, bounds excluded, no live entry was."""

    low: bytes
    high: bytes | None

    def holds(self, key: bytes) -> bool:
        return self.low < key and (self.high is None or key < self.high)

    def covers(self, other: _Run) -> bool:
        ends = self.high is None or (other.high is not None and other.high <= self.high)
        return self.low <= other.low and ends


class ExpiredRuns:
    """The runs of one fingerprint among the entries that can be cut anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[_Run] = []
        self._since: tuple[int, int] | None = None  # the newest blob, and how often an expiry was put off, at the first run

    def nearest(self, c: Connection, fingerprint: int, key: bytes, now: int, *, before: bool) -> Found | None:
        """(id, tokens) of the live entry that sorts nearest to `key`: at or before it, or after it."""
        rows = queries.at_or_before(c, fingerprint, True, key) if before else queries.after(c, fingerprint, key)
        last, passed = key, 0
        for id, tokens, expires_at in rows:
            if expires_at is None or expires_at > now:
                return id, tokens
            last, passed = tokens, passed + 1
            if passed == PASSED:
                break
        else:
            return None
        live = queries.live_at_or_before if before else queries.live_after
        with self._lock:
            new = self._new(c, fingerprint)
            if new is None:
                return live(c, fingerprint, last, now)
            run = next((r for r in self._runs if r.holds(last)), None)
            edge = last if run is None else run.low if before else run.high
            # If the entry at the edge has expired since, the walk continues from there.
            at_edge = before or run is None or edge is None
            found = None if edge is None else live(c, fingerprint, edge if at_edge else edge[:-1], now)
            self._add(key, found, before)
        inside = [
            (id, tokens) for id, tokens, expires_at in new
            if (tokens <= key) == before and (expires_at is None or expires_at > now)
        ]  # fmt: skip
        nearest = [*inside, *([] if found is None else [found])]
        return (max if before else min)(nearest, key=lambda f: f[1]) if nearest else None

    def _add(self, key: bytes, found: Found | None, before: bool) -> None:
        if before:
            run = _Run(b"" if found is None else found[1], key + b"\0")
        else:
            run = _Run(key, None if found is None else found[1])
        self._runs = [run, *(r for r in self._runs if not run.covers(r))][:RUNS_KEPT]

    def _new(self, c: Connection, fingerprint: int) -> list[tuple[int, bytes, int | None]] | None:
        """What was written since the first run; None where this reader's state of the file cannot be compared with it."""
        newest, put_off = queries.newest_blob(c), queries.expiries_put_off(c)
        if self._since is not None:
            since, then = self._since
            if newest < since or put_off < then:
                return None
            new = queries.entries_of_blobs_after(c, since, fingerprint, NEW_KEPT + 1)
            if put_off == then and len(new) <= NEW_KEPT:
                return new
        if queries_blobs.staged(c):
            return None  # a blob that is older than the run may become an entry later
        self._runs, self._since = [], (newest, put_off)
        return []
