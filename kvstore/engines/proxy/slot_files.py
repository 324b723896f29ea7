"""The slot files that pass between the proxy and llama-server: complete, readable by their owner alone, always removed."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ... import slotfile
from ...errors import SlotFileError
from ..exchange import Exchange, MemoryExchange, owner_of

# Process id, number of this `SlotFiles`, random digits.
_NAME = re.compile(r"\.?kvstore-(\d+)-([0-9a-f]{8})[0-9a-f]{8}\.(?:bin|tmp)")
_LIVE: set[str] = set()  # those of this process; in a container, a killed proxy had the same process id
# Process ids are reused; no file is in use for this long.
OLD_SECONDS = 3600.0
CLOSE_SECONDS = 10.0
T = TypeVar("T")


def _alive(pid: int) -> bool:
    if os.name == "nt":  # there os.kill would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class SlotFiles:
    """Temporary files in the directory of llama-server's --slot-save-path."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._use = secrets.token_hex(4)
        _LIVE.add(self._use)

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A use of files that goes on if its caller is cancelled; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it where nobody waits

    async def close(self) -> None:
        """Waits for the uses under way, and leaves no file behind."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        _LIVE.discard(self._use)
        self.remove_stale()

    def remove_stale(self) -> list[str]:
        """Removes the files and links of proxies that were killed; the names. Other links are left alone."""
        gone = []
        for path in self.folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found is None:
                continue
            with suppress(OSError):
                pid, use = int(found[1]), found[2]
                if path.is_symlink() and owner_of(path) != pid:
                    continue
                live = use in _LIVE if pid == os.getpid() else _alive(pid)
                if not live or time.time() - path.lstat().st_mtime > OLD_SECONDS:
                    path.unlink()
                    gone.append(path.name)
        return gone

    def _new_path(self) -> Path:
        return self.folder / f"kvstore-{os.getpid()}-{self._use}{secrets.token_hex(4)}.bin"

    def for_save(self, *, in_memory: bool = False) -> Exchange:
        """An empty file for the server to write into."""
        return (MemoryExchange if in_memory else Exchange).for_save(self._new_path())

    def read(self, exchange: Exchange, n_written: int) -> slotfile.SlotFile:
        """A file into which the server says it wrote n_written bytes. Raises SlotFileError, OSError."""
        if exchange.size != n_written:
            raise SlotFileError(f"{exchange.path} has {exchange.size} bytes, the server wrote {n_written}")
        return slotfile.read(exchange.read())

    def for_restore(self, file: slotfile.SlotFile, *, in_memory: bool = False) -> Exchange:
        """A complete file for the server to read. Raises SlotFileError, OSError."""
        parts = (file.header(), file.state.data)
        return (MemoryExchange if in_memory else Exchange).for_restore(self._new_path(), parts)
