"""The result of `layout.parse`, as frozen records. All offsets are bytes from the start of the parsed blob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from ..types import Stream

Envelope: TypeAlias = Literal["slot file", "session file", "sequence, with header", "sequence", "context"]
Range: TypeAlias = tuple[int, int]  # start, stop


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """One attention cache.

    `n_stream` is None in states older than the stream count. `cells` has the number of cells of each stream, `k_row` the
    distinct sizes of K rows. `rotation` is None if the words are absent, `v_layers` is 0 if V is not stored. `n_seq` is the
    number of sequence ids of every cell, None if it differs from cell to cell.
    """

    start: int
    stop: int
    n_stream: int | None
    cells: tuple[int, ...]
    cell_ext: int
    k_row: tuple[int, ...]
    n_layer: int
    rotation: tuple[int, int] | None
    v_layers: int
    v_transposed: bool
    n_seq: int | None
    streams: tuple[Stream, ...]
    kind: Literal["attention"] = "attention"

    @property
    def n_cells(self) -> int:
        return sum(self.cells)

    @property
    def max_pos(self) -> int:
        """The highest position; -1 without cells."""
        return max((int(s.pos.max()) for s in self.streams if s.n_cells), default=-1)

    @cached_property
    def data_stream(self) -> Stream | None:
        """The only stream with cells; None if no stream or several streams have cells."""
        filled = [s for s in self.streams if s.n_cells]
        return filled[0] if len(filled) == 1 else None

    @property
    def end_is_sure(self) -> bool:
        """Whether another tensor confirms the size of the last one, and with it the end of the cache."""
        sections = next((s.sections for s in self.streams if s.n_cells), ())
        if not sections:
            return True
        *others, last = sections
        return any(s.rows * s.width == last.rows * last.width for s in others if s.is_v == last.is_v or self.n_layer == 1)

    @property
    def shape(self) -> tuple[object, ...]:
        """What this part has in common in all states of one server."""
        return (self.kind, self.n_stream, self.n_layer, self.k_row, self.rotation, self.v_layers, self.v_transposed)

    @property
    def row_sizes(self) -> tuple[object, ...]:
        """Layers, types and row sizes: what this part has in common in all states of one model, however it is written."""
        stream = self.data_stream
        sections = () if stream is None else stream.sections
        return (self.n_layer, self.v_layers, *((s.type, s.rows * s.width, s.is_v) for s in sections))

    def holds_all(self, n: int) -> bool:
        """Whether one stream has each position below `n` exactly once."""
        stream = self.data_stream
        if stream is None or self.n_seq is None or n <= 0:
            return False
        below = stream.pos[stream.pos < n]
        if below.shape[0] != n:
            return False
        seen = np.zeros(n, np.bool_)
        seen[below] = True
        return bool(seen.all())

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "from": self.start,
            "to": self.stop,
            "n_stream": self.n_stream,
            "cells": list(self.cells),
            "cell_ext": self.cell_ext,
            "k_row": list(self.k_row),
            "n_layer": self.n_layer,
            "rotation": None if self.rotation is None else list(self.rotation),
            "v_layers": self.v_layers,
            "v_transposed": self.v_transposed,
        }


@dataclass(frozen=True, slots=True)
class RecurrentPart:
    """The state of the recurrent layers: one cell a sequence. `n_layer` counts all layers of the model.

    `rows` are the sizes of an R row and of an S row (S may be 0); there are `n_tensors` of each. `extra_row` is the index
    of the R tensor that is followed by one more row, and the size of that row; None if there is none.
    """

    start: int
    stop: int
    cells: tuple[int, ...]
    pos: tuple[int, ...]
    n_layer: int
    n_tensors: int
    rows: tuple[int, int]
    extra_row: tuple[int, int] | None = None
    kind: Literal["recurrent"] = "recurrent"

    @property
    def max_pos(self) -> int:
        return max(self.pos, default=-1)

    @property
    def shape(self) -> tuple[object, ...]:
        """What this part has in common in all states of one server."""
        return (self.kind, *self.row_sizes)

    @property
    def row_sizes(self) -> tuple[object, ...]:
        """Layers and row sizes: what this part has in common in all states of one model."""
        return (self.n_layer, self.n_tensors, self.rows, self.extra_row)

    @property
    def end_is_sure(self) -> bool:
        """Whether another tensor confirms the size of the last one, and with it the end of the part."""
        return self.n_tensors > 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "from": self.start,
            "to": self.stop,
            "cells": list(self.cells),
            "n_layer": self.n_layer,
        }


Part: TypeAlias = AttentionPart | RecurrentPart


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of a slot file: the window and recurrent parts after `n_tokens` tokens.

    `start` and `stop` bound the whole record, `target`, `draft` and `speculative` the blobs (empty ranges
    if absent); a target blob is an in-memory state with its header.
    """

    start: int
    stop: int
    n_tokens: int
    pos_min: int
    pos_max: int
    target: Range
    draft: Range
    speculative: Range


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a state.

    `size` is the size of the blob. `state_at` and `state_size` bound the state without its checkpoints. `tail` is the range
    of bytes at its end that are not understood, or None. `n_tokens` and `tokens_packed` are None if the envelope does not
    list tokens.
    """

    envelope: Envelope
    file_version: int | None
    n_tokens: int | None
    tokens_packed: bool | None
    size: int
    state_at: int
    state_size: int
    parts: tuple[Part, ...]
    checkpoints: tuple[Checkpoint, ...] | None
    tail: Range | None

    @cached_property
    def attention(self) -> tuple[AttentionPart, ...]:
        """The attention caches, in order."""
        return tuple(p for p in self.parts if isinstance(p, AttentionPart))

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of all attention caches, in order."""
        return tuple(s for p in self.attention for s in p.streams)

    @cached_property
    def stream_counts(self) -> tuple[int, ...]:
        """The number of streams of each attention cache."""
        return tuple(len(p.streams) for p in self.attention)

    @property
    def n_cells(self) -> int:
        """Cells of all attention caches together."""
        return sum(p.n_cells for p in self.attention)

    @cached_property
    def n_positions(self) -> int:
        """The number of tokens of the state: the listed ones; else the cells of its fullest cache, or the last position + 1
        where a window or a recurrent state has fewer cells."""
        if self.n_tokens is not None:
            return self.n_tokens
        cells = max((p.n_cells for p in self.attention), default=0)
        return max(cells, *(p.max_pos + 1 for p in self.parts))

    @cached_property
    def can_crop(self) -> bool:
        """Whether `crop` works at any position: the state has one sequence, only attention, and every position in every
        cache."""
        if self.envelope in ("context", "session file") or self.tail is not None:
            return False
        if len(self.attention) != len(self.parts):
            return False
        n = self.attention[0].n_cells
        return all(p.n_cells == n and p.holds_all(n) for p in self.attention)

    @property
    def crop_points(self) -> tuple[int, ...]:
        """The token counts of the checkpoints, ascending. If `can_crop`, `crop` also works at any other count."""
        return tuple(sorted({c.n_tokens for c in self._usable()}))

    def crop_limit(self, n: int) -> int:
        """The largest m <= `n` such that the state can be cropped to m tokens; 0 if there is none."""
        whole = self.n_positions
        if n >= whole:
            return whole
        if self.can_crop:
            return max(0, min(n, self.attention[0].n_cells))
        return max((p for p in self.crop_points if p <= n), default=0)

    def _usable(self) -> Iterator[Checkpoint]:
        for c in self.checkpoints or ():
            if 0 < c.n_tokens < self.n_positions and c.target[1] > c.target[0]:
                yield c

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without the keys that do not apply to the envelope."""
        out: dict[str, Any] = {
            "envelope": self.envelope,
            "file_version": self.file_version,
            "size": self.size,
            "state_at": self.state_at,
            "state_size": self.state_size,
            "parts": [p.as_dict() for p in self.parts],
            "checkpoints": None if self.checkpoints is None else [c.n_tokens for c in self.checkpoints],
            "can_crop": self.can_crop,
        }
        if self.tokens_packed is not None:
            out["n_tokens"] = self.n_tokens
            out["tokens_packed"] = self.tokens_packed
        if self.tail is not None:
            out["tail"] = list(self.tail)
        return out
