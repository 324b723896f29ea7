"""Crops a state to its first tokens: the result is the state that the engine would have written after those tokens.

In a state of pure attention, the cells at and after the new end are removed, with their rows. A window or a recurrent state
cannot be cropped. If the state has a checkpoint at exactly the wanted number of tokens, the other caches are cropped, and
the partial state in the checkpoint (its target blob without the io header) replaces the parts that it repeats. Measured with
llama-server of October 2026 on gemma3 and jamba: the server continues such a state with the same tokens. It does not continue
a bare window, since it needs cells from before the window; so the checkpoint of a window is kept, too.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError, SlotFileError
from ..slotfile import head_bytes, read_head
from ..types import Blob, Bytes, Stream
from ..util.buffers import as_u8
from .parsing import CHECKPOINT_MAGIC, CHECKPOINT_VERSION, parse
from .reader import HEADER_BYTES
from .types import AttentionPart, Checkpoint, Layout, Part

# Up to this number of runs, cells are copied as slices; more runs are gathered by index.
_MAX_RUNS = 64


class Writer:
    """Bytes that are computed in place: `write` fills `out`, uint8 of shape (size,)."""

    size: int

    def write(self, out: Bytes) -> None:
        raise NotImplementedError


class _Rows(Writer):
    """The cells `runs` (index ranges) of a table of `rows` rows with `n_cells` cells of `width` bytes each."""

    def __init__(self, source: Bytes, rows: int, n_cells: int, width: int, runs: list[tuple[int, int]]) -> None:
        self.source = source.reshape(rows, n_cells, width)
        self.runs = runs
        self.n_kept = sum(b - a for a, b in runs)
        self.size = rows * self.n_kept * width

    def write(self, out: Bytes) -> None:
        rows, _, width = self.source.shape
        target = out.reshape(rows, self.n_kept, width)
        if len(self.runs) > _MAX_RUNS:
            kept = np.concatenate([np.arange(a, b) for a, b in self.runs])
            np.take(self.source, kept, axis=1, out=target, mode="clip")  # clip: "raise" would gather into a copy
            return
        at = 0
        for a, b in self.runs:
            target[:, at : at + b - a] = self.source[:, a:b]
            at += b - a


Piece: TypeAlias = bytes | Bytes | Writer


def crop(blob: Blob, n_tokens: int) -> Bytes:
    """The state of the first `n_tokens` tokens. shape (n_bytes,), uint8, newly allocated.

    The envelope stays the same. The token list of a slot file is cropped too, and earlier checkpoints are kept. For all
    tokens of the state the result is a copy. Raises LayoutError if the state is not understood, has fewer tokens, or cannot
    be cropped there (`Layout.crop_limit` gives the nearest count that works).
    """
    data = as_u8(blob)
    layout = parse(data)
    n = int(n_tokens)
    if n <= 0:
        raise LayoutError(f"cannot cut a state to {n} tokens")
    whole = layout.n_positions
    if n == whole:
        copy: Bytes = data.copy()
        return copy
    if n > whole:
        raise LayoutError(f"cannot cut to {n} tokens: the state has {whole}", n_tokens=whole)
    if layout.can_crop:
        parts = [piece for part in layout.attention for piece in crop_part(data, part, n)]
        kept = [c for c in layout.checkpoints or () if c.n_tokens < n]
    else:
        parts, has_window = _from_checkpoint(data, layout, n)
        kept = [c for c in layout.checkpoints or () if c.n_tokens < n or (has_window and c.n_tokens == n)]
    return assemble([*_head(data, layout, n), *parts, *_appendix(data, kept)])


def assemble(pieces: list[Piece]) -> Bytes:
    """The pieces one after another, in one new array."""
    sizes = [p.size if isinstance(p, Writer) else len(p) for p in pieces]
    out = np.empty(sum(sizes), np.uint8)
    at = 0
    for piece, size in zip(pieces, sizes, strict=True):
        target = out[at : at + size]
        if isinstance(piece, Writer):
            piece.write(target)
        elif isinstance(piece, bytes):
            if piece:
                target[:] = np.frombuffer(piece, np.uint8)
        else:
            target[:] = piece
        at += size
    return out


def _head(data: Bytes, layout: Layout, n: int) -> list[Piece]:
    """The bytes before the state, with the token list cropped to `n`."""
    if layout.envelope != "slot file":
        return [data[: layout.state_at]]
    head = read_head(data)
    tokens = head.tokens
    starts = {m.start for m in head.media}
    if any(s < n for s in starts) and n not in starts and tokens[n - 1] == -1 and tokens[n] == -1:
        raise LayoutError(f"cannot cut to {n} tokens: that is inside a media chunk")
    try:
        media = [m for m in head.media if m.start < n]
        return [head_bytes(head.kind, head.version, tokens[:n], head.packed, media, head.padding)]
    except SlotFileError as e:
        raise LayoutError(e.message, hint=e.hint) from e


def _appendix(data: Bytes, kept: list[Checkpoint]) -> list[Piece]:
    """The checkpoints that are kept; nothing if there are none."""
    if not kept:
        return []
    head = CHECKPOINT_MAGIC + struct.pack("<II", CHECKPOINT_VERSION, len(kept))
    return [head, *(data[c.start : c.stop] for c in kept)]


def table_width(stream: Stream, part: AttentionPart) -> int:
    """Bytes of one cell in a stream's cell table."""
    assert part.n_seq is not None
    return 8 + part.cell_ext + 4 * part.n_seq


def crop_part(data: Bytes, part: AttentionPart, limit: int) -> list[Piece]:
    """The cache without the cells at position `limit` and above. All its cells have the same number of sequence ids."""
    out: list[Piece] = [data[part.start : part.streams[0].start]]
    for stream in part.streams:
        out.extend(_crop_stream(data, part, stream, limit))
    return out


def _crop_stream(data: Bytes, part: AttentionPart, stream: Stream, limit: int) -> list[Piece]:
    n = stream.n_cells
    runs = kept_runs(stream.pos < limit)
    n_kept = sum(b - a for a, b in runs)
    if n_kept == 0:
        return [struct.pack("<I", 0)]
    width = table_width(stream, part)
    table, table_stop = stream.start + 4, stream.start + 4 + n * width
    words_stop = table_stop + 8 + (8 if part.rotation is not None else 0)
    out: list[Piece] = [struct.pack("<I", n_kept), _Rows(data[table:table_stop], 1, n, width, runs)]
    out.append(data[table_stop:words_stop])
    for s in stream.sections:
        out.append(data[s.start - HEADER_BYTES : s.start])
        out.append(_Rows(data[s.start : s.start + s.rows * s.width * n], s.rows, n, s.width, runs))
    return out


def kept_runs(kept: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The index ranges of neighbouring cells that are kept. `kept`: bool of shape (n_cells,)."""
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _from_checkpoint(data: Bytes, layout: Layout, n: int) -> tuple[list[Piece], bool]:
    """The parts of the state, the last ones from the checkpoint at `n` tokens; and whether those include a window."""
    found = next((c for c in layout.checkpoints or () if c.n_tokens == n and c.target[0] < c.target[1]), None)
    if layout.envelope in ("context", "session file") or layout.tail is not None or found is None:
        raise LayoutError(_why_not(layout, n), checkpoints=list(layout.crop_points))
    start, stop = found.target
    target = data[start:stop]
    try:
        partial = parse(target)
    except LayoutError as e:
        raise LayoutError(f"cannot cut to {n} tokens: the checkpoint there is not understood") from e
    foreign = LayoutError(f"cannot cut to {n} tokens: the checkpoint there does not belong to this state")
    places = places_of(partial.parts, layout.parts)
    if partial.checkpoints is not None or partial.tail is not None or places is None:
        raise foreign
    limit = found.pos_max + 1
    replaced = dict(zip(places, partial.parts, strict=True))
    pieces: list[Piece] = []
    for i, part in enumerate(layout.parts):
        if i in replaced:
            new = replaced[i]
            if new.max_pos >= limit:
                raise foreign
            pieces.append(target[new.start : new.stop])
        elif not isinstance(part, AttentionPart):
            raise foreign
        elif not _can_crop(part, found):
            raise LayoutError(f"cannot cut to {n} tokens: a cache lacks positions below {limit}")
        else:
            pieces.extend(crop_part(data, part, limit))
    return pieces, bool(partial.attention)


def places_of(partial: tuple[Part, ...], parts: tuple[Part, ...]) -> list[int] | None:
    """For each part of a checkpoint, the index of the part of the state that it replaces; None if one has no counterpart.

    A checkpoint leaves out attention caches; of caches of the same shape, the first ones. So we match from the last part.
    """
    places: list[int] = []
    i = len(parts)
    for part in reversed(partial):
        i = next((k for k in range(i - 1, -1, -1) if parts[k].shape == part.shape), -1)
        if i < 0:
            return None
        places.append(i)
    return places[::-1]


def _can_crop(part: AttentionPart, at: Checkpoint) -> bool:
    """Whether the cache has all tokens of the checkpoint. Several tokens of an image may have the same position."""
    limit = at.pos_max + 1
    if limit == at.n_tokens:
        return part.holds_all(limit)
    stream = part.data_stream
    return stream is not None and part.n_seq is not None and int((stream.pos < limit).sum()) == at.n_tokens


def _why_not(layout: Layout, n: int) -> str:
    points = layout.crop_points
    if layout.envelope in ("context", "session file"):
        why = "it is the state of a whole context"
    elif layout.tail is not None:
        why = "bytes that are not understood follow its caches"
    elif len(layout.attention) < len(layout.parts):
        why = "a recurrent state cannot be cut"
    else:
        why = "not every cache holds each position below it once"
    if points:
        why += f"; it has checkpoints at {', '.join(map(str, points))}"
    return f"cannot cut to {n} tokens: {why}"
