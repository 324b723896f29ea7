"""What an SQLite file says it is, read from its write-ahead log without SQLite.

    log:    u32 magic 0x377F0682 or ..83, u32 version, u32 page size, u32 checkpoint, u32 salt x 2, u32 checksum x 2
    frame:  u32 page number, u32 pages of the file where this ends a transaction, u32 salt x 2, u32 checksum x 2; page
    page 1: user version at 60, application id at 68, both u32; at 100 the kind of b-tree page (5: inner), cells u16 at 103

All big-endian. Source: https://sqlite.org/fileformat2.html
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from io import FileIO

_LOG = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_PAGE_HEAD = 105


@dataclass(frozen=True, slots=True)
class Header:
    """`empty`: the file holds no table."""

    application_id: int
    user_version: int
    empty: bool


EMPTY = Header(0, 0, True)


def in_log(path: str) -> Header | None:
    """The header as the last complete transaction of a log has it; None where no transaction wrote it, or no log is."""
    try:
        with open(path, "rb", buffering=0) as log:
            return _in_log(log, os.fstat(log.fileno()).st_size)
    except OSError:
        return None


def _in_log(log: FileIO, size: int) -> Header | None:
    start = log.read(_LOG.size)
    if len(start) < _LOG.size:
        return None
    magic, _, page_size, _, *salt, _, _ = _LOG.unpack(start)
    if magic not in (0x377F0682, 0x377F0683) or not 512 <= page_size <= 65536:
        return None
    committed = last = None
    for at in range(_LOG.size, size - _FRAME.size - page_size + 1, _FRAME.size + page_size):
        log.seek(at)
        frame = log.read(_FRAME.size + _PAGE_HEAD)
        if len(frame) < _FRAME.size + _PAGE_HEAD:
            return None  # it is being emptied: what it held is in the file
        number, ends, *frame_salt, _, _ = _FRAME.unpack_from(frame)
        if frame_salt != salt:
            break  # left by an earlier use of the log
        if number == 1:
            last = frame[_FRAME.size :]
        if ends:
            committed = last
    return None if committed is None else _header(committed)


def _header(page: bytes) -> Header | None:
    if page[:16] != b"SQLite format 3\0":
        return None  # encrypted
    user_version, _, application_id = struct.unpack_from(">3I", page, 60)
    kind, _, n_cells = struct.unpack_from(">BHH", page, 100)
    return Header(application_id, user_version, kind != 5 and n_cells == 0)
