"""Feeds the links of a chain to a decoder: at once, or by a thread, while the caller reads the next piece."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from types import TracebackType

import numpy as np

from .. import bkvd
from ..types import Bytes
from .blobs import PIECE_BYTES

# From this size of a state a thread costs less than it saves. A state of 198 MiB in 40 links took 86 ms without and 62 ms with
# it (27 to read, 40 to decode and 12 for the digest).
PARALLEL_BYTES = 8 << 20
BUFFERS = 4


class Feed:
    """Feeds a decoder in the thread of the caller."""

    def __init__(self, decoder: bkvd.ChainDecoder) -> None:
        self._decoder = decoder
        self._buffer: Bytes | None = None
        self.at = 0  # the link that is being decoded

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def buffer(self) -> Bytes:
        """Room for the next piece."""
        if self._buffer is None:
            self._buffer = np.empty(PIECE_BYTES, np.uint8)
        return self._buffer

    def link(self, at: int, kind: str, stored: int, sample: int | None, pieces: Iterable[Bytes]) -> None:
        """Feeds the pieces of the link number `at`. Raises what the decoder does, maybe for an earlier link."""
        self.at = at
        self._decoder.feed(kind, stored, pieces, sample=sample)

    def finish(self) -> Bytes:
        return self._decoder.finish()


class ThreadFeed(Feed):
    """Feeds a decoder in a thread of its own. Pieces go through a few buffers; what is in RAM goes as it is."""

    def __init__(self, decoder: bkvd.ChainDecoder) -> None:
        super().__init__(decoder)
        self._links: queue.SimpleQueue[tuple[int, str, int, int | None] | None] = queue.SimpleQueue()
        self._pieces: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(np.empty(PIECE_BYTES, np.uint8))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-decode", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def buffer(self) -> Bytes:
        return self._free.get()

    def link(self, at: int, kind: str, stored: int, sample: int | None, pieces: Iterable[Bytes]) -> None:
        self._links.put((at, kind, stored, sample))
        try:
            for piece in pieces:
                self._pieces.put(piece)
                if self._error is not None:
                    break
        finally:
            self._pieces.put(None)
        self._raise()

    def finish(self) -> Bytes:
        self._end()
        self._raise()
        return self._decoder.finish()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._links.put(None)
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (link := self._links.get()) is not None:
            at, kind, stored, sample = link
            left = self._left()
            if self._error is None:
                self.at = at
                try:
                    self._decoder.feed(kind, stored, left, sample=sample)
                except BaseException as error:  # noqa: BLE001  raised by the thread that reads
                    self._error = error
            for _ in left:
                pass

    def _left(self) -> Iterable[Bytes]:
        """The pieces of a link that are left; each goes back to where it can be filled again."""
        while (piece := self._pieces.get()) is not None:
            yield piece
            room = piece if piece.base is None else piece.base
            if isinstance(room, np.ndarray) and room.size == PIECE_BYTES and room.flags.writeable:
                self._free.put(room)
