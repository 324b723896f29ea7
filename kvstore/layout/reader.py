"""Bounds-checked reads of what all layouts consist of: words, cell tables and tensors.

Nothing read is trusted: every size is compared with the bytes that are left before it is used. Python's integers do not
overflow, so a comparison is enough. A piece that does not fit raises `Misfit`, which the grammar catches to try the next
candidate. Its text and offset become the final error.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..types import Bytes, Section, Stream

MAX_STREAMS = 64
MAX_SEQ = 256
MAX_LAYERS = 4096
MAX_ROW = 1 << 24
MAX_ELEMENT = 16
MAX_EMBD = 1 << 20
MAX_CELLS = 1 << 24  # bounds the time of a parse; the largest contexts have 2^20 cells
MAX_MIXED_CELLS = 1 << 20  # the same for tables that are read cell by cell
_MAX_POS = (1 << 31) - 1
MAX_TYPE = 255  # in a tensor header that is not understood; ggml has about forty types
MAX_TENSORS = 1 << 18  # headers read for all candidates of one state; real states need hundreds

# ggml type id -> bytes of one block (a row is a whole number of them), from ggml's type traits.
BLOCK_BYTES = {
    0: 4,  # f32
    1: 2,  # f16
    2: 18,  # q4_0
    3: 20,  # q4_1
    6: 22,  # q5_0
    7: 24,  # q5_1
    8: 34,  # q8_0
    9: 36,  # q8_1
    10: 84,  # q2_K
    11: 110,  # q3_K
    12: 144,  # q4_K
    13: 176,  # q5_K
    14: 210,  # q6_K
    15: 292,  # q8_K
    20: 18,  # iq4_nl
    24: 1,  # i8
    25: 2,  # i16
    26: 4,  # i32
    28: 8,  # f64
    30: 2,  # bf16
    39: 17,  # mxfp4
}
F32 = 0
PLAIN_BYTES = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 28: 8, 30: 2}  # types whose elements stand alone: V can be transposed
FLOATS = frozenset({0, 1, 30})

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_WORDS = struct.Struct("<II")
_HEADER = struct.Struct("<iQ")
_HEADER_T = struct.Struct("<iII")
_CELL = struct.Struct("<iI")
HEADER_BYTES = 12


class Misfit(Exception):
    """A candidate does not fit: `what` is wrong `at` this byte. Only the grammar catches it."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.what = what
        self.at = at


class Cells(NamedTuple):
    """A cell table: pos int32 (n,), ext uint8 (n, cell_ext), its end, the sequence ids per cell (None: mixed)."""

    pos: npt.NDArray[np.int32]
    ext: Bytes
    stop: int
    n_seq: int | None


class Reader:
    """Reads from `data` (uint8, shape (size,)) up to `stop`. It caches cell tables, because candidates read them again."""

    def __init__(self, data: Bytes, stop: int | None = None) -> None:
        self.data = data
        self.stop = int(data.shape[0]) if stop is None else stop
        self.view = data.data
        self._tensors = 0
        self._tables: dict[tuple[int, int, int, bool], Cells | Misfit] = {}

    def left(self, at: int) -> int:
        return self.stop - at

    def need(self, at: int, n: int, what: str) -> None:
        if n > self.stop - at:
            raise Misfit(f"{what} is cut short", at)

    def u32(self, at: int, what: str) -> int:
        self.need(at, 4, what)
        return int(_U32.unpack_from(self.view, at)[0])

    def u64(self, at: int, what: str) -> int:
        self.need(at, 8, what)
        return int(_U64.unpack_from(self.view, at)[0])

    def words(self, at: int, what: str) -> tuple[int, int]:
        self.need(at, 8, what)
        a, b = _WORDS.unpack_from(self.view, at)
        return int(a), int(b)

    def column(self, at: int, n: int, stride: int, dtype: str) -> npt.NDArray[Any]:
        """A strided view of one field of a table. shape (n,)."""
        field: npt.NDArray[Any] = np.ndarray((n,), dtype, self.data, at, (stride,))
        return field

    def cells(self, at: int, n: int, ext: int, bare: bool = False) -> Cells:
        """The table of `n` cells at `at`; `bare`: cells without a sequence id (n_seq 0)."""
        key = (at, n, ext, bare)
        found = self._tables.get(key)
        if found is None:
            try:
                found = self._read_cells(at, n, ext, bare)
            except Misfit as e:
                found = e
            self._tables[key] = found
        if isinstance(found, Misfit):
            raise found
        return found

    def _read_cells(self, at: int, n: int, ext: int, bare: bool) -> Cells:
        if n > MAX_CELLS:
            raise Misfit(f"{n} cells are too many", at)
        n_seq = self._n_seq(at, ext, bare)
        stride = 8 + ext + 4 * n_seq
        # A wrong width shows in the second cell: check a few before reading the whole table.
        for count in (2, 64, n):
            count = min(count, n)
            self.need(at, count * stride, "the cell table")
            if not (self.column(at + 4, count, stride, "<u4") == n_seq).all():
                if bare:
                    raise Misfit("a cell has sequence ids where the first has none", at)
                return self._walk(at, n, ext)
        pos = self.column(at, n, stride, "<i4").astype(np.int32)
        if int(pos.min()) < 0:
            raise Misfit("a position is negative", at)
        extra = np.ndarray((n, ext), np.uint8, self.data, at + 8, (stride, 1)).copy() if ext else _no_ext(n)
        for i in range(n_seq):
            # As unsigned, a negative id is too large as well.
            if int(self.column(at + 8 + ext + 4 * i, n, stride, "<u4").max()) >= MAX_SEQ:
                raise Misfit("a sequence id is out of range", at)
        return Cells(pos, extra, at + n * stride, n_seq)

    def _n_seq(self, at: int, ext: int, bare: bool) -> int:
        self.need(at, 8, "the cell table")
        n_seq = int(_CELL.unpack_from(self.view, at)[1])
        if bare and n_seq:
            raise Misfit(f"a cell has {n_seq} sequence ids, not 0", at)
        if not bare and not 0 < n_seq <= MAX_SEQ:
            raise Misfit(f"a cell has {n_seq} sequence ids, not 1 to {MAX_SEQ}", at)
        return n_seq

    def _walk(self, at: int, n: int, ext: int) -> Cells:
        """A table whose cells have different numbers of sequence ids: sequences of a whole context that share cells."""
        if n > MAX_MIXED_CELLS:
            raise Misfit(f"{n} cells with different numbers of sequence ids are too many", at)
        self.need(at, n * (12 + ext), "the cell table")
        view, stop, read, table = self.view, self.stop, _CELL.unpack_from, at
        positions, starts = array("i"), array("q")
        fixed = 8 + ext
        for _ in range(n):
            if stop - at < fixed:
                raise Misfit("the cell table is cut short", at)
            p, k = read(view, at)
            if p < 0 or not 0 < k <= MAX_SEQ:
                raise Misfit(f"a cell has position {p} and {k} sequence ids", table)
            positions.append(p)
            starts.append(at)
            at += fixed + 4 * k
        if at > stop:
            raise Misfit("the cell table is cut short", stop)
        offsets = np.frombuffer(starts, np.int64) + 8
        extra = np.empty((n, ext), np.uint8)
        for i in range(ext):
            extra[:, i] = self.data[offsets + i]
        return Cells(np.frombuffer(positions, np.int32), extra, at, None)

    def count_tensor(self, at: int) -> None:
        """Counts a tensor header that is read, because hostile bytes could make us read them without end."""
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise Misfit("more tensors than any model has", at)

    def tensor(self, at: int, n_cells: int, *, is_v: bool, transposed: bool) -> Section:
        """The tensor whose header is at `at`; it ends at `section_stop`."""
        self.count_tensor(at)
        if transposed:
            self.need(at, HEADER_BYTES, "a tensor header")
            kind, width, rows = _HEADER_T.unpack_from(self.view, at)
            if PLAIN_BYTES.get(kind) != width or width > MAX_ELEMENT:
                raise Misfit(f"a transposed tensor has type {kind} and elements of {width} bytes", at)
            if not 0 < rows <= MAX_EMBD:
                raise Misfit(f"a transposed tensor has {rows} rows", at)
        else:
            kind, width = self.row_header(at)
            rows = 1
            if width == 0:
                raise Misfit("a tensor row has 0 bytes", at)
        self.need(at + HEADER_BYTES, rows * width * n_cells, "a tensor")
        return Section(at + HEADER_BYTES, width, rows, kind, is_v)

    def row_header(self, at: int) -> tuple[int, int]:
        """Type and bytes of a row of the tensor whose header is at `at`."""
        self.need(at, HEADER_BYTES, "a tensor header")
        kind, row = _HEADER.unpack_from(self.view, at)
        block = BLOCK_BYTES.get(kind)
        if block is None:
            raise Misfit(f"a tensor has type {kind}, which a cache cannot have", at)
        if row > MAX_ROW or row % block:
            raise Misfit(f"a tensor row of type {kind} has {row} bytes", at)
        return int(kind), int(row)

    # What the bytes after a part look like. If there are fewer bytes than needed, those that are there decide.

    def looks_like_tensor(self, at: int) -> bool:
        """Whether the 12 bytes at `at` can be the header of a tensor, by rows or transposed, of a known type or not."""
        if self.left(at) < HEADER_BYTES:
            return False
        kind, row = _HEADER.unpack_from(self.view, at)
        _, width, rows = _HEADER_T.unpack_from(self.view, at)
        by_rows = 0 < row <= MAX_ROW
        transposed = 0 < width <= MAX_ELEMENT and 0 < rows <= MAX_EMBD
        return bool(0 <= kind <= MAX_TYPE and (by_rows or transposed))

    def looks_like_v(self, streams: tuple[Stream, ...]) -> bool:
        """Whether V follows the K of a cache: a tensor with the type or the row size of K."""
        at = max(s.stop for s in streams if s.n_cells)
        if self.left(at) < HEADER_BYTES:
            return True
        kind, row = _HEADER.unpack_from(self.view, at)
        _, width, rows = _HEADER_T.unpack_from(self.view, at)
        known = {(s.type, s.width) for stream in streams for s in stream.sections}
        return any(kind == k or row == w or (width <= MAX_ELEMENT and width * rows == w) for k, w in known)

    def looks_like_attention(self, at: int) -> bool:
        """Whether an attention cache starts at `at`: its streams up to the first cell."""
        words = self._words(at, 1 + MAX_STREAMS + 3)
        if not words or not 0 < words[0] <= MAX_STREAMS:
            return False
        first = next((i for i, n_cell in enumerate(words[1 : 1 + words[0]], 1) if n_cell), None)
        if first is None:
            return len(words) <= words[0]  # else it is a complete cache without cells
        return _within(words[first:], (1, MAX_CELLS), (0, _MAX_POS), (1, MAX_SEQ))

    def looks_like_recurrent(self, at: int, is_context: bool) -> bool:
        """Whether a recurrent part starts at `at`, by its first cells and the layer count after them.

        Only a context has several cells, and its cells have sequence ids: zeros are not such a part.
        """
        words = self._words(at, 17)
        if not words or not 0 < words[0] <= (MAX_SEQ if is_context else 1):
            return False
        i = 1
        for _ in range(words[0]):
            cell = words[i : i + 2]
            if not _within(cell, (0, _MAX_POS), (1, MAX_SEQ) if is_context else (0, 0)):
                return False
            if len(cell) < 2:
                return True
            i += 2 + cell[1]
        return _within(words[i:], (0, 0), (1, MAX_LAYERS))

    def _words(self, at: int, n: int) -> list[int]:
        """Up to `n` complete words from `at` on."""
        n = min(n, max(0, self.left(at)) // 4)
        return list(struct.unpack_from(f"<{n}I", self.view, at))


def _within(words: list[int], *bounds: tuple[int, int]) -> bool:
    """Whether each word is within its bounds. Words without bounds, and bounds without a word, are ignored."""
    return all(low <= word <= high for word, (low, high) in zip(words, bounds, strict=False))


def section_stop(section: Section, n_cells: int) -> int:
    """The first byte after a tensor."""
    return section.start + section.rows * section.width * n_cells


def _no_ext(n: int) -> Bytes:
    return np.empty((n, 0), np.uint8)
