"""Moves entries between stores: export and restore, with all data of an entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..meta import MetaBlock
from ..storage import prefix_index as prefixes
from ..storage import queries, queries_chains
from ..storage.db import Connection
from ..storage.entry_reader import Damaged
from ..storage.ram_cache import RamCache
from ..types import Bytes, Entry, Tokens
from . import get, put
from .core import StoreCore
from .put_request import new_id, new_request


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An entry with all that belongs to it: `block` is its meta, `head` the header of the file that it came in.

    base: it was kept only because entries were stored against it.
    """

    block: MetaBlock
    tokens: Tokens
    main: Bytes
    draft: Bytes | None
    fingerprint: str
    n_images: int
    head: bytes | None
    base: bool = False


def export(core: StoreCore, id: int) -> Exported | None:
    """An entry or a base with its states, whole; None where there is none. Raises Damaged."""
    saved = get.read_twice(core, id, bases=True)
    if saved is None:
        return None
    with core.db.read() as c:
        entry = queries.entry(c, id, core.scope(c), bases=True)  # its uses are counted meanwhile
        return None if entry is None else exported(c, entry, saved.main, saved.draft)


def exported(c: Connection, entry: Entry, main: Bytes, draft: Bytes | None) -> Exported:
    tokens = queries.tokens(c, entry.id)
    if tokens is None or tokens.size != entry.n_tokens:
        raise Damaged(entry.id, "its tokens are damaged")
    block = block_of(entry, queries.family_flags(c, entry.id))
    fingerprint = queries.fingerprint_of(c, entry.id) or ""
    head, base = queries.head(c, entry.id), queries_chains.is_base(c, entry.id)
    return Exported(block, tokens, main, draft, fingerprint, entry.n_images, head, base)


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


def restore(core: StoreCore, item: Exported) -> Entry | None:
    """Puts an exported entry with its class, times and uses, shared if it was shared. None if it has expired.

    It keeps its id, unless the store gave that to another entry. What it was stored against must be restored first. A base is
    a base again, and goes where nothing is restored that needs it.
    """
    block = item.block
    if not item.base and block.expires_at is not None and block.expires_at <= core.now():
        return None
    shared = block.parent is not None
    # Sharing was worth it where it was put: here it is done again, whatever it saves.
    target = StoreCore(
        core.db,
        fingerprint=item.fingerprint,
        ram=RamCache(0),
        disk_budget=core.budget.budget,
        min_saved=0 if shared else core.min_saved,
        verify=True,
        filters=core.filters,
    )
    key = prefixes.key_of(item.tokens)
    with target.db.read() as c:
        above = [] if block.parent is None else queries_chains.links(c, block.parent)
        used = [e for link in above if (e := queries.entry(c, link.id, None)) is not None]
    entry = put.put(
        target,
        new_request(
            item.tokens,
            item.main,
            item.draft,
            id=_free_id(target, block.id, key),
            entry_class=block.entry_class,
            source=block.source,
            ttl=block.ttl,
            family=block.family,
            excerpt=block.excerpt,
            n_input=max(0, block.n_input),
            n_images=item.n_images,
            share=shared,
            head=item.head,
            base=item.base,
        ),
    )
    return entry if item.base else _as_it_was(target, entry, block, used)


def _as_it_was(core: StoreCore, entry: Entry, block: MetaBlock, used: list[Entry]) -> Entry:
    """Gives a restored entry its times and uses; `used` are the entries that it is stored against, as they were before."""
    with core.transaction() as (c, _):
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
        # A put is a use of what it is stored against; a restore is not.
        for one in used:
            now = queries.entry(c, one.id, None)
            if now is not None:
                queries.update_meta(c, replace(now, last_used=max(one.last_used, block.last_used)))
    return restored


def _free_id(core: StoreCore, id: int, key: bytes) -> int:
    with core.db.read() as c:
        tokens, is_base = queries.tokens(c, id), queries_chains.is_base(c, id)
    return id if id and (tokens is None or (prefixes.key_of(tokens) == key and not is_base)) else new_id()
