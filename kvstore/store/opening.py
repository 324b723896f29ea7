"""Opens and closes the core of a store, and cleans up after an open that fails half way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ..errors import BusyError, DiskFullError, KVStoreError
from ..storage import closed_file, db, disk, geometry, queries_blobs
from ..util.fsutil import MissingFileError
from . import maintenance
from .core import StoreCore
from .write_behind import WriteBehind

CLOSE_SECONDS = 2.0
TRIES = 8  # of an open whose new file another process removes


class Closable(Protocol):
    def is_thread(self) -> bool: ...
    def close(self) -> None: ...


def close_core(
    core: StoreCore, behind: WriteBehind, background: maintenance.Maintenance | None, remote: Closable | None = None
) -> None:
    if os.getpid() != core.db.pid:
        return  # a forked child leaves its parent's files alone
    # Any thread may collect an unused Store: these threads cannot wait for themselves.
    if behind.is_writer() or (remote is not None and remote.is_thread()):
        threading.Thread(target=close_core, args=(core, behind, background, remote), name="kvstore-close").start()
        return
    if remote is not None:
        remote.close()
    behind.close()
    if background is not None:
        background.stop()
    if not core.db.readonly:
        for step in (core.delete_abandoned_blobs, core.flush, lambda: maintenance.expire(core), core.db.truncate_log):
            with suppress(KVStoreError):  # what fails here (a full disk, a writer elsewhere) costs counts, not entries
                step()
        with suppress(KVStoreError):
            give_back(core)
        if core.spare is not None:
            core.spare.give_up()
        core.db.leave_spare()
    core.db.close()
    core.ram.clear()


def give_back(core: StoreCore) -> None:
    """Gives free pages back to the file system, for CLOSE_SECONDS at the most, and only while no other process writes."""
    if core.db.memory:
        return
    give_up = time.monotonic() + CLOSE_SECONDS
    with core.db.read() as c:
        left = queries_blobs.pages(c)[2]
    while left and time.monotonic() < give_up:
        before, left = left, core.budget.shrink(geometry.FREE_BYTES_PER_RUN)
        if left >= before:
            return


def open_core(path: str, build: Callable[[], StoreCore], *, create: bool, key: str | None, timeout: float) -> StoreCore:
    """A core whose file is prepared. Where that fails, a file created for it is removed, unless another process filled it."""
    spare, before, created = None, None, False
    started = time.monotonic()
    for tries_left in reversed(range(TRIES)):
        if not create and path != db.MEMORY and not os.path.exists(path):
            raise MissingFileError(path)
        if create:
            created = db.reserve_file(path) or (created and db.identity(path) == before)
        before = db.identity(path)
        if create and spare is None:
            spare = disk.Spare(path)
            if not spare.held and disk.free_bytes(path) < disk.SPARE_BYTES:
                closed_file.relieve(path, key)
                spare.take(disk.spare_bytes(path))
        try:
            core = build()
            core.spare = spare
            try:
                core.prepare()
                core.db.refuse_if_moved()
            except BaseException:
                core.db.close()
                raise
        except BaseException as error:
            full = isinstance(error, DiskFullError) and spare is not None and spare.give_up()
            moved = create and isinstance(error, KVStoreError) and db.identity(path) != before
            # SQLite does not wait where two processes switch a new file's log on at once.
            busy = isinstance(error, BusyError) and time.monotonic() - started < timeout
            if busy:
                time.sleep(min(timeout, 0.02))
            if tries_left and (full or moved or busy):  # moved: another open that failed took the empty file away with it
                continue
            if spare is not None:
                spare.give_up()
            if created:
                closed_file.remove_if_empty(path, before, key)
            raise
        return core
    raise AssertionError("the last try returns or raises")
