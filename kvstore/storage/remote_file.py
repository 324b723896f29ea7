"""The file beside a store that holds the index of remote objects. It is a cache: what is damaged or unknown is made anew."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import ClosedError, CorruptStoreError, KVStoreError, NotAStoreError
from . import queries_remote, sqlite
from .db import MEMORY
from .paths import reserve_file
from .sqlite import Connection, translated

log = logging.getLogger("kvstore")
SUFFIX = "-remote"
TIMEOUT_MS = 5000
CACHE_KIB = 8192


class RemoteFile:
    """Two connections, each under a lock: a reader never waits while a listing is taken in. In memory they are one."""

    def __init__(self, path: str) -> None:
        """path: of the index itself, or ":memory:"."""
        self.path = path
        self._write_lock = threading.RLock()
        self._read_lock = self._write_lock if path == MEMORY else threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self.writer: Connection
        self._reader: Connection
        try:
            self._open()
        except (CorruptStoreError, NotAStoreError) as error:
            log.warning("the index of remote objects is made anew: %s", error.message)
            for suffix in ("", "-wal", "-shm"):
                with suppress(OSError):
                    os.unlink(path + suffix)
            self._open()

    def _open(self) -> None:
        if self.path != MEMORY:
            reserve_file(self.path)
        with translated(self.path):
            self.writer = self._connect()
            try:
                if not queries_remote.is_current(self.writer):
                    self._create()
                self._reader = self.writer if self.path == MEMORY else self._connect()
            except BaseException:
                self.writer.close()
                raise

    def _connect(self) -> Connection:
        c = sqlite.open_memory() if self.path == MEMORY else sqlite.open_file(self.path, writable=True)
        c.set_busy_timeout(TIMEOUT_MS)
        c.pragma("cache_size", -CACHE_KIB)
        c.pragma("temp_store", 2)
        c.pragma("trusted_schema", 0)
        if self.path != MEMORY:
            c.pragma("journal_mode", "wal")
            c.pragma("synchronous", 1)
        return c

    def _create(self) -> None:
        c = self.writer
        with c:
            if queries_remote.is_current(c):  # another process was first
                return
            if not sqlite.is_empty(c):
                raise NotAStoreError(f"{self.path} is of another version", path=self.path)
            queries_remote.create(c)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with self._write_lock:
            self._check()
            with translated(self.path), sqlite.immediate(self.writer):
                yield self.writer

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._read_lock:
            self._check()
            with translated(self.path):
                yield self._reader

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            with suppress(KVStoreError), translated(self.path):
                if self._reader is not self.writer:
                    self._reader.close()
                self.writer.close()
