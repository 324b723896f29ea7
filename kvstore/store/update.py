"""Changes an entry that is stored: its form (whole or a delta), its class, its expiry."""

from __future__ import annotations

import dataclasses

from ..errors import CorruptStoreError, NotFoundError
from ..storage import blobs, policy, queries, queries_blobs, writers
from ..storage.db import Connection
from ..storage.entry_reader import Damaged
from ..types import Entry, EntryClass, Source, hex_id
from .core import StoreCore
from .disk_budget import Dropped
from .entry_codec import Part, encode_entry
from .put_request import ParsedStates


def stage(c: Connection, parts: list[Part], writer: str) -> list[int]:
    """Inserts the blobs of an entry that does not exist yet; gives their ids."""
    return [queries_blobs.stage_blob(c, p.name, p.kind, p.size, p.data.size, writer) for p in parts]


def replace_parts(c: Connection, entry: Entry, parts: list[Part], parent: int | None) -> Entry:
    """Stores the same states of an entry in another form, inside a transaction that has made room for them."""
    for row in queries_blobs.blobs(c, entry.id):
        queries_blobs.delete_blob(c, row.id)
    staged = stage(c, parts, writers.process_name())
    for blob, part in zip(staged, parts, strict=True):
        blobs.write(c, blob, part.data)
        queries_blobs.finish_blob(c, blob, entry.id, part.digest)
    stored = sum(part.data.size for part in parts)
    queries.set_stored(c, entry.id, stored, parent)
    return dataclasses.replace(entry, stored=stored, parent=parent)


def make_whole(core: StoreCore, c: Connection, entry: Entry) -> Entry:
    """Stores an entry whole that was a delta, inside a transaction. Raises Damaged."""
    try:
        main, draft = core.reader.read(c, entry)
    except Damaged:
        with core.db.read(fresh=True) as again:
            main, draft = core.reader.from_disk().read(again, entry)
    digests = {row.part: row.digest for row in queries_blobs.blobs(c, entry.id)}
    whole = encode_entry(core.reader, ParsedStates(main, draft), digests, None, 0)
    return replace_parts(c, entry, whole.parts, None)


def keep_children(core: StoreCore, c: Connection, children: list[int], dropped: Dropped, written: int = 0) -> None:
    """Stores children whole before their parent is dropped. A child that is damaged, or has no room, is dropped."""
    for child in children:
        entry = core.row_to_drop(c, child)
        if entry is None:
            continue
        written += entry.size
        if not core.budget.fits(c, entry.size, written):
            core.drop(c, child, "disk_budget", dropped)
            continue
        try:
            make_whole(core, c, entry)
        except CorruptStoreError as error:
            core.drop(c, child, f"damaged: {getattr(error, 'reason', error.message)}", dropped)


def set_entry(core: StoreCore, id: int, entry_class: EntryClass | None, source: Source, ttl: int | None) -> Entry:
    """Changes class or expiry of an entry. Raises NotFoundError; also if the entry is damaged, which drops it."""
    try:
        return _set(core, id, entry_class, source, ttl)
    except CorruptStoreError as error:
        if isinstance(error, Damaged):
            if not core.drop_damaged(error, id):
                return _set(core, id, entry_class, source, ttl)
        elif not core.drop_unreadable(id):
            raise
        raise NotFoundError(f"entry {hex_id(id)} was damaged, and is dropped", id=hex_id(id)) from error


def _set(core: StoreCore, id: int, entry_class: EntryClass | None, source: Source, ttl: int | None) -> Entry:
    now = core.now()
    with core.db.read() as c:
        before = core.find(c, id)
    grown = before.size if before is not None and before.parent is not None and entry_class == "learned" else 0
    with core.budget.reserve(grown, grown, id) if grown else core.transaction() as (c, _):
        entry = core.find(c, id)
        if entry is None:
            raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
        if entry_class is not None:
            if entry_class == "learned" and entry.parent is not None:
                entry = make_whole(core, c, entry)
            queries.set_class(c, id, entry_class, source)
            entry = dataclasses.replace(entry, entry_class=entry_class, source=source)
        if ttl is not None:
            lasting = ttl if ttl > 0 else None
            expires_at = policy.expires_at(now, lasting)
            queries.set_expiry(c, id, lasting, expires_at)
            entry = dataclasses.replace(entry, ttl=lasting, expires_at=expires_at)
    return entry
