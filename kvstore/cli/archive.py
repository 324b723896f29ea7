"""The format of exports: a folder, or a tar archive, with these files for each entry:

    <id>.json     format, fingerprint, number of images, whether it was put from a file, whether it is a base
    <id>.meta     the meta block, 512 bytes (see `kvstore.meta`)
    <id>.draft    the draft model's state, if there is one
    <id>.bin      a slot file with the tokens and the state: the same bytes, if the entry was put from one

The slot file is written last. Deltas are exported as whole states. Parents come before their children, and bases with the
entries that need them, so that an import can store the children as deltas again.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .. import InvalidInputError, KVStoreError, MetaBlockError, SlotFileError, slotfile
from ..meta import BLOCK_BYTES, MetaBlock
from ..operate import Exported
from ..slotfile import SlotFile

FORMAT = 1
SUFFIXES = (".json", ".meta", ".draft", ".bin")  # in the order in which they are written
MAGICS = (b"qsgg", b"nsgg")


def file_of(item: Exported) -> SlotFile:
    """The entry as the file that it was put from, or as a slot file."""
    file = slotfile.with_head(item.head, item.tokens, item.main)
    # A plain list cannot begin with -1.
    packed = file.packed or (item.head is None and item.tokens[0] == -1)
    return SlotFile(file.tokens, file.state, file.version, packed, file.media, file.kind, file.padding)


def parts_of(item: Exported) -> dict[str, list[bytes | memoryview]]:
    """The bytes of each file of the entry, by suffix, in pieces that are not copied."""
    file = file_of(item)
    facts = {
        "format": FORMAT,
        "id": f"{item.block.id:016x}",
        "fingerprint": item.fingerprint,
        "n_images": item.n_images,
        "from_file": item.head is not None,
        "draft": item.draft is not None,
        "base": item.base,
    }
    parts: dict[str, list[bytes | memoryview]] = {
        ".json": [json.dumps(facts, ensure_ascii=False, indent=2).encode() + b"\n"],
        ".meta": [item.block.pack()],
        ".bin": [file.header(), item.main.data],
    }
    if item.draft is not None:
        parts[".draft"] = [item.draft.data]
    return {suffix: parts[suffix] for suffix in SUFFIXES if suffix in parts}


# -- writing


def to_folder(folder: Path, items: Iterable[Exported]) -> int:
    """Writes the files of each entry and returns the number of entries. An entry that fails leaves no new file."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    n = 0
    for item in items:
        name = f"{item.block.id:016x}"
        there = {suffix for suffix in SUFFIXES if os.path.lexists(folder / (name + suffix))}
        try:
            for suffix, parts in parts_of(item).items():
                slotfile.write_parts(folder / (name + suffix), parts)
        except BaseException:
            for suffix in set(SUFFIXES) - there:  # files of an earlier export stay
                with suppress(OSError):
                    (folder / (name + suffix)).unlink()
            raise
        n += 1
    return n


class _Pieces(io.RawIOBase):
    """Reads pieces of bytes one after another, then the rest of a stream."""

    def __init__(self, pieces: list[bytes | memoryview], rest: Any = None) -> None:
        self._left = [memoryview(p).cast("B") for p in pieces]
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._left and not self._left[0]:
            self._left.pop(0)
        if not self._left:
            return 0 if self._rest is None else int(self._rest.readinto(buffer) or 0)
        n = min(len(buffer), len(self._left[0]))
        buffer[:n] = self._left[0][:n]
        self._left[0] = self._left[0][n:]
        return n


def joined(start: bytes, rest: Any) -> BinaryIO:
    """A stream whose start has been read already."""
    return io.BufferedReader(_Pieces([start] if start else [], rest), 1 << 20)


def to_tar(out: Any, items: Iterable[Exported]) -> int:
    """Writes an archive to a stream and returns the number of entries."""
    n = 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for item in items:
            for suffix, pieces in parts_of(item).items():
                info = tarfile.TarInfo(f"{item.block.id:016x}{suffix}")
                info.size = sum(memoryview(p).nbytes for p in pieces)
                info.mode = 0o600
                info.mtime = max(0, item.block.created_at)
                archive.addfile(info, io.BufferedReader(_Pieces(pieces), 1 << 20))
            n += 1
    return n


# -- reading


def build(parts: dict[str, Any]) -> Exported:
    """An entry from the bytes of its files, by suffix. Raises SlotFileError, MetaBlockError or InvalidInputError."""
    try:
        facts = json.loads(bytes(parts[".json"]))
        fingerprint, n_images, from_file = str(facts["fingerprint"]), int(facts["n_images"]), bool(facts["from_file"])
        wants_draft, is_base = bool(facts["draft"]), bool(facts.get("base", False))  # older exports have no bases
        if facts["format"] != FORMAT:
            raise InvalidInputError(f"the export has the unknown format {facts['format']}", hint="upgrade kvstore")
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"an export's .json file is damaged: {error}") from None
    if ".meta" not in parts:
        raise MetaBlockError("an export's .meta file is missing")
    block = MetaBlock.unpack(parts[".meta"])
    if wants_draft and ".draft" not in parts:
        raise SlotFileError("an export's .draft file is missing", hint="copy all files of the export")
    file = slotfile.read(parts[".bin"])
    return Exported(
        block=block,
        tokens=file.tokens,
        main=file.state,
        draft=np.frombuffer(parts[".draft"], np.uint8) if wants_draft else None,
        fingerprint=fingerprint,
        n_images=n_images,
        head=slotfile.head_of(file) if from_file else None,
        base=is_base,
    )


def slot_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The slot and session files of a folder, by name, and its other files."""
    found: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        try:
            with path.open("rb") as f:
                (found if f.read(4) in MAGICS else others).append(path)
        except OSError:
            others.append(path)
    return found, others


def order(path: Path) -> tuple[int, int, str]:
    """The sort key of a slot file in an import: parents before their children, then by size."""
    meta = path.with_suffix(".meta")
    try:
        block = MetaBlock.unpack(meta.read_bytes())
    except (OSError, MetaBlockError):
        return 2, path.stat().st_size, path.name
    return int(block.parent is not None), path.stat().st_size, path.name


def of_folder(path: Path) -> Exported | SlotFile:
    """A slot file, with the files that an export wrote beside it."""
    sidecar, meta, draft = (path.with_suffix(suffix) for suffix in (".json", ".meta", ".draft"))
    if path.suffix != ".bin" or not meta.is_file() or not sidecar.is_file():
        return slotfile.read(path)
    if meta.stat().st_size != BLOCK_BYTES:
        raise MetaBlockError(f"{meta} must have {BLOCK_BYTES} bytes")
    parts: dict[str, Any] = {".json": sidecar.read_bytes(), ".meta": meta.read_bytes(), ".bin": slotfile.load(path)}
    if draft.is_file():
        parts[".draft"] = slotfile.load(draft)
    return build(parts)


def of_tar(
    source: str, stream: BinaryIO, seen: Callable[[int], None]
) -> Iterator[tuple[str, Exported | KVStoreError]]:
    """(name, entry or its error) for each entry of an archive, with one entry in memory at a time. `seen` gets byte counts."""
    parts: dict[str, Any] = {}
    stem = ""
    n_members = n_parts = 0
    if not stream.peek(1):  # type: ignore[attr-defined]
        raise SlotFileError(f"{source} is empty", hint="give an export or a slot file")
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                n_members += 1
                name, suffix = os.path.splitext(os.path.basename(member.name))
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or suffix not in SUFFIXES:
                    continue
                n_parts += 1
                if name != stem:
                    stem, parts = name, {}
                parts[suffix] = _all_of(file, member)
                seen(member.size)
                if suffix == ".bin":
                    try:
                        yield name, build(parts)
                    except KVStoreError as error:
                        yield name, error
                    parts = {}
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, KVStoreError):
            raise
        if not n_members:
            raise SlotFileError(
                f"{source} is neither an export nor a slot file",
                hint="give a file that `kvstore export` wrote or llama-server saved",
            ) from error
        raise SlotFileError(
            f"the archive {source} cannot be read to its end: {error}", hint="copy or export it again"
        ) from error
    if n_members and not n_parts:
        raise SlotFileError(f"the archive {source} holds no export", hint="give a file that `kvstore export` wrote")
    if parts:
        raise SlotFileError(f"the archive {source} ends inside an entry", hint="copy or export it again")


def _all_of(source: Any, member: tarfile.TarInfo) -> Any:
    pieces = []
    left = member.size
    while left and (piece := source.read(min(left, 1 << 24))):  # a header's size alone allocates nothing
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise SlotFileError(f"the archive ends inside {member.name}", hint="export it again")
    return b"".join(pieces)
