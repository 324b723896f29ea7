"""Copies of a store and of its entries: backup, export and restore; and the wiping of what was deleted."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import BusyError, InvalidInputError, KVStoreError
from ..meta import MetaBlock
from ..storage import db, geometry, queries, queries_blobs
from ..storage import prefix_index as prefixes
from ..storage.db import Connection, Database
from ..storage.entry_reader import Damaged
from ..storage.policy import cuts_of
from ..storage.ram_cache import RamCache
from ..types import Bytes, Entry, Tokens
from ..util import fsutil
from ..util.hashing import Digests
from .core import Engine
from .put_request import Job, new_id
from .verify import Progress

# VACUUM builds the new file in memory up to this size, beyond it in an unnamed temporary file.
VACUUM_IN_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An entry with all that belongs to it: `block` is its meta, `head` the header of the file that it came in."""

    block: MetaBlock
    tokens: Tokens
    main: Bytes
    draft: Bytes | None
    fingerprint: str
    n_images: int
    head: bytes | None


def backup(database: Database, path: str, progress: Progress | None = None) -> None:
    """Copies a store, which may be in use, to a new file of mode 0600: complete, or not there at all.

    The copy has the state of the moment it began. Raises InvalidInputError where there is such a file, or link, already.
    """
    path = db.resolve_new(path)
    if os.path.lexists(path):
        raise _there_already(path)
    temporary = fsutil.temporary_name(path)
    db.reserve_file(temporary, path)
    try:
        copy = database.sibling(temporary)
        try:
            # In one read transaction, so that no writer makes it start again.
            with copy.exclusive() as to, database.read() as c:
                page_size, n_pages, _ = queries_blobs.pages(c)
                to.pragma("page_size", page_size)  # an encrypted copy cannot take over another
                with to.backup("main", c, "main") as running:
                    while not running.done:
                        running.step(geometry.BACKUP_PAGES)
                        if progress is not None:
                            progress((n_pages - running.remaining) * page_size, n_pages * page_size)
        finally:
            copy.close()
        _publish(temporary, path)
    except BaseException:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                os.unlink(temporary + suffix)
        raise


def _there_already(path: str) -> InvalidInputError:
    return InvalidInputError(f"{path} is there already", hint="give the name of a new file")


def _publish(temporary: str, path: str) -> None:
    """Gives a finished file its name, which must be new, once it is on the disk."""
    try:
        fsutil.fsync_file(temporary)
        fsutil.give_name(temporary, path, replace=False)
        fsutil.fsync_dir(os.path.dirname(temporary))
    except FileExistsError as error:
        raise _there_already(path) from error
    except OSError as error:
        if isinstance(error, KVStoreError):
            raise
        raise fsutil.error_of(error, path) from error


def export(engine: Engine, id: int) -> Exported | None:
    """An entry and its states, whole; None where there is none. Raises Damaged."""
    saved = engine.read_twice(id)
    if saved is None:
        return None
    with engine.db.read() as c:
        entry = queries.entry(c, id, engine.scope(c))  # its uses are counted meanwhile
        return None if entry is None else exported(c, entry, saved.main, saved.draft)


def exported(c: Connection, entry: Entry, main: Bytes, draft: Bytes | None) -> Exported:
    tokens = queries.tokens(c, entry.id)
    if tokens is None or tokens.size != entry.n_tokens:
        raise Damaged(entry.id, "its tokens are damaged")
    block = block_of(entry, queries.family_flags(c, entry.id))
    fingerprint = queries.fingerprint_of(c, entry.id) or ""
    return Exported(block, tokens, main, draft, fingerprint, entry.n_images, queries.head(c, entry.id))


def block_of(entry: Entry, flags: tuple[bool, bool]) -> MetaBlock:
    """The meta block of an entry; `flags` say whether it was counted in its family as saved, and as reused."""
    saved, reused = flags
    return MetaBlock(
        id=entry.id,
        entry_class=entry.entry_class,
        source=entry.source,
        saved=saved,
        reused=reused,
        created_at=entry.created_at,
        last_used=entry.last_used,
        expires_at=entry.expires_at,
        ttl=entry.ttl,
        hits=entry.hits,
        family=entry.family,
        n_input=entry.n_input,
        excerpt=entry.excerpt,
        parent=entry.parent,
    )


def restore(engine: Engine, item: Exported) -> Entry | None:
    """Puts an exported entry as what it was: class, times, uses, and shared where it was shared. None where it expired.

    It keeps its id, unless the store gave that to another entry. What it was stored against must be restored first.
    """
    block = item.block
    if block.expires_at is not None and block.expires_at <= engine.now():
        return None
    shared = block.parent is not None and block.entry_class != "learned"
    # Sharing was worth it where it was put: here it is done again, whatever it saves.
    target = Engine(
        engine.db,
        fingerprint=item.fingerprint,
        ram=RamCache(0),
        disk_budget=engine.space.budget,
        min_saved=0 if shared else engine.min_saved,
        verify=True,
        filters=engine.filters,
    )
    key = prefixes.key_of(item.tokens)
    with target.db.read() as c:
        parent = None if block.parent is None else queries.entry(c, block.parent, None)
    entry = target.put(
        Job(
            id=_free_id(target, block.id, key),
            tokens=item.tokens,
            key=key,
            main=item.main,
            draft=item.draft,
            digests=Digests(main=item.main, draft=item.draft),
            cuts=cuts_of(item.main, len(item.tokens)),
            entry_class=block.entry_class,
            source=block.source,
            ttl=block.ttl,
            family=block.family,
            excerpt=block.excerpt,
            n_input=max(0, block.n_input),
            n_images=item.n_images,
            share=shared,
            head=item.head,
        )
    )
    with target.writing() as (c, _):
        found = queries.entry(c, entry.id, None)
        if found is None:
            return entry
        restored = replace(
            found,
            created_at=block.created_at,
            last_used=block.last_used,
            expires_at=block.expires_at,
            ttl=block.ttl,
            hits=min(block.hits, (1 << 63) - 1),
        )
        queries.update_meta(c, restored)
        queries.set_family_flags(c, entry.id, True, block.reused)
        # A put is a use of its parent; a restore is not.
        now = None if parent is None else queries.entry(c, parent.id, None)
        if parent is not None and now is not None:
            queries.update_meta(c, replace(now, last_used=max(parent.last_used, block.last_used)))
    return restored


def _free_id(engine: Engine, id: int, key: bytes) -> int:
    with engine.db.read() as c:
        tokens = queries.tokens(c, id)
    return id if id and (tokens is None or prefixes.key_of(tokens) == key) else new_id()


def wipe(engine: Engine) -> None:
    """Leaves nothing in the file and its log but what the entries hold: it is written anew.

    Free pages are not enough: b-tree pages keep copies of rows that moved to another page. Needs room on the disk for the
    file twice more. Raises BusyError where a reader of an older state of the file does not end in time.
    """
    in_memory = engine.db.encrypted or engine.db.file_bytes() <= VACUUM_IN_MEMORY
    with engine.db.exclusive() as c:
        c.pragma("temp_store", 2 if in_memory else 1)
        try:
            c.execute("VACUUM")
        finally:
            c.pragma("temp_store", 2)
    if not engine.db.checkpoint(truncate=True) or engine.db.wal_bytes():
        raise BusyError(
            f"the log of {engine.db.path} still holds old pages: another process reads them",
            path=engine.db.path,
            hint="try again when it has finished",
        )

