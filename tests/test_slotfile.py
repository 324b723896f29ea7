"""Slot, sequence and session files: the same bytes again, clear refusals, and a write that is whole or not there."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from kvstore import slotfile
from kvstore.errors import DiskFullError, SlotFileError

STATES = Path(__file__).parent / "data" / "states"
FOLDERS = [STATES, *(Path(f) for f in [os.environ.get("KVSTORE_TEST_STATES")] if f)]
FILES = [p for f in FOLDERS for p in sorted(f.glob("*.bin")) if p.read_bytes()[:4] in (b"qsgg", b"nsgg")]
STATE = np.arange(1000, dtype=np.uint8)
TOKENS = np.array([1, 2, 3], np.int32)


@pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.name}" for p in FILES])
def test_round_trip_of_real_files(path: Path, tmp_path: Path) -> None:
    blob = path.read_bytes()
    file = slotfile.read(path)
    assert slotfile.to_bytes(file) == blob
    assert file.tokens.dtype == np.int32
    assert len(file.tokens) in (99, 134)
    slotfile.write(tmp_path / "out", file)
    assert (tmp_path / "out").read_bytes() == blob
    again = slotfile.read(blob)
    assert np.shares_memory(again.state, np.frombuffer(blob, np.uint8))
    assert again.state.tobytes() == file.state.tobytes()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 4, 5)])
def test_media(sizes: tuple[int, ...]) -> None:
    media = tuple(slotfile.Media(10 * i, bytes([i]) * n) for i, n in enumerate(sizes))
    file = slotfile.SlotFile(TOKENS, STATE, version=4, packed=True, media=media)
    blob = slotfile.to_bytes(file)
    assert (len(blob) - len(STATE)) % 4 == 0
    got = slotfile.read(blob)
    assert got.media == media
    assert got.state.tobytes() == STATE.tobytes()
    assert slotfile.to_bytes(got) == blob


def test_padding_that_is_not_zero_is_kept() -> None:
    blob = bytearray(slotfile.to_bytes(slotfile.SlotFile(TOKENS, STATE, 4, True, (slotfile.Media(0, b"x"),))))
    blob[-len(STATE) - 1] = 7
    assert slotfile.to_bytes(slotfile.read(blob)) == blob


def test_no_tokens_and_no_state() -> None:
    for packed in (False, True):
        blob = slotfile.to_bytes(slotfile.SlotFile(TOKENS[:0], STATE[:0], packed=packed))
        got = slotfile.read(blob)
        assert (len(got.tokens), len(got.state), got.packed) == (0, 0, packed)


def _words(*words: int, kind: bytes = b"qsgg") -> bytes:
    return kind + struct.pack(f"<II{len(words)}i", 4, len(words), *words)


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"", "0 bytes"),
        (b"qsgg\4\0\0", "7 bytes"),
        (b"GGUF" + bytes(20), "not a slot"),
        (b"qsgg" + struct.pack("<II", 4, 100) + bytes(399), "ends inside its token list"),
        (b"qsgg" + struct.pack("<II", 4, 2**32 - 1), "ends inside its token list"),
        (_words(-1), "ends inside its header"),
        (_words(-1, 2, 0, 0), "version 2"),
        (_words(-1, 1, 5, 1, 2), "ends inside its tokens"),
        (_words(-1, 1, -1, 1, 2), "ends inside its tokens"),
        (_words(-1, 1, 1, 9), "ends inside its media count"),
        (_words(-1, 1, 1, 9, 2**31 - 1), "ends inside its media indices"),
        (_words(-1, 1, 1, 9, 1, 0), "ends inside a media chunk"),
        (_words(-1, 1, 1, 9, 1, 0, 50, 0, 1), "ends inside a media chunk"),
        (_words(-1, 1, 1, 9, 1, 0, -1, -1, 1), "ends inside a media chunk"),
        (_words(-1, 1, 1, 9, 0, 0), "4 bytes follow"),
    ],
)
def test_refusals(blob: bytes, why: str) -> None:
    with pytest.raises(SlotFileError, match=why) as e:
        slotfile.read(blob)
    assert e.value.hint


def test_values_that_cannot_be_written() -> None:
    for file in (
        slotfile.SlotFile(np.array([2**31]), STATE),  # type: ignore[arg-type]
        slotfile.SlotFile(np.array([0.5]), STATE),  # type: ignore[arg-type]
        slotfile.SlotFile(np.array([-1, 5], np.int32), STATE),
        slotfile.SlotFile(TOKENS, STATE, media=(slotfile.Media(0, b""),)),
        slotfile.SlotFile(TOKENS, STATE, packed=True, kind="session file"),
        slotfile.SlotFile(TOKENS, STATE, kind="other"),  # type: ignore[arg-type]
        slotfile.SlotFile(TOKENS, STATE, version=-1),
    ):
        with pytest.raises(SlotFileError):
            slotfile.to_bytes(file)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, str(tmp_path / "missing")):
        with pytest.raises(SlotFileError, match="cannot read"):
            slotfile.read(path)


def test_written_file_is_private_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(b"old")
    path.chmod(0o644)
    slotfile.write(path, slotfile.SlotFile(TOKENS, STATE))
    assert path.stat().st_mode & 0o777 == 0o600
    assert slotfile.read(path).state.tobytes() == STATE.tobytes()
    assert os.listdir(tmp_path) == ["slot.bin"]


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    slotfile.write("x.bin", slotfile.SlotFile(TOKENS, STATE))
    assert slotfile.read("x.bin").tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_write_leaves_what_was_there(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(b"old")
    real = getattr(os, call)

    def fail(*args: object, **kw: object) -> None:
        if call == "close":
            real(*args, **kw)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as m:
        m.setattr(os, call, fail)
        with pytest.raises(DiskFullError if code == errno.ENOSPC else SlotFileError):
            slotfile.write(path, slotfile.SlotFile(TOKENS, STATE))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["slot.bin"]


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("write", "fsync", "replace"):
        with monkeypatch.context() as m:
            m.setattr(os, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                slotfile.write(tmp_path / "slot.bin", slotfile.SlotFile(TOKENS, STATE))
        assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    slotfile.write(tmp_path / "slot.bin", slotfile.SlotFile(TOKENS, STATE))
    assert slotfile.read(tmp_path / "slot.bin").state.tobytes() == STATE.tobytes()
