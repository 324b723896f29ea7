"""`repair` drops what cannot be served, and nothing else; `salvage` copies what can be read to a new file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import audit, bkvd, blobs, check, copies, queries
from .check import Lenient, Problem, Progress, Unreadable
from .db import Connection
from .engine import Engine
from .errors import DeltaError, KVStoreError
from .hashing import digest, family
from .meta import MetaBlock
from .records import Bytes
from .shelf import Damaged, cuts_of


def repair(engine: Engine, problems: Sequence[Problem]) -> list[int]:
    """Does what the remedies of `problems` say; the ids of the entries that went.

    Children of a dropped entry that can still be rebuilt are, and stay. What cannot be done is left as it is, each in a
    transaction of its own: verify again to see what remains.
    """
    remedies = {p.remedy for p in problems}
    removed: list[int] = []
    if any(p.invariant == "sqlite" for p in problems):
        _attempt(engine, audit.reindex)  # an index alone can be built again from its table
    # Children first: a parent's good children are rebuilt before it goes.
    bad = {p.entry for p in problems if p.remedy == "drop" and p.entry is not None}
    for id in sorted(bad, key=lambda id: _has_children(engine, id)):
        try:
            removed += engine.delete(id, "keep", "damaged")
        except Unreadable:
            continue
    if "rows" in remedies or bad:
        _attempt(engine, queries.delete_orphans)
        _attempt(engine, blobs.reclaim)
    for id in sorted({p.entry for p in problems if p.remedy == "cuts" and p.entry is not None} - set(removed)):
        _attempt(engine, lambda c, id=id: _find_cuts(engine, c, id))  # type: ignore[misc]
    if remedies & {"totals", "rows"}:
        _attempt(engine, audit.rebuild_totals)
    return removed


def _attempt(engine: Engine, step: Callable[[Connection], object]) -> None:
    try:
        with engine.db.write() as c:
            step(c)
    except Unreadable:
        return  # the next verify names it again


def _has_children(engine: Engine, id: int) -> bool:
    try:
        with engine.db.read() as c:
            return queries.has_children(c, id)
    except Unreadable:
        return True


def _find_cuts(engine: Engine, c: Connection, id: int) -> None:
    entry = queries.entry(c, id, None)
    if entry is not None:
        main, _ = engine.shelf.fresh(c, entry)
        found = cuts_of(main, entry.n_tokens)
        audit.set_cuts(c, id, found.any, found.counts)


# -- salvage


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What `salvage` copied, by id, and what it could not read, as problems."""

    entries: tuple[int, ...]
    lost: tuple[Problem, ...]


def salvage(source: Lenient, target: Engine, progress: Progress | None = None) -> Salvaged:
    """Copies every entry of a damaged file that can be given back byte for byte. Writes to the target alone.

    Parents go first, so what was stored against one is again; where the parent cannot be read its children are lost.
    """
    ids, lost = check.all_ids(source)
    listed: list[tuple[bool, int, int, int]] = []
    for id in ids:
        try:
            with source.read() as c:
                entry = queries.entry(c, id, None)
        except Unreadable:
            entry = None
        rank = (False, 0, id, 1) if entry is None else (entry.parent is not None, entry.n_tokens, id, entry.size)
        listed.append(rank)
    total = sum(row[3] for row in listed)
    done = 0
    saved: list[int] = []
    for _, _, id, n_bytes in sorted(listed):
        try:
            with source.read() as c:
                item = _read(c, id)
        except (*Unreadable, Damaged, blobs.UnreadableBlob, DeltaError) as error:
            lost.append(Problem("whole-entry", id, f"it cannot be read: {_say(error)}"))
        else:
            # Expired entries are not copied, and nobody misses them.
            if copies.restore(target, item) is not None:
                saved.append(id)
        done += n_bytes
        if progress is not None:
            progress(done, total)
    return Salvaged(tuple(saved), tuple(lost))


def _say(error: Exception) -> str:
    return error.message if isinstance(error, KVStoreError) else str(error)


def _read(c: Connection, id: int) -> copies.Exported:
    """An entry with its states, checked; from the prefix index and with default meta where its own rows are lost."""
    states = _states(c, id)
    try:
        entry = queries.entry(c, id, None)
        if entry is not None:
            return copies.exported(c, entry, states["main"], states.get("draft"))
    except Unreadable:
        pass  # its row is lost, its tokens may still be in the index
    found = audit.tokens_by_index(c, id)
    if found is None:
        raise Damaged(id, "its tokens are lost")
    fingerprint = audit.fingerprint_text(c, found[0])
    if fingerprint is None:
        raise Damaged(id, "its fingerprint is lost")
    tokens = np.frombuffer(found[1], "<i4").astype(np.int32)
    block = MetaBlock(id=id, family=family(tokens, 0, 0), n_input=len(tokens))
    return copies.Exported(block, tokens, states["main"], states.get("draft"), fingerprint, 0, None)


def _states(c: Connection, id: int) -> dict[str, Bytes]:
    """The states of an entry as they were put. Raises Damaged and what the layers below do."""
    rows = queries.blobs(c, id)
    if not any(row.part == "main" for row in rows):
        raise Damaged(id, "its main state is lost")
    states: dict[str, Bytes] = {}
    for row in rows:
        state = blobs.read(c, row)
        if row.kind == "bkvd":
            parent = bkvd.parent_id(state)
            of_parent = [r for r in queries.blobs(c, parent) if r.part == row.part and r.kind == "full"]
            if not of_parent:
                raise Damaged(id, "its parent is lost")
            state = bkvd.decode(state, blobs.read(c, of_parent[0]), parent)
        if digest(state) != row.digest:
            raise Damaged(id, f"its {row.part} state fails its digest")
        states[row.part] = state
    return states

