"""The store's one background thread: what has to happen without anyone asking, in bites that hold nobody up."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from . import queries
from .engine import LOG_BYTES, Engine
from .errors import KVStoreError
from .space import PAGES_EVICTED

log = logging.getLogger("kvstore")
TICK_SECONDS = 1.0
EXPIRED_PER_BITE = 16
FREE_PAGES_PER_BITE = 256  # 16 MiB
# Free pages and the log's file wait this long for a put that can use them: with a new log 256 MiB took 0.05 s longer.
QUIET_SECONDS = 10.0


def expire(engine: Engine, limit: int = EXPIRED_PER_BITE, *, wait: bool = False) -> list[int]:
    """Deletes up to `limit` expired entries, with those stored against them; gives their ids."""
    with engine.db.read() as c:
        ids = queries.expired(c, engine.now(), limit)
    return engine.removing(lambda: _expire(engine, limit, wait)) if ids else []


def _expire(engine: Engine, limit: int, wait: bool) -> list[int]:
    engine.space.empty_log(wait=wait)
    with engine.writing(durable=False, wait=wait) as (c, dropped):
        for id in queries.expired(c, engine.now(), engine.space.bite(limit, PAGES_EVICTED)):
            engine.drop(c, id, "expired", dropped)
    return [entry.id for entry, _ in dropped]


def sweep(engine: Engine) -> int:
    """Deletes rows that refer to nothing, as a shell without foreign keys may leave them; gives their number."""
    with engine.db.read() as c:
        if not queries.orphans(c):
            return 0
    with engine.db.write() as c:
        return queries.delete_orphans(c)


class Upkeep:
    """Runs `tick` of the engine every second until it is stopped; holds no strong reference to its owner."""

    def __init__(self, engine: Engine, learn: Callable[[], object] | None) -> None:
        self._engine = weakref.ref(engine)
        self._learn = learn
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._swept = False
        self._thread = threading.Thread(target=self._run, name="kvstore-upkeep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Asks for a tick now."""
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            engine = self._engine()
            if engine is None or self._stop.is_set():
                return
            self._tick(engine)
            del engine

    def _tick(self, engine: Engine) -> None:
        if engine.putting and engine.db.wal_bytes() < LOG_BYTES:
            return  # let the put finish first: a checkpoint during a put is slower than one after the other
        quiet = time.monotonic() - engine.last_write > QUIET_SECONDS
        steps: list[Callable[[], object]] = [
            lambda: engine.db.wal_bytes() and engine.db.checkpoint(truncate=quiet, wait=False),
            lambda: engine.clear_cut_off(wait=False),
            lambda: self._flush(engine),
            lambda: self._sweep(engine),
            lambda: self._expire(engine),
            self._learn or (lambda: None),
            lambda: self._give_back(engine) if quiet else None,
            engine.take_spare,
        ]
        for step in steps:
            if self._stop.is_set():
                return
            try:
                step()
            except KVStoreError as error:  # where one cannot be done, on a full disk, another may make room
                log.debug("upkeep put off: %s", error)

    def _flush(self, engine: Engine) -> None:
        if engine.tally:
            with engine.writing(durable=False, wait=False):
                pass

    def _sweep(self, engine: Engine) -> None:
        if not self._swept:
            sweep(engine)
            self._swept = True

    def _expire(self, engine: Engine) -> None:
        while expire(engine) and not self._stop.is_set():
            pass

    def _give_back(self, engine: Engine) -> None:
        with engine.db.read() as c:
            free = queries.pages(c)[2]
        while free and not self._stop.is_set():
            left = engine.space.give_back(FREE_PAGES_PER_BITE)
            if left == free:
                break
            free = left
