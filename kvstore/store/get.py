"""Gets an entry: its states as they were put. An entry that cannot be restored exactly is dropped, and is a miss."""

from __future__ import annotations

import dataclasses
import logging

from .. import layout
from ..errors import CorruptStoreError, LayoutError
from ..storage import queries, queries_chains
from ..storage.entry_reader import Damaged, EntryReader
from ..types import Bytes, Entry, SavedState, hex_id
from .core import StoreCore

log = logging.getLogger("kvstore")


def get(core: StoreCore, id: int) -> SavedState | None:
    """`read`, counted as a hit or a miss."""
    saved = read(core, id)
    if saved is None:
        core.counters.count("misses")
        return None
    core.counters.use(id, core.now())
    core.counters.count("hits")
    return dataclasses.replace(saved, entry=core.with_uses(saved.entry))


def refuse_opaque(entry: Entry, *states: Bytes | None) -> None:
    """Raises LayoutError if one of the states has no layout that is understood, so that it cannot be cropped."""
    for state in states:
        try:
            if state is not None:
                layout.parse(state)
        except LayoutError as error:
            message = f"entry {entry.hex_id} is not a llama.cpp state, so it cannot be cut"
            raise LayoutError(message, hint=f"use all of its {entry.n_tokens} tokens; {error.message}") from None


def read(core: StoreCore, id: int) -> SavedState | None:
    """An entry with its states, not counted as a hit; None where there is none. A damaged one is dropped.

    Raises StoreIOError where the file cannot be read now; nothing is dropped then.
    """
    try:
        return read_twice(core, id)
    except Damaged as error:
        if core.drop_damaged(error, id):
            return None
    try:
        return read_twice(core, id)  # the parent's bytes are right now
    except Damaged as error:
        if error.id == id:
            core.drop_damaged(error, id)
    return None


def read_twice(core: StoreCore, id: int, *, bases: bool = False) -> SavedState | None:
    """`read`, which drops nothing, also of a base if `bases`. Raises Damaged for an entry that failed twice.

    After a first failure the entry is read again on a new connection, without the RAM layer.
    """
    try:
        return _read(core, id, core.reader, fresh=False, bases=bases)
    except CorruptStoreError as error:
        log.debug("entry %s is read again: %s", hex_id(id), error)
    try:
        return _read(core, id, core.reader.from_disk(), fresh=True, bases=bases)
    except Damaged:
        raise
    except CorruptStoreError as error:
        raise Damaged(id, error.message) from error


def _read(core: StoreCore, id: int, reader: EntryReader, *, fresh: bool, bases: bool) -> SavedState | None:
    with core.db.read(fresh=fresh) as c:
        entry = queries.entry(c, id, core.scope(c), bases=bases)
        if entry is not None and (not core.is_expired(entry) or (bases and queries_chains.is_base(c, id))):
            main, draft = reader.read(c, entry)
            tokens = queries.tokens(c, id)
            if tokens is None or tokens.size != entry.n_tokens:
                raise Damaged(id, "its tokens are damaged")
            return SavedState(entry, tokens, main, draft)
    if entry is not None:
        core.drop_quietly(id, "expired")
    return None
