"""Finds the layout of a llama.cpp state: its envelope, its parts, the place of every cell and tensor.

Nothing in a state names its layout, so candidates are tried. The right one consumes the state to its last byte:

    envelope                by its magic; without one: a context (the name of its architecture), or a bare sequence state
    extra bytes a cell      0, 8, 12: one value for all caches of a state
    rotation words          absent or present: one choice for all caches
    V                       present or absent (MLA, indexers; nothing marks it): cache by cache
    next part               another attention cache, the recurrent state, the checkpoints, the end

The forms without a stream count (before mid 2025) are tried when nothing else fits. If they do not fit either, the
candidate with the shortest unknown tail is taken, unless its tail begins like a part or a tensor. Source: measured on the
files of llama.cpp builds from February 2025 to October 2026.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import LayoutError, SlotFileError
from ..slotfile import SESSION_MAGIC, SLOT_MAGIC, read_head
from ..types import Blob, Bytes, Section, Stream
from ..util.buffers import as_u8
from .reader import MAX_LAYERS, MAX_ROW, MAX_STREAMS, Misfit, Reader, section_stop
from .recurrent import read_recurrent
from .types import AttentionPart, Checkpoint, Envelope, Layout, Part, Range, RecurrentPart

HEADER_MAGIC = 0xAF143CD8
CHECKPOINT_MAGIC = b"SCKP"
CHECKPOINT_VERSION = 1
MAX_CHECKPOINTS = 1 << 16  # llama-server keeps tens
_CHECKPOINT = struct.Struct("<qii")
_EXTS = (0, 8, 12)
MAX_EXT = 64
_ROTATIONS = frozenset([0, *(64 << k for k in range(7))])
_ARCH = re.compile(rb"[A-Za-z0-9._+-]{1,64}")
# A state has at most three caches and a recurrent state; the bound keeps the number of candidates small.
_MAX_ATTENTION = 4


@dataclass(frozen=True)
class _Shell:
    """A candidate envelope: the offset of its state, and what it tells about the tokens."""

    envelope: Envelope
    at: int
    file_version: int | None = None
    n_tokens: int | None = None
    tokens_packed: bool | None = None

    @property
    def is_context(self) -> bool:
        return self.envelope in ("context", "session file")


@dataclass(frozen=True)
class _Mode:
    """The choices that are the same in all parts of a state. `streams`: caches start with a stream count. `bare`: cells do
    not have sequence ids."""

    ext: int
    rotated: bool
    streams: bool = True
    bare: bool = False


@dataclass(frozen=True)
class _Found:
    parts: tuple[Part, ...]
    stop: int
    checkpoints: tuple[Checkpoint, ...] | None


def parse(blob: Blob, cell_ext: int | None = None) -> Layout:
    """The layout of a state: of a slot, sequence or session file, or of a state in memory.

    `blob` is anything bytes-like, and is not copied. `cell_ext` (0 to 64) overrides the detected number of extra position
    bytes per cell. Tensor bytes are not read. Raises LayoutError, which names what does not fit.
    """
    if cell_ext is not None and not 0 <= cell_ext <= MAX_EXT:
        raise LayoutError(f"cell_ext must be in [0, {MAX_EXT}]; it is {cell_ext}")
    data = as_u8(blob)
    if data.shape[0] == 0:
        raise LayoutError("the state is empty")
    reader = Reader(data)
    shells = _shells(reader)
    exts = _EXTS if cell_ext is None else (cell_ext,)
    modes = [_Mode(ext, rotated) for ext in exts for rotated in (False, True)]
    old = [_Mode(ext, False, streams=False) for ext in exts] + [_Mode(0, False, streams=False, bare=True)]
    # Of the candidates that fail, the one that got furthest describes the fault best.
    worst = Misfit("these bytes are not a state", 0)
    tails: list[tuple[int, _Shell, _Found]] = []
    for candidates in (modes, old):
        for shell in shells:
            for mode in candidates:
                grammar = _Grammar(reader, shell, mode)
                found = grammar.whole()
                if found is not None:
                    return _layout(data, shell, found)
                if grammar.tailed is not None and mode.streams:
                    tails.append((grammar.tailed.stop, shell, grammar.tailed))
                if grammar.misfit.at >= worst.at:
                    worst = grammar.misfit
    if tails:
        _, shell, found = max(tails, key=lambda t: t[0])
        return _layout(data, shell, found)
    raise LayoutError(
        f"the state's layout is not understood: {worst.what} (at byte {worst.at})",
        hint="a store keeps it whole, not as a delta",
        at=worst.at,
    )


def _layout(data: Bytes, shell: _Shell, found: _Found) -> Layout:
    size = int(data.shape[0])
    state_stop = size
    if found.checkpoints is not None:
        state_stop = found.stop
    return Layout(
        envelope=shell.envelope,
        file_version=shell.file_version,
        n_tokens=shell.n_tokens,
        tokens_packed=shell.tokens_packed,
        size=size,
        state_at=shell.at,
        state_size=state_stop - shell.at,
        parts=found.parts,
        checkpoints=found.checkpoints,
        tail=None if found.stop == state_stop else (found.stop, state_stop),
    )


def _shells(reader: Reader) -> list[_Shell]:
    """The envelopes that the first bytes allow."""
    magic = reader.u32(0, "the state") if reader.stop >= 4 else None
    if magic in (SLOT_MAGIC, SESSION_MAGIC):
        try:
            head = read_head(reader.data)
        except SlotFileError as e:
            raise LayoutError(e.message, hint=e.hint) from e
        shell = _Shell(head.kind, head.state_at, head.version, len(head.tokens), head.packed)
        if head.kind == "slot file":
            return [shell]
        return [
            _Shell(shell.envelope, at, shell.file_version, shell.n_tokens, shell.tokens_packed)
            for at in _context_starts(reader, head.state_at)
        ]
    if magic == HEADER_MAGIC:
        return [_Shell("sequence, with header", 8)]
    contexts = [_Shell("context", at) for at in _context_starts(reader, 0)]
    return [*contexts, _Shell("sequence", 0)]


def _context_starts(reader: Reader, at: int) -> list[int]:
    """The possible starts of the state of a whole context: after the name, or (until mid 2025) after outputs and logits."""
    try:
        n = reader.u32(at, "the architecture's name")
        if n > 64:
            return []
        reader.need(at + 4, n, "the architecture's name")
    except Misfit:
        return []
    if not _ARCH.fullmatch(reader.data[at + 4 : at + 4 + n].tobytes()):
        return []
    at += 4 + n
    starts = [at]
    try:
        n_outputs = reader.u32(at, "the outputs")
        reader.need(at + 4, 4 * n_outputs, "the outputs")
        at += 4 + 4 * n_outputs
        for what in ("the logits", "the embeddings"):
            count = reader.u64(at, what)
            reader.need(at + 8, 4 * count, what)
            at += 8 + 4 * count
    except Misfit:
        return starts
    return [*starts, at]


class _Grammar:
    """One candidate: parts from `shell.at` on, under `mode`."""

    def __init__(self, reader: Reader, shell: _Shell, mode: _Mode) -> None:
        self.reader = reader
        self.shell = shell
        self.mode = mode
        self.misfit = Misfit("these bytes are not a state", shell.at)
        self.tailed: _Found | None = None

    def whole(self) -> _Found | None:
        """The parts, if they consume the state to its last byte or to its checkpoints."""
        return self._from(self.shell.at, ())

    def _from(self, at: int, parts: tuple[Part, ...]) -> _Found | None:
        if parts and not self._needs_more(parts[-1]):
            if at == self.reader.stop:
                return _Found(parts, at, None)
            if self.reader.data[at : at + 4].tobytes() == CHECKPOINT_MAGIC:
                try:
                    checkpoints = self._checkpoints(at)
                except Misfit as e:
                    self._note(e)
                    return None
                if checkpoints is not None:
                    return _Found(parts, at, checkpoints)
        n_recurrent = sum(isinstance(p, RecurrentPart) for p in parts)
        if len(parts) - n_recurrent < _MAX_ATTENTION:
            for attention in self._attention(at):
                found = self._from(attention.stop, (*parts, attention))
                if found is not None:
                    return found
        if n_recurrent == 0:
            recurrent = self._recurrent(at, first=not parts)
            if recurrent is not None:
                found = self._from(recurrent.stop, (*parts, recurrent))
                if found is not None:
                    return found
        if parts:
            self._keep_tail(at, parts)
        return None

    @staticmethod
    def _needs_more(part: Part) -> bool:
        """A cache that has cells but no layers is always followed by another part."""
        return isinstance(part, AttentionPart) and part.n_cells > 0 and part.n_layer == 0

    def _note(self, misfit: Misfit) -> None:
        if misfit.at >= self.misfit.at:
            self.misfit = misfit.with_traceback(None)  # its frames would keep this grammar and the state alive

    # tails

    def _keep_tail(self, at: int, parts: tuple[Part, ...]) -> None:
        """Keeps `parts` as the best reading of this candidate; the bytes after them are an unknown tail.

        Not if the tail begins like a part, a tensor or the checkpoints, or if one damaged word could have moved the end of
        the last part.
        """
        if self.tailed is not None and self.tailed.stop >= at:
            return
        last, reader = parts[-1], self.reader
        if isinstance(last, AttentionPart) and last.n_layer == 0:
            return
        if not last.end_is_sure:
            self._note(Misfit("nothing confirms the size of the last tensor", at))
            return
        if isinstance(last, AttentionPart) and last.v_layers == 0 and reader.looks_like_v(last.streams):
            self._note(Misfit("V is cut short, or not what its header says", at))
            return
        if reader.looks_like_tensor(at):
            self._note(Misfit("a tensor is cut short, or not what its header says", at))
            return
        if isinstance(last, RecurrentPart) and reader.left(at) >= 8 and 0 < reader.u64(at, "a row") <= MAX_ROW:
            self._note(Misfit("a row without a type follows the last tensor", at))
            return
        if self._looks_cut(at):
            self._note(Misfit("what follows the last whole part is cut short", at))
            return
        self.tailed = _Found(parts, at, None)

    def _looks_cut(self, at: int) -> bool:
        """Whether a part or the checkpoints begin at `at`: then they are damaged, not unknown.

        Empty streams that the last cache does not count may stand before them.
        """
        reader = self.reader
        for _ in range(MAX_STREAMS):
            if reader.left(at) <= 4 or reader.u32(at, "an empty stream"):
                break
            at += 4
        start = reader.data[at : min(at + 8, reader.stop)].tobytes()
        if start[:4] == CHECKPOINT_MAGIC[: len(start)]:
            return len(start) < 8 or reader.u32(at + 4, "the checkpoints") == CHECKPOINT_VERSION
        return reader.looks_like_attention(at) or reader.looks_like_recurrent(at, self.shell.is_context)

    # parts

    def _attention(self, at: int) -> Iterator[AttentionPart]:
        """The ways to read an attention cache at `at`: with V, then without V, which is newer than the stream count."""
        for has_v in (True, False) if self.mode.streams else (True,):
            try:
                part = self._read_attention(at, has_v)
            except Misfit as e:
                self._note(e)
                continue
            yield part
            if part.n_layer == 0:
                return

    def _read_attention(self, at: int, has_v: bool) -> AttentionPart:
        reader, start = self.reader, at
        n_stream = None
        if self.mode.streams:
            n_stream = reader.u32(at, "the stream count")
            if not 0 < n_stream <= MAX_STREAMS:
                raise Misfit(f"{n_stream} streams, not 1 to {MAX_STREAMS}", at)
            at += 4
        streams = []
        heads: list[tuple[int, int, tuple[int, int] | None]] = []
        n_seqs: list[int | None] = []
        for _ in range(n_stream or 1):
            n_cell = reader.u32(at, "the cell count")
            if n_cell == 0:
                if n_stream is None:
                    raise Misfit("a cache without cells", at)
                streams.append(_empty_stream(reader, at, self.mode.ext))
                at += 4
                continue
            stream, n_seq, head = self._stream(at, n_cell, has_v)
            if heads and head != heads[0]:
                raise Misfit("the streams of a cache differ", at)
            heads.append(head)
            n_seqs.append(n_seq)
            streams.append(stream)
            at = stream.stop
        v_trans, n_layer, rotation = heads[0] if heads else (0, 0, None)
        return AttentionPart(
            start=start,
            stop=at,
            n_stream=n_stream,
            cells=tuple(s.n_cells for s in streams),
            cell_ext=self.mode.ext,
            k_row=tuple(sorted({x.width for s in streams for x in s.sections if not x.is_v})),
            n_layer=n_layer,
            rotation=rotation,
            v_layers=n_layer if has_v else 0,
            v_transposed=bool(v_trans),
            n_seq=n_seqs[0] if len(set(n_seqs)) == 1 else None,
            streams=tuple(streams),
        )

    def _stream(
        self, at: int, n_cell: int, has_v: bool
    ) -> tuple[Stream, int | None, tuple[int, int, tuple[int, int] | None]]:
        reader, start = self.reader, at
        cells = reader.cells(at + 4, n_cell, self.mode.ext, self.mode.bare)
        at = cells.stop
        v_trans, n_layer = reader.words(at, "the layer count")
        if v_trans > 1:
            raise Misfit(f"the word for a transposed V is {v_trans}, 0 or 1 expected", at)
        if n_layer > MAX_LAYERS:
            raise Misfit(f"{n_layer} layers, at most {MAX_LAYERS} expected", at + 4)
        if n_layer == 0 and not self.mode.streams:
            raise Misfit("a cache without layers", at + 4)
        at += 8
        rotation = None
        if self.mode.rotated:
            rotation = reader.words(at, "the rotation words")
            if not _ROTATIONS.issuperset(rotation):
                raise Misfit(f"rotation words of {rotation[0]} and {rotation[1]}", at)
            at += 8
        sections: list[Section] = []
        for is_v in (False, True) if has_v else (False,):
            for _ in range(n_layer):
                section = reader.tensor(at, n_cell, is_v=is_v, transposed=is_v and v_trans == 1)
                if sections and sections[-1].is_v == is_v and sections[-1].type != section.type:
                    raise Misfit(f"tensors of types {sections[-1].type} and {section.type} in one cache", at)
                sections.append(section)
                at = section_stop(section, n_cell)
        stream = Stream(start, at, cells.pos, cells.ext, v_trans == 1, tuple(sections))
        return stream, cells.n_seq, (v_trans, n_layer, rotation)

    def _recurrent(self, at: int, first: bool) -> RecurrentPart | None:
        """The recurrent part at `at`; None if there is none."""
        try:
            return read_recurrent(self.reader, at, first=first, is_context=self.shell.is_context)
        except Misfit as e:
            self._note(e)
            return None

    # checkpoints

    def _checkpoints(self, at: int) -> tuple[Checkpoint, ...] | None:
        """The checkpoints from `at` to the end; None if their version is unknown."""
        reader = self.reader
        version, count = reader.words(at + 4, "the list of checkpoints")
        if version != CHECKPOINT_VERSION:
            return None
        if count > MAX_CHECKPOINTS:
            raise Misfit(f"{count} checkpoints are too many", at + 8)
        at += 12
        reader.need(at, count * (_CHECKPOINT.size + 24), "the list of checkpoints")
        out = []
        for _ in range(count):
            start = at
            reader.need(at, _CHECKPOINT.size, "a checkpoint")
            n_tokens, pos_min, pos_max = _CHECKPOINT.unpack_from(reader.view, at)
            if n_tokens < 0:
                raise Misfit(f"a checkpoint of {n_tokens} tokens", at)
            at += _CHECKPOINT.size
            blobs: list[Range] = []
            for what in ("a checkpoint's target", "a checkpoint's draft", "a checkpoint's speculative state"):
                size = reader.u64(at, what)
                reader.need(at + 8, size, what)
                blobs.append((at + 8, at + 8 + size))
                at += 8 + size
            out.append(Checkpoint(start, at, n_tokens, pos_min, pos_max, blobs[0], blobs[1], blobs[2]))
        if at != reader.stop:
            raise Misfit("bytes follow the last checkpoint", at)
        return tuple(out)


def _empty_stream(reader: Reader, at: int, ext: int) -> Stream:
    empty = reader.data[:0]
    return Stream(at, at + 4, empty.view("<i4"), empty.reshape(0, ext) if ext else empty.reshape(0, 0), False, ())
