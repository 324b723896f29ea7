"""Commands that move entries into and out of a store: put, get, import, export."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np

from .. import (
    CorruptStoreError,
    Entry,
    InvalidInputError,
    KVStoreError,
    LayoutError,
    NotFoundError,
    SavedState,
    SlotFileError,
    Store,
    layout,
    operate,
    slotfile,
)
from ..operate import Exported
from ..slotfile import SlotFile
from ..util import fsutil
from . import archive, base, output


def _results(entries: list[tuple[str, Entry]], as_json: bool) -> None:
    if as_json:
        output.data([{"file": name, **entry.as_dict()} for name, entry in entries])
        return
    if not entries:
        return
    grid = output.Grid("id", ">tokens", ">MiB", ">stored", "class", "parent", "file")
    for name, e in entries:
        parent = "-" if e.parent is None else f"{e.parent:016x}"
        grid.row(e.hex_id, f"{e.n_tokens:,}", output.mib(e.size), output.mib(e.stored), e.entry_class, parent, name)
    grid.show()


def _read_file(name: str) -> Any:
    return sys.stdin.buffer.read() if name == "-" else slotfile.load(name)


_min_saved = click.option(
    "--min-saved", type=base.size(), default=None, show_default="an eighth of each state",
    help="Store as a delta only if it saves at least this: 16 (MiB), 512K, 1G.",
)
_fingerprint = click.option(
    "--fingerprint", default="", help="Names the model and its settings. A state is never used under another fingerprint."
)


@click.command(
    epilog=base.example(
        "kvstore put cache.db slots/chat.bin --excerpt 'Which kettle'",
        "kvstore put cache.db slots/           # a whole --slot-save-path folder",
        "kvstore put cache.db state.raw --tokens '[1, 15043, 3186]'",
    )
)
@base.common_options
@click.argument("files", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option("--tokens", help="The tokens of a raw state: a JSON list, or a file that contains one.")
@click.option("--draft", type=click.Path(dir_okay=False), help="The state of the draft model, raw or in a slot file.")
@click.option("--class", "entry_class", type=click.Choice(["normal", "learned", "pinned"]), default="normal")
@click.option("--ttl", type=base.Duration(never=True), help="Time until it expires: 90s, 15min, 12h, 7d, or never.")
@click.option("--excerpt", default="", help="The start of the first user message, shown in lists.")
@click.option("--n-system", type=click.IntRange(0), default=0, help="Number of tokens in the system block.")
@_fingerprint
@_min_saved
@click.option("--whole", is_flag=True, help="Store it whole, not as a delta.")
def put(
    store: str,
    key_file: str | None,
    as_json: bool,
    files: tuple[str, ...],
    tokens: str | None,
    draft: str | None,
    entry_class: Any,
    ttl: int | None,
    excerpt: str,
    n_system: int,
    fingerprint: str,
    min_saved: float | None,
    whole: bool,
) -> None:
    """Store slot files, session files or raw states.

    STORE is created if it does not exist. FILES can be folders.
    """
    if (tokens or draft) and (len(files) > 1 or Path(files[0]).is_dir()):
        base.usage("--tokens and --draft need a single file")
    names = list(_expand(files))
    for name in (*names, *([draft] if draft else [])):
        if name != "-" and not os.path.exists(name):
            raise base.missing(name)  # before a store is created for it
    done: list[tuple[str, Entry]] = []
    with (
        base.open_store(
            store, key_file, create=True, readonly=False, fingerprint=fingerprint, min_saved_mib=min_saved
        ) as opened,
        output.progress("storing") as moved,
    ):
        total = sum(os.path.getsize(n) for n in names if os.path.isfile(n))
        for name in names:
            file = _file(name, tokens)
            second = None if draft is None else _draft(draft)
            entry = opened.put(
                file.tokens,
                file.state,
                draft=second,
                entry_class=entry_class,
                source="admin" if entry_class != "normal" else "default",
                ttl=ttl or None,
                excerpt=excerpt,
                n_system=min(n_system, len(file.tokens)),
                share=not whole,
                head=slotfile.head_of(file) if tokens is None else None,
            )
            done.append((name, entry))
            moved(sum(e.size for _, e in done), total)
            _remark(name, file)
    _results(done, as_json)


def _expand(files: tuple[str, ...]) -> Iterator[str]:
    """The files, and the files of folders, the shortest first: a prefix is then stored before the states that continue it."""
    for name in files:
        if name != "-" and Path(name).is_dir():
            found, others = archive.slot_files(Path(name))
            for other in others:
                output.note(f"skipped {other}: not a slot or session file")
            yield from (str(path) for path in sorted(found, key=lambda path: path.stat().st_size))
        else:
            yield name


def _file(name: str, tokens: str | None) -> SlotFile:
    data = _read_file(name)
    if tokens is not None:
        return SlotFile(base.tokens_of(tokens), np.frombuffer(data, np.uint8))
    try:
        return slotfile.read(data)
    except SlotFileError as error:
        raise SlotFileError(f"{name}: {error.message}", hint=error.hint or "give the tokens of a raw state: --tokens") from None


def _draft(name: str) -> Any:
    data = _read_file(name)
    return slotfile.read(data).state if bytes(memoryview(data)[:4]) in archive.MAGICS else data


def _remark(name: str, file: SlotFile) -> None:
    try:
        layout.parse(file.state)
    except LayoutError:
        output.note(f"{name}: the state is cut short, or its layout is not understood; stored whole, and cannot be cropped")


@click.command(
    epilog=base.example(
        "kvstore get cache.db 3f2a slots/chat.bin", "kvstore get cache.db 3f2a - --format raw | sha256sum"
    )
)
@base.common_options
@click.argument("id", shell_complete=base.complete_id)
@click.argument("out", type=click.Path(allow_dash=True, dir_okay=False, readable=False))
@click.option("--format", "form", type=click.Choice(["auto", "slot", "raw"]), default="auto", show_default=True,
              help="auto: the same bytes as the file that was put.")
@click.option("--n-tokens", type=click.IntRange(1), help="Crop the state to its first N tokens.")
@click.option("--draft", is_flag=True, help="Write the draft model's state instead, raw.")
def get(
    store: str, key_file: str | None, as_json: bool, id: str, out: str, form: str, n_tokens: int | None, draft: bool
) -> None:
    """Write an entry to a file.

    OUT ("-": stdout) is replaced when it is complete; if anything fails, it stays as it was. A device or a FIFO is written
    to. Of a symbolic link, the target is replaced and the link stays.
    """
    if base.is_stdout(out) and as_json:
        base.usage("with --json, give a file for the data")
    with base.open_store(store, key_file) as opened:
        (entry,) = base.find(opened, [id])
        saved = opened.get(entry.id, n_tokens=n_tokens)
        if saved is None:
            if opened.entry(entry.id) is None:
                raise NotFoundError(f"entry {entry.hex_id} was deleted meanwhile", id=entry.hex_id)
            raise CorruptStoreError(f"entry {entry.hex_id} is damaged and cannot be read", id=entry.hex_id)
        parts = _parts(opened, saved, form, n_tokens, draft)
    _write(out, parts)
    if as_json:
        output.data({**entry.as_dict(), "file": out, "file_bytes": sum(memoryview(p).nbytes for p in parts)})


def _parts(opened: Store, saved: SavedState, form: str, n_tokens: int | None, draft: bool) -> list[bytes | memoryview]:
    if draft:
        if saved.draft is None:
            raise NotFoundError(f"entry {saved.entry.hex_id} does not have a draft state")
        return [saved.draft.data]
    head = operate.head(opened, saved.entry.id)
    if form == "raw" or (form == "auto" and head is None):
        return [saved.main.data]
    file = slotfile.with_head(head, saved.tokens, saved.main)
    if n_tokens is not None and file.media:
        file = replace(file, media=tuple(m for m in file.media if m.start < n_tokens), padding=b"")
    return [file.header(), saved.main.data]


def _write(out: str, parts: list[bytes | memoryview]) -> None:
    if not base.is_stdout(out):
        slotfile.write_parts(out, parts)
        return
    stream = base.binary_stdout()
    for part in parts:
        stream.write(part)
    stream.flush()


@click.command(
    epilog=base.example(
        "kvstore export cache.db --to backup/          # all entries, as slot files with their meta",
        "kvstore export cache.db 3f2a 77b0 --to two.tar",
        "kvstore export cache.db --to - | ssh box kvstore import cache.db -",
    )
)
@base.common_options
@click.argument("ids", nargs=-1, shell_complete=base.complete_id)
@click.option("--to", "target", required=True, type=click.Path(allow_dash=True, readable=False),
              help='A folder, an archive (*.tar), or "-": an archive to stdout.')
@click.option("--force", is_flag=True, help="Replace an archive that exists.")
def export(
    store: str, key_file: str | None, as_json: bool, ids: tuple[str, ...], target: str, force: bool
) -> None:
    """Export entries with all their data, to be imported into another store.

    Exports all entries, or those with the given IDS.
    """
    to_stdout = base.is_stdout(target)
    if to_stdout and as_json:
        base.usage("with --json, give a file for the data")
    to_archive = not to_stdout and _is_archive(target)
    with ExitStack() as stack:
        opened = stack.enter_context(base.open_store(store, key_file))
        found = base.find(opened, ids) if ids else None
        chosen = operate.listing(opened) if found is None else iter(found)
        total = opened.stats().size if found is None else sum(e.size for e in found)
        entries = _parents_first(opened, chosen, None if found is None else {e.id for e in found})
        moved = stack.enter_context(output.progress("exporting"))
        skipped: list[dict[str, str]] = []
        bases: list[int] = []
        items = _items(opened, entries, total, moved, skipped, bases)
        if to_stdout:
            n = archive.to_tar(base.binary_stdout(), items)
        elif to_archive:
            n = _archive_to(target, items, force)
        else:
            n = archive.to_folder(Path(target), items)
    n -= len(bases)
    if as_json:
        output.data({"exported": n, "skipped": skipped, "to": target})
    else:
        output.note(f"{output.plural(n, 'entry', 'entries')} exported to {target}")
    if skipped:
        raise CorruptStoreError(f"{output.plural(len(skipped), 'entry', 'entries')} could not be read")


def _parents_first(opened: Store, chosen: Iterator[Entry], ids: set[int] | None) -> Iterator[Entry]:
    """The chosen entries (all, or those of `ids`) with the bases that they need, each once and after its parent.

    An import can then store each against its parent again.
    """
    done: set[int] = set()
    for entry in chosen:
        above = [entry] if entry.parent is None else operate.lineage(opened, entry.id)
        bases = _unlisted(opened, above[:-1]) if ids is not None else set()
        for one in above:
            if one.id not in done and (ids is None or one.id in ids or one.id in bases):
                done.add(one.id)
                yield one


def _unlisted(opened: Store, entries: list[Entry]) -> set[int]:
    return {e.id for e in entries if opened.entry(e.id) is None}


def _items(
    opened: Store,
    entries: Iterator[Entry],
    total: int,
    moved: Callable[[int, int], None],
    skipped: list[dict[str, str]],
    bases: list[int],
) -> Iterator[Exported]:
    """The entries with their data; `bases` gets the ids of those that are only bases."""
    done = 0
    for entry in entries:
        try:
            item = operate.export(opened, entry.id)
        except KVStoreError as error:
            output.note(f"skipped {entry.hex_id}: {error.message}")
            skipped.append({"id": entry.hex_id, "message": error.message})
            continue
        if item is not None:
            bases += [entry.id] if item.base else []
            yield item
        done += entry.size
        moved(done, total)


def _archive_to(target: str, items: Iterator[Exported], force: bool) -> int:
    special = fsutil.descriptor_of(target) is not None or fsutil.kind_of(target) is not None
    if os.path.lexists(target) and not force and not special:
        raise InvalidInputError(f"{target} exists already", hint="give another name, or --force")
    try:
        with fsutil.atomic_write(target, replace=force) as out:
            return archive.to_tar(out, items)
    except FileExistsError:
        raise InvalidInputError(f"{target} exists already", hint="give another name, or --force") from None
    except KVStoreError:
        raise
    except OSError as error:
        raise fsutil.error_of(error, target, kind=SlotFileError) from error


def _is_archive(target: str) -> bool:
    """Whether --to names an archive, not a folder. Refuses file name endings of other formats."""
    if fsutil.descriptor_of(target) is not None:
        return True
    kind = fsutil.kind_of(target)
    if kind is not None:
        return kind != "a directory"
    ending = os.path.splitext(target)[1]
    if ending.lower() == ".tar":
        return True
    if re.fullmatch(r"\.\w*[A-Za-z]\w*", ending) or os.path.isfile(target):
        base.usage(f"{target}: give an archive (*.tar) or a folder, whose name can end in /")
    return False


@click.command(
    "import",
    epilog=base.example("kvstore import cache.db backup/", "kvstore import cache.db two.tar slots/chat.bin"),
)
@base.common_options
@click.argument("sources", nargs=-1, required=True, type=click.Path(allow_dash=True))
@_fingerprint
@_min_saved
def import_(
    store: str, key_file: str | None, as_json: bool, sources: tuple[str, ...], fingerprint: str, min_saved: float | None
) -> None:
    """Import exports, slot files and session files.

    SOURCES are folders, archives (*.tar; "-": stdin) and files.

    Exported entries keep their id, class, times and fingerprint, and are stored as deltas again. Other files are stored
    under --fingerprint.
    """
    done: list[tuple[str, Entry]] = []
    failed: list[tuple[str, KVStoreError]] = []
    with base.open_store(
        store, key_file, create=True, readonly=False, fingerprint=fingerprint, min_saved_mib=min_saved
    ) as opened:
        for source in sources:
            for name, item in _sources(source):
                if isinstance(item, KVStoreError):
                    failed.append((name, item))
                    output.note(f"skipped {name}: {item.message}")
                    continue
                if isinstance(item, SlotFile):
                    done.append((name, opened.put(item.tokens, item.state, head=slotfile.head_of(item))))
                    _remark(name, item)
                    continue
                entry = operate.restore(opened, item)
                if entry is None:
                    output.note(f"skipped {name}: it has expired")
                elif not item.base:
                    done.append((name, entry))
    _results(done, as_json)
    if failed:
        raise failed[0][1]


def _sources(source: str) -> Iterator[tuple[str, Exported | SlotFile | KVStoreError]]:
    if source == "-":
        yield from _stream("stdin", sys.stdin.buffer, 0)
    elif os.path.isdir(source):
        yield from _folder(Path(source))
    else:
        try:
            with fsutil.open_source(source) as file:
                yield from _stream(source, file, os.fstat(file.fileno()).st_size)
        except FileNotFoundError as error:
            raise base.missing(source) from error
        except KVStoreError:
            raise
        except OSError as error:
            raise fsutil.error_of(error, source, "read", kind=SlotFileError) from error


def _folder(path: Path) -> Iterator[tuple[str, Exported | SlotFile | KVStoreError]]:
    found, _ = archive.slot_files(path)
    if not found:
        output.note(f"{path} does not contain an export or a slot file")
    with output.progress("importing") as moved:
        total, at = sum(p.stat().st_size for p in found), 0
        for file in sorted(found, key=archive.order):
            try:
                item: Exported | SlotFile | KVStoreError = archive.of_folder(file)
            except KVStoreError as error:
                item = error
            yield str(file), item
            at += file.stat().st_size
            moved(at, total)


def _stream(name: str, stream: Any, total: int) -> Iterator[tuple[str, Exported | SlotFile | KVStoreError]]:
    """The content of a file, a pipe or a device: one slot file, or an archive."""
    start = b""
    while len(start) < 4 and (piece := stream.read(4 - len(start))):
        start += piece
    if start not in archive.MAGICS:
        yield from _archive(name, archive.joined(start, stream), total)
    elif os.path.isfile(name) and fsutil.descriptor_of(name) is None:
        yield name, archive.of_folder(Path(name))
    else:
        yield name, slotfile.read(start + stream.read())


def _archive(name: str, stream: BinaryIO, total: int) -> Iterator[tuple[str, Exported | KVStoreError]]:
    with output.progress("importing") as moved:
        at = 0

        def seen(n: int) -> None:
            nonlocal at
            at += n
            moved(at, total or at)

        yield from archive.of_tar(name, stream, seen)
