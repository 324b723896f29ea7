"""Memory that grows without being copied."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from ..types import Bytes

# Smaller arrays are moved to the heap: the number of mappings of a process is limited, and a cache has many small deltas.
_HEAP_BYTES = 1 << 20

# madvise: populate the pages now, all at once (Linux 5.14; the mmap module does not name it). Encoding 64 MB of literals
# took 32 ms with a page fault for each page, and takes 21 ms this way.
_POPULATE_WRITE = 23


class Growing:
    """Output that grows in small steps, so that at most one step is allocated but unused, and nothing is copied.

    `mapped` (Linux) makes it an anonymous mapping, since mremap moves pages instead of bytes. A realloc of a few MB may stay
    in the heap, where it copies, and for a moment holds both blocks. `populate`: new pages are made at once; without it only
    those that are written take memory, and huge ones are asked for.
    """

    def __init__(self, room: int, *, mapped: bool, populate: bool = True) -> None:
        self.mapping: mmap.mmap | None = None
        self.array: Bytes | None = None
        self._populated = populate
        if mapped:
            self.mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._advise(0, room)
        else:
            self.array = np.empty(room, np.uint8)

    def grow(self, room: int) -> None:
        if self.mapping is not None:
            start = len(self.mapping)
            self.mapping.resize(room)
            self._advise(start, room)
        elif self.array is not None:
            self.array.resize(room, refcheck=False)

    def _advise(self, start: int, stop: int) -> None:
        if self.mapping is None or stop <= start:
            return
        with contextlib.suppress(OSError):
            if self._populated:
                self.mapping.madvise(_POPULATE_WRITE, start, stop - start)
            else:
                self.mapping.madvise(mmap.MADV_HUGEPAGE)

    def buffer(self) -> Any:
        return self.mapping if self.mapping is not None else self.array

    def finish(self, n: int) -> Bytes:
        if self.mapping is not None and n < _HEAP_BYTES:
            return np.array(np.frombuffer(self.mapping, np.uint8, n))
        self.grow(n)
        return np.frombuffer(self.mapping, np.uint8, n) if self.mapping is not None else self.array  # type: ignore[return-value]
