"""Fetches one object: ranges, opened as they come, straight into the state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import Bytes
from . import contents, sealing
from .contents import Opened
from .index import Indexed
from .names import Names
from .sealing import Opener, RefusedError

RANGES_AT_ONCE = 4


class RangeReader(Protocol):
    async def get_range(self, path: str, start: int, length: int) -> Any: ...


@dataclass(slots=True)
class Progress:
    """How many bytes came; of a fetch that is given up this is the measurement."""

    n_bytes: int = 0


async def fetch(
    store: RangeReader, found: Indexed, names: Names, progress: Progress, *, check: bool = True
) -> tuple[Opened | None, Bytes]:
    """The start of an object, compared with its name before the rest is asked for, and all its plain bytes.

    Raises RefusedError, GoneError, RemoteError. check=False leaves the comparison out, for an object whose fingerprint is
    not known.
    """
    if found.size < sealing.MIN_BYTES:
        raise RefusedError("it is too small to be a sealed object")
    sealing.plain_size(found.size)
    loop = asyncio.get_running_loop()
    path = found.path

    async def piece(start: int, length: int) -> Any:
        data = await store.get_range(path, start, length)
        if len(data) != length:
            raise RefusedError("it is cut off")
        progress.n_bytes += length
        return data

    first = await piece(0, sealing.first_length(found.size))
    opener = Opener(first, found.size, names.key, found.name.sealed_name)
    await loop.run_in_executor(None, opener.open, first[sealing.HEADER.size :], 0)
    del first
    opened: Opened | None = None
    here = min(opener.size, sealing.CHUNK * sealing.CHUNKS_PER_PIECE)
    if check and contents.head_bytes(opener.plain, found.name.n_tokens) <= here:
        opened = await loop.run_in_executor(None, contents.read_head, opener.plain, found.name, names)
    gate = asyncio.Semaphore(RANGES_AT_ONCE)

    async def rest(start: int, length: int, number: int) -> None:
        async with gate:
            data = await piece(start, length)
            await loop.run_in_executor(None, opener.open, data, number)

    await together([rest(*each) for each in sealing.pieces(found.size)])
    if check and opened is None:
        opened = await loop.run_in_executor(None, contents.read_head, opener.plain, found.name, names)
    return opened, opener.plain


async def together(calls: list[Awaitable[Any]]) -> list[Any]:
    """All results; where one call fails, or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
