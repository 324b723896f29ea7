"""Slot, sequence and session files of llama.cpp: a token list, then a state.

    slot / sequence file   u32 'qsgg' 0x67677371 | u32 version | u32 n | i32 words[n] | state, checkpoints with it
    session file           u32 'nsgg' 0x6767736e | u32 version | u32 n | i32 tokens[n] | state of the whole context
    words, plain           the tokens
    words, packed          -1 | 1, the list's version | n | tokens[n] | n_media | start index[n_media]
                           | for each media chunk: u64 size, bytes | zeros up to a multiple of 4

All little-endian. Source: llama.cpp's llama-context.cpp (LLAMA_STATE_SEQ_MAGIC, LLAMA_SESSION_MAGIC) and llama-server,
which writes the packed list since August 2026. A plain list never starts with -1, which is no token id.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .errors import SlotFileError, StoreIOError
from .layout.reader import Blob, as_bytes
from .types import Bytes, Tokens
from .util import fsutil

Kind: TypeAlias = Literal["slot file", "session file"]

SLOT_MAGIC = 0x67677371
SESSION_MAGIC = 0x6767736E
_KINDS: dict[int, Kind] = {SLOT_MAGIC: "slot file", SESSION_MAGIC: "session file"}
_MAGICS: dict[Kind, int] = {kind: magic for magic, kind in _KINDS.items()}
_HEAD = struct.Struct("<III")
_U64 = struct.Struct("<Q")
_LIST_VERSION = 1
_PIECE = 1 << 20
_SAVE_AGAIN = "save the slot again and give the complete file"


class MissingSlotFileError(SlotFileError, FileNotFoundError):
    """A slot file that is not there: with the exit code of a missing store, not that of a malformed file."""

    code, exit_code = StoreIOError.code, StoreIOError.exit_code


class Media(NamedTuple):
    """A media chunk of a packed list: the index of its first token, and its bytes as the server wrote them."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class SlotFile:
    """A slot or session file.

    `tokens` is int32 of shape (n,), `state` uint8 of shape (n_bytes,): what follows the token list. `version` is the
    file's, `packed` says how the tokens are written, `media` and `padding` (bytes up to a multiple of 4, zeros where it
    is shorter than needed) belong to a packed list.
    """

    tokens: Tokens
    state: Bytes
    version: int = 2
    packed: bool = False
    media: tuple[Media, ...] = ()
    kind: Kind = "slot file"
    padding: bytes = b""


class Head(NamedTuple):
    """All of a file but its state: `state_at` is the offset of the state."""

    kind: Kind
    version: int
    tokens: Tokens
    packed: bool
    media: tuple[Media, ...]
    padding: bytes
    state_at: int


def read(path_or_bytes: str | os.PathLike[str] | Blob) -> SlotFile:
    """The slot or session file at a path, or in bytes.

    The state is a view: of the one buffer the file was read into, or of the bytes given. Raises SlotFileError where
    the file cannot be read, is of another kind, or ends inside its token list.
    """
    is_path = isinstance(path_or_bytes, (str, os.PathLike))
    data = load(path_or_bytes) if is_path else as_bytes(path_or_bytes)
    head = read_head(data)
    return SlotFile(
        tokens=head.tokens,
        state=data[head.state_at :],
        version=head.version,
        packed=head.packed,
        media=head.media,
        kind=head.kind,
        padding=head.padding,
    )


def read_head(data: Bytes) -> Head:
    """Header and token list of a file's bytes (uint8). Raises SlotFileError."""
    size = int(data.shape[0])
    if size < _HEAD.size:
        raise SlotFileError(f"the file has {size} bytes, fewer than its header", hint=_SAVE_AGAIN)
    magic, version, n_words = _HEAD.unpack_from(data.data)
    kind = _KINDS.get(magic)
    if kind is None:
        raise SlotFileError(
            f"the file starts with 0x{magic:08x}, which is not a slot, sequence or session file",
            hint="give a file that llama-server or llama.cpp saved",
        )
    if 4 * n_words > size - _HEAD.size:
        raise SlotFileError(
            f"the file ends inside its token list: {n_words} words announced, {size} bytes in all", hint=_SAVE_AGAIN
        )
    state_at = _HEAD.size + 4 * n_words
    words = data[_HEAD.size : state_at]
    if kind == "slot file" and n_words and words[:4].tobytes() == b"\xff\xff\xff\xff":
        tokens, media, padding = _unpack(words)
        return Head(kind, version, tokens, True, media, padding, state_at)
    return Head(kind, version, words.view("<i4").astype(np.int32), False, (), b"", state_at)


def _unpack(words: Bytes) -> tuple[Tokens, tuple[Media, ...], bytes]:
    size = int(words.shape[0])

    def take(at: int, n: int, what: str) -> Bytes:
        if n > size - at:
            raise SlotFileError(f"the packed token list ends inside {what}", hint=_SAVE_AGAIN)
        return words[at : at + n]

    list_version, n = (int(v) for v in take(4, 8, "its header").view("<u4"))
    if list_version != _LIST_VERSION:
        raise SlotFileError(
            f"the packed token list has version {list_version}, {_LIST_VERSION} expected",
            hint="the file comes from a newer llama-server: upgrade kvstore",
        )
    at = 12
    tokens = take(at, 4 * n, "its tokens").view("<i4").astype(np.int32)
    at += 4 * n
    n_media = int(take(at, 4, "its media count").view("<u4")[0])
    at += 4
    starts = take(at, 4 * n_media, "its media indices").view("<i4").tolist()
    at += 4 * n_media
    media = []
    for start in starts:
        length = int(take(at, 8, "a media chunk").view("<u8")[0])
        at += 8
        media.append(Media(start, take(at, length, "a media chunk").tobytes()))
        at += length
    if size - at >= 4:
        raise SlotFileError(f"{size - at} bytes follow the packed token list", hint=_SAVE_AGAIN)
    return tokens, tuple(media), words[at:].tobytes()


def head_bytes(
    kind: Kind,
    version: int,
    tokens: Any,
    packed: bool = False,
    media: Iterable[Media] = (),
    padding: bytes = b"",
) -> bytes:
    """The bytes of a file before its state. Raises SlotFileError where the values cannot be written."""
    if kind not in _MAGICS:
        raise SlotFileError(f"{kind!r} is not a kind of file", hint="use 'slot file' or 'session file'")
    wanted = np.asarray(tokens)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise SlotFileError(f"the tokens have shape {wanted.shape} and type {wanted.dtype}", hint="give a list of int")
    if wanted.size and not -(1 << 31) <= int(wanted.min()) <= int(wanted.max()) < 1 << 31:
        raise SlotFileError("a token does not fit in 32 bits", hint="give int32 tokens")
    list_bytes = wanted.astype("<i4").tobytes()
    media = tuple(media)
    if packed and kind == "slot file":
        words = struct.pack("<iII", -1, _LIST_VERSION, wanted.shape[0]) + list_bytes + struct.pack("<I", len(media))
        words += struct.pack(f"<{len(media)}i", *(m.start for m in media))
        words += b"".join(part for m in media for part in (_U64.pack(len(m.data)), m.data))
        words += padding[:3].ljust(-len(words) % 4, b"\0")[: -len(words) % 4]
    elif media or packed:
        raise SlotFileError(f"a {kind} with a plain token list holds no media", hint="set packed")
    elif list_bytes[:4] == b"\xff\xff\xff\xff" and kind == "slot file":
        raise SlotFileError("a plain token list cannot start with -1", hint="set packed")
    else:
        words = list_bytes
    if not 0 <= version < 1 << 32:
        raise SlotFileError(f"the version {version} does not fit in 32 bits", hint="use the version that was read")
    return _HEAD.pack(_MAGICS[kind], version, len(words) // 4) + words


def _head_of(file: SlotFile) -> bytes:
    return head_bytes(file.kind, file.version, file.tokens, file.packed, file.media, file.padding)


def head_of(file: SlotFile) -> bytes:
    """The header of the file with its tokens cut out: what a store keeps to write the same file again."""
    return head_bytes(file.kind, file.version, (), file.packed, file.media, file.padding)


def with_head(head: Blob | None, tokens: Any, state: Any) -> SlotFile:
    """The file of a header that `head_of` gave; None: a slot file of version 2 with a plain list of tokens."""
    if head is None:
        return SlotFile(tokens, state)
    found = read_head(as_bytes(head))
    return SlotFile(tokens, state, found.version, found.packed, found.media, found.kind, found.padding)


def to_bytes(file: SlotFile) -> bytes:
    """The file's bytes: those it was read from. Raises SlotFileError where the values cannot be written."""
    return b"".join((_head_of(file), as_bytes(file.state).data))


def write(path: str | os.PathLike[str], file: SlotFile) -> None:
    """Writes the file with mode 0600; it is complete, and on the disk, or it is not there.

    A server may abort on a file that is cut short, so the bytes go to a temporary file in the same directory, which
    takes the name once it is synced. A symbolic link stays, and its target is replaced; a device or a FIFO is written to.
    Raises SlotFileError, or DiskFullError; then the directory is as it was.
    """
    write_parts(path, [_head_of(file), as_bytes(file.state).data])


def write_parts(path: str | os.PathLike[str], parts: Iterable[bytes | memoryview]) -> None:
    """Writes any bytes as `write` writes a file."""
    try:
        with fsutil.atomic_write(path) as out:
            for part in parts:
                out.write(part)
    except OSError as error:
        raise fsutil.error_of(error, path, kind=SlotFileError) from error


def load(path: str | os.PathLike[str]) -> Bytes:
    """The bytes of a file, a FIFO or a device in one buffer. Raises SlotFileError where they cannot be read."""
    try:
        with fsutil.open_source(path) as f:
            found = os.fstat(f.fileno())
            size = max(0, found.st_size - f.tell()) if stat.S_ISREG(found.st_mode) else 0
            data = np.empty(size, np.uint8)
            view, at = data.data, 0
            while at < size:
                n = f.readinto(view[at:])
                if not n:
                    break
                at += n
            if not size:
                return _to_the_end(f)
    except FileNotFoundError as error:
        raise MissingSlotFileError(str(fsutil.error_of(error, path, "read").message), hint="check the path") from error
    except OSError as error:
        raise fsutil.error_of(error, path, "read", kind=SlotFileError) from error
    if at < size:
        raise SlotFileError(f"{path} became shorter while it was read", hint="wait until it is written, then read it")
    return data


def _to_the_end(f: FileIO) -> Bytes:
    """What a source of unknown size gives: the file system says 0 of a FIFO, of a device and of what it makes up."""
    data = bytearray()
    while piece := f.read(_PIECE):
        data += piece
    return np.frombuffer(data, np.uint8)
