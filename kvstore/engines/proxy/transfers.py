"""Saves and restores of llama-server's slots: through memory where that works and there is room, else through the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from ... import slotfile
from ...errors import KVStoreError, SlotFileError
from .. import probe as probing
from ..exchange import Exchange, MemoryExchange
from .slot_files import SlotFiles
from .slot_memory import SlotMemory
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
T = TypeVar("T")


class Act(Protocol):
    """A request to save or restore a slot; the answer. Raises UpstreamError."""

    async def __call__(self, slot: int, action: str, body: Mapping[str, Any], timeout: float) -> Any: ...


class Transfers:
    """`count` counts the states by the way they took.

    A transfer through memory that the server refuses is done again through the disk. If that works, memory is at fault,
    and is not used any more with this server.
    """

    def __init__(
        self, act: Act, files: SlotFiles, memory: SlotMemory, count: Callable[[str], None] | None = None
    ) -> None:
        self._act = act
        self._files = files
        self._memory = memory
        self._count = count or (lambda name: None)

    async def save(self, slot: int, n_tokens: int | None, timeout: float) -> slotfile.SlotFile:
        """What a slot holds; n_tokens is an estimate of how many, None where nothing is known of it.

        Raises UpstreamError, SlotFileError, OSError.
        """
        memory = self._memory
        size = 0 if n_tokens is None else memory.estimate(n_tokens)

        async def through(in_memory: bool) -> slotfile.SlotFile:
            return await self._save(slot, timeout, in_memory)

        return await self._transfer(through, size, counts=n_tokens is not None)

    async def restore(
        self, slot: int, file: slotfile.SlotFile, timeout: float, begin: Callable[[], bool] | None = None
    ) -> int:
        """Puts a state into a slot; the number of tokens that the server took. `begin` is called when the file is ready:
        where it returns False the server is not asked. Raises UpstreamError, SlotFileError, OSError."""

        begun = False

        def begins() -> bool:
            nonlocal begun
            begun = begun or begin is None or begin()
            return begun

        async def through(in_memory: bool) -> int:
            return await self._restore(slot, file, timeout, in_memory, begins)

        return await self._transfer(through, len(file.header()) + int(file.state.nbytes))

    async def _transfer(self, through: Callable[[bool], Awaitable[T]], size: int, *, counts: bool = True) -> T:
        memory = self._memory
        if not size or not memory.reserve(size):
            result = await through(False)
            if counts:
                self._count("disk_transfers")
            return result
        try:
            result = await through(True)
            self._count("memory_transfers")
            return result
        except (UpstreamError, SlotFileError, OSError) as error:
            if isinstance(error, UpstreamError) and error.status is None:
                raise
            result = await through(False)
            self._count("disk_transfers")
            memory.turn_off(f"the server does not see it any more: {error}")
            log.warning("states take the disk from now on: only there the server found one: %s", error)
            return result
        finally:
            memory.release(size)

    async def _save(self, slot: int, timeout: float, in_memory: bool) -> slotfile.SlotFile:
        loop = asyncio.get_running_loop()
        exchange = self._files.for_save(in_memory=in_memory)
        try:
            answer = await self._act(slot, "save", {"filename": exchange.path.name}, timeout)
            n_written = int(answer["n_written"])
            file = await loop.run_in_executor(None, self._files.read, exchange, n_written)
            if isinstance(exchange, MemoryExchange) and exchange.mapping is not None:
                self._memory.hold(exchange.mapping)
            self._memory.seen(int(file.tokens.shape[0]), n_written)
            return file
        finally:
            exchange.close()

    async def _restore(
        self, slot: int, file: slotfile.SlotFile, timeout: float, in_memory: bool, begins: Callable[[], bool]
    ) -> int:
        loop = asyncio.get_running_loop()

        def ready() -> Exchange:
            return self._files.for_restore(file, in_memory=in_memory)

        exchange = await loop.run_in_executor(None, ready)
        try:
            if not begins():
                return 0
            answer = await self._act(slot, "restore", {"filename": exchange.path.name}, timeout)
            return int(answer["n_restored"])
        finally:
            # The removal is not awaited: the system takes a while to free a large file.
            loop.run_in_executor(None, exchange.close)

    async def try_memory(self, slot: int, file: slotfile.SlotFile, timeout: float) -> None:
        """Restores a file into a slot and saves it again, through memory.

        The restore comes first: it writes nothing, should the link lead to something else where the server is. Raises
        UpstreamError where the server cannot be reached.
        """
        memory = self._memory
        memory.new_server()
        memory.seen(int(file.tokens.shape[0]), int(file.state.nbytes))
        if not memory.budget:
            return
        try:
            n = await self._restore(slot, file, timeout, True, lambda: True)
            if n != file.tokens.shape[0]:
                raise SlotFileError(f"of {file.tokens.shape[0]} tokens the server restored {n}")
            back = await self._save(slot, timeout, True)
            if back.tokens.tolist() != file.tokens.tolist() or _rows(back) != _rows(file):
                raise SlotFileError("the server saved something else than it had restored")
        except (KVStoreError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UpstreamError) and error.status is None:
                raise
            memory.turn_off(f"the server cannot open it: {error}")
            log.info("states take the disk: %s", memory.off)
            return
        memory.turn_on()
        log.info("states pass through memory, up to %d MiB", memory.budget >> 20)


def _rows(file: slotfile.SlotFile) -> str:
    return probing.rows_digest(file.state)
