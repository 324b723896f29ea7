"""Slot, sequence and session files of llama.cpp: a token list, then a state.

    slot / sequence file   u32 'qsgg' 0x67677371 | u32 version | u32 n | i32 words[n] | state, checkpoints with it
    session file           u32 'nsgg' 0x6767736e | u32 version | u32 n | i32 tokens[n] | state of the whole context
    words, plain           the tokens
    words, packed          -1 | 1, the list's version | n | tokens[n] | n_media | start index[n_media]
                           | for each media chunk: u64 size, bytes | zeros up to a multiple of 4

All little-endian. Source: llama.cpp's llama-context.cpp (LLAMA_STATE_SEQ_MAGIC, LLAMA_SESSION_MAGIC) and llama-server,
which writes the packed list since August 2026. A plain list never starts with -1, which is not a token id.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .errors import SlotFileError, StoreIOError
from .types import Blob, Bytes, Tokens
from .util import fsutil
from .util.buffers import as_u8

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
    """The slot file does not exist. The exit code is that of a missing store, not that of a malformed file."""

    code, exit_code = StoreIOError.code, StoreIOError.exit_code


class Media(NamedTuple):
    """A media chunk of a packed list: the index of its first token, and its bytes, unchanged."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class SlotFile:
    """A slot or session file.

    `tokens` is int32 of shape (n,). `state` is uint8 of shape (n_bytes,): all bytes after the token list. `version` is
    the version of the file. `packed` tells whether the token list is packed; only a packed list has `media` and `padding`
    (the bytes up to a multiple of 4; missing ones are zeros).
    """

    tokens: Tokens
    state: Bytes
    version: int = 2
    packed: bool = False
    media: tuple[Media, ...] = ()
    kind: Kind = "slot file"
    padding: bytes = b""

    def header(self) -> bytes:
        """The bytes of the file before its state. Raises SlotFileError where the values cannot be written."""
        return head_bytes(self.kind, self.version, self.tokens, self.packed, self.media, self.padding)


class Head(NamedTuple):
    """Everything in a file except its state, which begins at the offset `state_at`."""

    kind: Kind
    version: int
    tokens: Tokens
    packed: bool
    media: tuple[Media, ...]
    padding: bytes
    state_at: int


def read(path_or_bytes: str | os.PathLike[str] | Blob) -> SlotFile:
    """Reads a slot or session file from a path or from bytes.

    The state is a view of the buffer that the file was read into, or of the bytes given. Raises SlotFileError if the file
    cannot be read, has another format, or ends inside its token list.
    """
    is_path = isinstance(path_or_bytes, (str, os.PathLike))
    data = load(path_or_bytes) if is_path else as_u8(path_or_bytes)
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
    """Reads the header and the token list from the bytes of a file (uint8). Raises SlotFileError."""
    size = int(data.shape[0])
    if size < _HEAD.size:
        raise SlotFileError(f"the file has {size} bytes, fewer than its header", hint=_SAVE_AGAIN)
    magic, version, n_words = _HEAD.unpack_from(data.data)
    kind = _KINDS.get(magic)
    if kind is None:
        raise SlotFileError(
            f"the file starts with 0x{magic:08x}: it is not a slot, sequence or session file",
            hint="give a file that llama-server or llama.cpp saved",
        )
    if 4 * n_words > size - _HEAD.size:
        raise SlotFileError(
            f"the file ends inside its token list: {n_words} words are announced, the file has {size} bytes", hint=_SAVE_AGAIN
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
            f"the packed token list has version {list_version}, not {_LIST_VERSION}",
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
    """The bytes of a file before its state. Raises SlotFileError if a value cannot be written."""
    if kind not in _MAGICS:
        raise SlotFileError(f"{kind!r} is not a kind of file", hint="use 'slot file' or 'session file'")
    wanted = np.asarray(tokens)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise SlotFileError(f"the tokens have shape {wanted.shape} and type {wanted.dtype}", hint="give a list of integers")
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
        raise SlotFileError(f"a {kind} with a plain token list cannot have media", hint="set packed=True")
    elif list_bytes[:4] == b"\xff\xff\xff\xff" and kind == "slot file":
        raise SlotFileError("a plain token list cannot start with -1", hint="set packed=True")
    else:
        words = list_bytes
    if not 0 <= version < 1 << 32:
        raise SlotFileError(f"the version {version} does not fit in 32 bits", hint="use the version that was read")
    return _HEAD.pack(_MAGICS[kind], version, len(words) // 4) + words


def head_of(file: SlotFile) -> bytes:
    """The header of the file without its tokens. A store keeps it to write the same file again."""
    return replace(file, tokens=np.empty(0, np.int32)).header()


def with_head(head: Blob | None, tokens: Any, state: Any) -> SlotFile:
    """The file with a header from `head_of`. Without a header: a slot file of version 2 with a plain token list."""
    if head is None:
        return SlotFile(tokens, state)
    found = read_head(as_u8(head))
    return SlotFile(tokens, state, found.version, found.packed, found.media, found.kind, found.padding)


def to_bytes(file: SlotFile) -> bytes:
    """The bytes of the file, the same as it was read from. Raises SlotFileError if a value cannot be written."""
    return b"".join((file.header(), as_u8(file.state).data))


def write(path: str | os.PathLike[str], file: SlotFile) -> None:
    """Writes the file with mode 0600. Afterwards the file is complete and synced; if the call fails, it is as it was.

    A server may abort on a truncated file, so the bytes are written to a temporary file in the same directory, which is
    synced and then renamed. Of a symbolic link, the target is replaced and the link stays; a device or a FIFO is written
    to. Raises SlotFileError or DiskFullError; the directory is then as it was.
    """
    write_parts(path, [file.header(), as_u8(file.state).data])


def write_parts(path: str | os.PathLike[str], parts: Iterable[bytes | memoryview]) -> None:
    """Writes bytes to a file in the same way as `write`."""
    try:
        with fsutil.atomic_write(path) as out:
            for part in parts:
                out.write(part)
    except OSError as error:
        raise fsutil.error_of(error, path, kind=SlotFileError) from error


def load(path: str | os.PathLike[str]) -> Bytes:
    """Reads a file, a FIFO or a device into one buffer. Raises SlotFileError if it cannot be read."""
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
        missing = MissingSlotFileError(fsutil.error_of(error, path, "read").message, hint="check the path")
        missing.errno, missing.filename = error.errno, error.filename
        raise missing from error
    except OSError as error:
        raise fsutil.error_of(error, path, "read", kind=SlotFileError) from error
    if at < size:
        raise SlotFileError(f"{path} became shorter while it was read", hint="read it again when it has been written")
    return data


def _to_the_end(f: FileIO) -> Bytes:
    """Reads a source of unknown size. The file system reports 0 for FIFOs, devices and generated files."""
    data = bytearray()
    while piece := f.read(_PIECE):
        data += piece
    return np.frombuffer(data, np.uint8)
