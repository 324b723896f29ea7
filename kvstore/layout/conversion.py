"""Rewrites a state for a server with other flags or of another version, but with the same model and KV type.

These may differ: the envelope, the number of streams and the slot, the stream count and the sequence ids (absent in
early 2025), V by rows or transposed (flash attention), rotation words of 0 (absent before October 2026), the extra
position bytes of M-RoPE (8 or 12), a window saved whole (before June 2026). Rows are moved, never
computed: a conversion that would need other values is refused.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError, SlotFileError
from ..slotfile import head_bytes, read_head
from ..types import Blob, Bytes, Section, Stream, Tokens
from ..util.buffers import as_u8
from .cropping import Piece, Writer, assemble, kept_runs, places_of
from .parsing import CHECKPOINT_MAGIC, CHECKPOINT_VERSION, HEADER_MAGIC, parse
from .reader import MAX_SEQ, PLAIN_BYTES
from .types import AttentionPart, Layout, Part

_NO_SEQUENCE = ("context", "session file")
_CHECKPOINT_FILE_VERSION = 4


def convert(
    blob: Blob,
    like: Blob | Layout,
    *,
    tokens: npt.ArrayLike | None = None,
    slot: int | None = None,
    checkpoints: bool | None = None,
) -> Bytes:
    """The state as the server that wrote `like` would have written it. shape (n_bytes,), uint8, newly allocated.

    `like` is a state of the same model and KV type, or its layout; a state of one token is enough. `tokens` (int32, one a
    cell) are needed if a state in memory becomes a file, or if its M-RoPE bytes gain the token. `slot` is the target slot;
    None: the slot of `like`. `checkpoints`: whether checkpoints are rewritten or left out; None: left out if `like` shows
    that its server does not read them. A window without a checkpoint gets one at its end. Raises LayoutError, which says
    what differs, if the states are of different models or KV types, or if rows would have to be computed.
    """
    data = as_u8(blob)
    layout = parse(data)
    target = like if isinstance(like, Layout) else parse(like)
    for name, found in (("the state", layout), ("the template state", target)):
        if found.envelope in _NO_SEQUENCE:
            raise LayoutError(f"{name} is the state of a whole context, not of one sequence")
        if found.tail is not None:
            raise LayoutError(f"{name} has bytes that are not understood")
    if slot is None:
        slot = _slot_of(target) if isinstance(like, Layout) else _sequence_id(as_u8(like), target)
    elif not 0 <= slot < MAX_SEQ:
        raise LayoutError(f"slot must be in [0, {MAX_SEQ - 1}]; it is {slot}")
    ids = _tokens(data, layout, tokens)
    rewrite = _Rewrite(target, slot, ids)
    parts = rewrite.parts(data, layout.parts, target.parts)
    appendix: list[Piece] = []
    if _reads_checkpoints(target) if checkpoints is None else checkpoints:
        if layout.checkpoints:
            appendix = _checkpoints(data, layout, rewrite)
        elif not _reads_checkpoints(layout):
            appendix = _new_checkpoint(data, layout, rewrite)
    return assemble(
        [
            *_head(data, layout, target, slot, ids),
            *parts,
            *appendix,
        ]
    )


def _slot_of(like: Layout) -> int:
    """The slot that has the cells of `like`; 0 if all slots share one stream."""
    for part in like.attention:
        for i, stream in enumerate(part.streams):
            if stream.n_cells:
                return i
    return 0


def _sequence_id(data: Bytes, like: Layout) -> int:
    """The sequence id of the cells of `like`."""
    for part in like.attention:
        stream = part.data_stream
        if stream is not None and part.n_seq:
            at = stream.start + 12 + part.cell_ext
            return int(data[at : at + 4].view("<i4")[0])
    return _slot_of(like)


def _reads_checkpoints(like: Layout) -> bool:
    """Whether the server that wrote `like` reads checkpoints. A short state may have none, so other signs decide.

    Since October 2026, llama-server writes checkpoints, file version 4 and rotation words. Older servers ignore
    checkpoints, and so do llama.cpp's own functions: their states in memory have a header, their files a plain token list.
    """
    if like.checkpoints is not None:
        return True
    if like.envelope == "slot file":
        return bool(like.tokens_packed) and (like.file_version or 0) >= _CHECKPOINT_FILE_VERSION
    return like.envelope == "sequence" and all(p.rotation is not None for p in like.attention)


def _tokens(data: Bytes, layout: Layout, tokens: npt.ArrayLike | None) -> Tokens | None:
    if tokens is not None:
        return np.asarray(tokens, np.int32)
    return read_head(data).tokens if layout.envelope == "slot file" else None


def _head(data: Bytes, layout: Layout, target: Layout, slot: int, tokens: Tokens | None) -> list[Piece]:
    if target.envelope == "sequence":
        return []
    if target.envelope == "sequence, with header":
        return [struct.pack("<Ii", HEADER_MAGIC, slot)]
    if tokens is None:
        raise LayoutError("a slot file needs the tokens, and a state in memory does not have them", hint="give tokens=")
    head = read_head(data) if layout.envelope == "slot file" else None
    media, padding = (head.media, head.padding) if head is not None else ((), b"")
    try:
        return [head_bytes("slot file", target.file_version or 2, tokens, bool(target.tokens_packed), media, padding)]
    except SlotFileError as e:
        raise LayoutError(e.message, hint=e.hint) from e


class _Rewrite:
    """Rewrites parts for the server of `like`. Cells get the id `slot`; `tokens` are the tokens of the state."""

    def __init__(self, like: Layout, slot: int, tokens: Tokens | None) -> None:
        self.like = like
        self.slot = slot
        self.tokens = tokens

    def parts(self, data: Bytes, old: tuple[Part, ...], new: tuple[Part, ...]) -> list[Piece]:
        """The parts `old` of `data`, written in the form of the parts `new`."""
        if [p.kind for p in old] != [p.kind for p in new]:
            raise LayoutError("the states have different parts: they are of different models")
        out: list[Piece] = []
        for a, b in zip(old, new, strict=True):
            if isinstance(a, AttentionPart) and isinstance(b, AttentionPart):
                out.extend(self._attention(data, a, b))
            elif a.row_sizes != b.row_sizes:
                raise LayoutError("their recurrent states differ in size: they are of different models")
            else:
                out.append(data[a.start : a.stop])
        return out

    def _attention(self, data: Bytes, old: AttentionPart, new: AttentionPart) -> list[Piece]:
        stream = old.data_stream
        if stream is None or old.n_seq not in (0, 1):
            raise LayoutError("the cells do not belong to one sequence")
        if new.data_stream is None:
            raise LayoutError("the template state has no cells of a single sequence")
        if old.row_sizes != new.row_sizes:
            raise LayoutError("layers, types or row sizes differ: the template is of another model, or has another KV type")
        if (old.rotation or (0, 0)) != (new.rotation or (0, 0)):
            raise LayoutError(f"the rows are rotated differently: {old.rotation} in the state, {new.rotation} in the template")
        kept = kept_runs(self.window(stream, new))
        at = self._stream_index(new)
        n_kept = sum(b - a for a, b in kept)
        out: list[Piece] = []
        if new.n_stream is not None:
            out.append(struct.pack(f"<{1 + at}I", new.n_stream, *[0] * at))
        out.append(struct.pack("<I", n_kept))
        out.append(self._cells(stream, old, new, kept))
        out.append(struct.pack("<II", new.v_transposed, new.n_layer))
        if new.rotation is not None:
            out.append(struct.pack("<II", *new.rotation))
        for section in stream.sections:
            moved = _Moved(data, section, stream, kept, section.is_v and new.v_transposed)
            out.extend((moved.header, moved))
        if new.n_stream is not None:
            out.append(bytes(4 * (new.n_stream - 1 - at)))
        return out

    def _stream_index(self, new: AttentionPart) -> int:
        if new.n_stream is None or new.n_stream == 1:
            return 0
        if not 0 <= self.slot < new.n_stream:
            raise LayoutError(f"slot {self.slot} is not one of the {new.n_stream} slots of the template state")
        return self.slot

    def window(self, stream: Stream, new: AttentionPart) -> npt.NDArray[np.bool_]:
        """The cells to keep. If the state has a whole window and the template a filtered one, those in the window; else all."""
        full = max(p.n_cells for p in self.like.attention)
        if new.n_cells == full or stream.n_cells <= new.n_cells:
            return np.ones(stream.n_cells, np.bool_)
        kept: npt.NDArray[np.bool_] = stream.pos > int(stream.pos.max()) - new.n_cells
        return kept

    def _cells(self, stream: Stream, old: AttentionPart, new: AttentionPart, kept: list[tuple[int, int]]) -> Bytes:
        index = np.concatenate([np.arange(a, b) for a, b in kept])
        pos, ext = stream.pos[index], stream.ext[index]
        n_ids = 0 if new.n_seq == 0 else 1
        table = np.empty((pos.shape[0], 8 + new.cell_ext + 4 * n_ids), np.uint8)
        table[:, :4] = _column(pos)
        table[:, 4:8] = _column(np.full(pos.shape, n_ids))
        if old.cell_ext == new.cell_ext:
            table[:, 8 : 8 + new.cell_ext] = ext
        elif (old.cell_ext, new.cell_ext) == (12, 8):
            table[:, 8:16] = ext[:, :8]
        elif (old.cell_ext, new.cell_ext) == (8, 12):
            table[:, 8:16] = ext
            table[:, 16:20] = _column(self._token_at(pos))
        else:
            raise LayoutError(f"cells have {old.cell_ext} extra position bytes in the state, {new.cell_ext} in the template")
        if n_ids:
            table[:, 8 + new.cell_ext :] = _column(np.full(pos.shape, self.slot))
        return table.reshape(-1)

    def _token_at(self, pos: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The token of each cell. A position is the index of its token unless the tokens of an image share positions."""
        if self.tokens is None:
            raise LayoutError("the cells of the template state contain their tokens", hint="give tokens=")
        if np.unique(pos).shape != pos.shape or int(pos.max()) >= self.tokens.shape[0]:
            raise LayoutError("the tokens of the cells cannot be told: positions are not token indices")
        return self.tokens[pos]


class _Moved(Writer):
    """The cells `kept` of a tensor, written by rows or transposed, whichever way they are stored."""

    def __init__(
        self, data: Bytes, section: Section, stream: Stream, kept: list[tuple[int, int]], transposed: bool
    ) -> None:
        s = section
        stored = s.is_v and stream.v_transposed
        row = s.rows * s.width
        element = PLAIN_BYTES.get(s.type)
        if stored != transposed and element is None:
            raise LayoutError(f"V of type {s.type} cannot be transposed")
        # Axes: elements, cells, bytes. A row that stays a row is one element.
        width = s.width if stored == transposed or element is None else element
        source = data[s.start : s.start + row * stream.n_cells]
        if stored or stored == transposed:
            self.source = source.reshape(row // width, stream.n_cells, width)
        else:
            self.source = source.reshape(stream.n_cells, row // width, width).transpose(1, 0, 2)
        self.kept, self.transposed = kept, transposed
        self.by_cell = stored and not transposed
        self.n_kept = sum(b - a for a, b in kept)
        self.size = row * self.n_kept
        if transposed:
            self.header = struct.pack("<iII", s.type, width, row // width)
        else:
            self.header = struct.pack("<iQ", s.type, row)

    def write(self, out: Bytes) -> None:
        rows, _, width = self.source.shape
        if self.by_cell:
            target = out.reshape(self.n_kept, rows, width).transpose(1, 0, 2)
        else:
            target = out.reshape(rows, self.n_kept, width)
        source = self.source
        if width in (2, 4, 8):  # an element at a time, not its bytes
            source, target = source.view(f"<u{width}"), target.view(f"<u{width}")
        at = 0
        for a, b in self.kept:
            target[:, at : at + b - a] = source[:, a:b]
            at += b - a


def _checkpoints(data: Bytes, layout: Layout, rewrite: _Rewrite) -> list[Piece]:
    """The checkpoints, rewritten."""
    assert layout.checkpoints
    out: list[Piece] = [CHECKPOINT_MAGIC + struct.pack("<II", CHECKPOINT_VERSION, len(layout.checkpoints))]
    for c in layout.checkpoints:
        if c.draft[0] != c.draft[1] or c.speculative[0] != c.speculative[1]:
            raise LayoutError(f"the checkpoint at {c.n_tokens} tokens has the state of a draft model")
        blob = data[c.target[0] : c.target[1]]
        target: list[Piece] = []
        if len(blob):
            partial = parse(blob)
            places = places_of(partial.parts, layout.parts)
            if places is None or partial.tail is not None:
                raise LayoutError(f"the checkpoint at {c.n_tokens} tokens does not belong to this state")
            target = rewrite.parts(blob, partial.parts, tuple(rewrite.like.parts[i] for i in places))
        out.extend(_record(c.n_tokens, c.pos_min, c.pos_max, target, rewrite.slot))
    return out


def _new_checkpoint(data: Bytes, layout: Layout, rewrite: _Rewrite) -> list[Piece]:
    """A checkpoint of the state itself, if it has a window: llama-server continues a window only from a checkpoint.

    It has the parts from the window on and 0 as its first position, as the checkpoints of the server do.
    """
    cells = {}  # of each attention cache, by its index among the parts
    for i, (a, b) in enumerate(zip(layout.parts, rewrite.like.parts, strict=True)):
        if isinstance(a, AttentionPart) and isinstance(b, AttentionPart):
            assert a.data_stream is not None  # `_Rewrite.parts` has checked it
            cells[i] = int(rewrite.window(a.data_stream, b).sum())
    full = max(cells.values(), default=0)
    first = next((i for i, n in cells.items() if n < full), None)
    if first is None or max(n for i, n in cells.items() if i >= first) == full:
        return []
    n_tokens = layout.n_positions if rewrite.tokens is None else len(rewrite.tokens)
    target = rewrite.parts(data, layout.parts[first:], rewrite.like.parts[first:])
    head = CHECKPOINT_MAGIC + struct.pack("<II", CHECKPOINT_VERSION, 1)
    return [head, *_record(n_tokens, 0, layout.parts[first].max_pos, target, rewrite.slot)]


def _record(n_tokens: int, pos_min: int, pos_max: int, target: list[Piece], slot: int) -> list[Piece]:
    """A checkpoint whose target blob has the parts `target`; the blob is empty if there are none."""
    blob = [struct.pack("<Ii", HEADER_MAGIC, slot), *target] if target else []
    size = sum(p.size if isinstance(p, Writer) else len(p) for p in blob)
    return [struct.pack("<qiiQ", n_tokens, pos_min, pos_max, size), *blob, bytes(16)]


def _column(values: npt.NDArray[np.signedinteger]) -> Bytes:
    """The values as the bytes of little-endian i32. shape (n, 4), uint8."""
    return values.astype("<i4").view(np.uint8).reshape(-1, 4)
