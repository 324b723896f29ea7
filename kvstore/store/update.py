"""Changes an entry that is stored: its form (whole or a delta), its class, its expiry."""

from __future__ import annotations

import dataclasses

from .. import bkvd
from ..errors import CorruptStoreError, DeltaError, NotFoundError
from ..storage import blobs, policy, queries, queries_blobs, queries_chains, writers
from ..storage.db import Connection
from ..storage.entry_reader import Damaged
from ..storage.queries_chains import Link
from ..types import Entry, EntryClass, Source, hex_id
from .core import StoreCore
from .disk_budget import Dropped
from .entry_codec import Part


def stage(c: Connection, parts: list[Part], writer: str) -> list[int]:
    """Inserts the blobs of an entry that does not exist yet; gives their ids."""
    return [queries_blobs.stage_blob(c, p.name, p.kind, p.size, p.data.size, writer) for p in parts]


def replace_parts(core: StoreCore, c: Connection, entry: Entry, parts: list[Part], parent: int | None) -> Entry:
    """Stores the same states of an entry in another form, inside a transaction that has made room for them.

    What is stored against the entry is not touched: its states are the same.
    """
    for row in queries_blobs.blobs(c, entry.id):
        queries_blobs.delete_blob(c, row.id)
    staged = stage(c, parts, writers.process_name())
    chunk = core.budget.chunk_bytes()
    for blob, part in zip(staged, parts, strict=True):
        blobs.write(c, blob, part.data, chunk)
        queries_blobs.finish_blob(c, blob, entry.id, part.digest, part.sample)
    stored = sum(part.data.size for part in parts)
    queries.set_stored(c, entry.id, stored, parent)
    return dataclasses.replace(entry, stored=stored, parent=parent)


def known_of(link: Link) -> tuple[dict[str, bytes], dict[str, int | None]]:
    """Digests and samples of the states of a link, by part, as its rows have them."""
    return {p: row.digest for p, row in link.rows.items()}, {p: row.sample for p, row in link.rows.items()}


def _whole(core: StoreCore, c: Connection, links: list[Link]) -> list[Part]:
    """The parts of an entry that will be stored whole. Raises Damaged."""
    entry = queries.entry(c, links[0].id, None, bases=True)
    assert entry is not None
    try:
        main, draft = core.reader.read(c, entry)
    except Damaged:
        with core.db.read(fresh=True) as again:
            main, draft = core.reader.from_disk().read(again, entry)
    digests, samples = known_of(links[0])
    states = {"main": main} if draft is None else {"main": main, "draft": draft}
    return [Part(name, "full", state, state.size, digests, samples) for name, state in states.items()]


def without_parent(core: StoreCore, c: Connection, links: list[Link]) -> tuple[list[Part], int | None]:
    """What to store for the first of `links`, and against what, so that its parent can go: its deltas are composed.

    It becomes whole where the parent is, or where that is hardly larger. Raises Damaged.
    """
    child, parent = links[0], links[1] if len(links) > 1 else None
    if parent is None or "main" not in parent.rows or parent.rows["main"].kind == "full":
        return _whole(core, c, links), None
    digests, samples = known_of(child)
    parts: list[Part] = []
    try:
        for name, row in child.rows.items():
            stored, above = core.reader.stored(c, child, row), parent.rows.get(name)
            if row.kind == "full":
                parts.append(Part(name, "full", stored, row.size, digests, samples))
            elif above is not None and above.kind == "bkvd":
                most = row.size - policy.least_saved(None, row.size)
                delta = bkvd.compose(stored, core.reader.stored(c, parent, above), limit=most)
                if delta is None:
                    return _whole(core, c, links), None
                parts.append(Part(name, "bkvd", delta.data, row.size, digests, samples))
            else:  # a draft whose parent's draft is whole
                parts += [part for part in _whole(core, c, links) if part.name == name]
    except DeltaError as error:
        raise Damaged(child.id, f"it cannot be stored without its parent: {error.message}") from error
    return parts, parent.parent if any(part.kind == "bkvd" for part in parts) else None


def rebuilt_bytes(links: list[Link]) -> int:
    """About what the first of `links` takes when its parent has gone."""
    if not links:
        return 0
    whole = sum(row.size for row in links[0].rows.values())
    if len(links) < 2 or any(row.kind == "full" for row in links[1].rows.values()):
        return whole
    return min(whole, links[0].stored + links[1].stored)


def keep_children(
    core: StoreCore, c: Connection, children: list[int], dropped: Dropped, written: int = 0
) -> None:
    """Stores children without their parent, before it is dropped; those that cannot be, or have no room, are dropped."""
    for child in children:
        entry = core.row_to_drop(c, child)
        if entry is None:
            continue
        try:
            links = queries_chains.links(c, child)
            need = rebuilt_bytes(links)
            written += need
            if not core.budget.fits(c, need, written):
                core.drop(c, child, "disk_budget", dropped)
                continue
            parts, parent = without_parent(core, c, links)
            replace_parts(core, c, entry, parts, parent)
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
    with core.transaction() as (c, _):
        entry = core.find(c, id)
        if entry is None:
            raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
        if entry_class is not None:
            if entry_class == "learned" and entry.parent is not None:
                core.reader.read(c, entry)  # others will be stored against it
            queries.set_class(c, id, entry_class, source)
            entry = dataclasses.replace(entry, entry_class=entry_class, source=source)
        if ttl is not None:
            lasting = ttl if ttl > 0 else None
            expires_at = policy.expires_at(now, lasting)
            queries.set_expiry(c, id, lasting, expires_at)
            entry = dataclasses.replace(entry, ttl=lasting, expires_at=expires_at)
    return entry
