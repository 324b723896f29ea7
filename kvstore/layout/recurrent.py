"""Reads the recurrent part of a state: one cell a sequence, R of every recurrent layer, then S of every one.

    u32 n_cell | n_cell x (i32 pos, u32 n_seq, i32 id x n_seq) | u32 0 | u32 n_layer
    | m x (i32 type, u64 R, R x n_cell bytes) | m x (i32 type, u64 S, S x n_cell bytes)

n_layer counts all layers of the model, m only the recurrent ones. Nothing states m: all R have one size and all S another,
so the first tensor of another size is the first S. One layer may have one more row, (u64 row, row x n_cell bytes), after its R
tensor; the row has no type word (Qwen's per-layer embedding).
"""

from __future__ import annotations

from .reader import F32, FLOATS, HEADER_BYTES, MAX_LAYERS, MAX_ROW, MAX_SEQ, Misfit, Reader
from .types import RecurrentPart


def read_recurrent(reader: Reader, at: int, *, first: bool, is_context: bool) -> RecurrentPart:
    """The recurrent part at `at`; `first` says whether it is the first part of the state. Raises Misfit."""
    start = at
    n_cell = reader.u32(at, "the cell count")
    if not 0 < n_cell <= MAX_SEQ:
        raise Misfit(f"{n_cell} recurrent cells, not 1 to {MAX_SEQ}", at)
    pos, at = _cells(reader, at + 4, n_cell, is_context)
    if first and n_cell > 1 and pos == list(range(n_cell)) and not is_context:
        raise Misfit("a recurrent state with a cell for every position", at)
    trans, n_layer = reader.words(at, "the layer count")
    if trans:
        raise Misfit(f"the word before a recurrent state's layers is {trans}, not 0", at)
    if not 0 < n_layer <= MAX_LAYERS:
        raise Misfit(f"{n_layer} recurrent layers, not 1 to {MAX_LAYERS}", at + 4)
    return _Tensors(reader, n_cell, first).read(start, at + 8, tuple(pos), n_layer)


class _Tensors:
    """Reads R and S of a recurrent part with `n_cell` cells."""

    def __init__(self, reader: Reader, n_cell: int, first: bool) -> None:
        self.reader = reader
        self.n_cell = n_cell
        self.first = first

    def read(self, start: int, at: int, pos: tuple[int, ...], n_layer: int) -> RecurrentPart:
        r, at = self._tensor(at)
        if r == 0:
            raise Misfit("an R row of 0 bytes", at)
        extra: tuple[int, int] | None = None
        n = 1  # R tensors, and S tensors of the same size
        while n < 2 * n_layer:
            try:
                row, stop = self._tensor(at)
            except Misfit as e:
                if extra is not None or n > n_layer:
                    raise
                row, at = self._extra_row(at, e)
                extra = (n - 1, row)
                continue
            if row != r:
                break
            n, at = n + 1, stop
        if n == 2 * n_layer:
            # R and S have the same size. With fewer tensors, a truncated part could not be recognised.
            if extra is not None and extra[0] >= n_layer:
                raise Misfit("a row between the S tensors of a recurrent state", at)
            return self._part(start, at, pos, n_layer, n_layer, (r, r), extra)
        if n > n_layer:
            raise Misfit(f"{n} R tensors in a model of {n_layer} layers", at)
        s, _ = self._tensor(at)
        for _ in range(n):
            row, stop = self._tensor(at)
            if row != s:
                raise Misfit(f"an S row of {row} bytes after one of {s}", at)
            at = stop
        return self._part(start, at, pos, n_layer, n, (r, s), extra)

    def _part(
        self,
        start: int,
        stop: int,
        pos: tuple[int, ...],
        n_layer: int,
        n_tensors: int,
        rows: tuple[int, int],
        extra: tuple[int, int] | None,
    ) -> RecurrentPart:
        return RecurrentPart(start, stop, (self.n_cell,), pos, n_layer, n_tensors, rows, extra)

    def _tensor(self, at: int) -> tuple[int, int]:
        """The row size of the tensor at `at`, and its end."""
        self.reader.count_tensor(at)
        kind, row = self.reader.row_header(at)
        # As the first part, the same bytes with another type are an attention cache of early 2025.
        if kind != F32 and (self.first or kind not in FLOATS):
            raise Misfit(f"a recurrent tensor of type {kind}", at)
        self.reader.need(at + HEADER_BYTES, row * self.n_cell, "a tensor")
        return row, at + HEADER_BYTES + row * self.n_cell

    def _extra_row(self, at: int, instead: Misfit) -> tuple[int, int]:
        """The size of the extra row at `at`, and its end. Raises `instead` if there is none."""
        if self.reader.left(at) < 8:
            raise instead
        row = self.reader.u64(at, "the extra row of a recurrent state")
        if not 0 < row <= MAX_ROW or row % 2:
            raise instead
        self.reader.need(at + 8, row * self.n_cell, "the extra row of a recurrent state")
        return row, at + 8 + row * self.n_cell


def _cells(reader: Reader, at: int, n_cell: int, is_context: bool) -> tuple[list[int], int]:
    """Positions and the offset after the table. A context's cells list sequence ids, each id once."""
    low = 1 if is_context else 0
    positions = []
    ids: set[int] = set()
    for _ in range(n_cell):
        pos, n_seq = reader.words(at, "the cell table")
        if pos >> 31:
            raise Misfit("a position is negative", at)
        if not low <= n_seq <= low * MAX_SEQ:
            raise Misfit(f"a recurrent cell has {n_seq} sequence ids", at)
        reader.need(at + 8, 4 * n_seq, "the cell table")
        for i in range(n_seq):
            seq_id = reader.u32(at + 8 + 4 * i, "the cell table")
            if seq_id >= MAX_SEQ or seq_id in ids:
                raise Misfit(f"a recurrent cell has sequence id {seq_id}", at)
            ids.add(seq_id)
        positions.append(pos)
        at += 8 + 4 * n_seq
    return positions, at
