"""Learned prefixes: cut out of a stored state, without the engine, and taken as the parent of what continues them."""

from __future__ import annotations

import logging
import time

from .. import layout, slotfile
from ..errors import CorruptStoreError, InvalidInputError, LayoutError, NotFoundError
from ..layout.reader import as_bytes
from ..storage import policy, queries, queries_blobs
from ..storage import prefix_index as prefixes
from ..storage.db import Connection
from ..storage.policy import cuts_of
from ..types import Entry, EntryClass, Source, Tokens, hex_id
from ..util.hashing import Digests
from .core import Engine
from .entry_codec import Parent
from .put_request import Job, new_id

log = logging.getLogger("kvstore")
FAMILY_ENTRIES = 256  # as many of a family are looked at, the most recently used


def source_of(engine: Engine, c: Connection, tokens: Tokens) -> int | None:
    """An entry that begins with all of these tokens and can be cut there."""
    fingerprint = engine.fingerprint_id(c)
    if fingerprint is None:
        return None
    found = prefixes.longest(c, engine.filters, fingerprint, prefixes.key_of(tokens), engine.now())
    return found[0] if found is not None and found[1] == len(tokens) else None


def learn(engine: Engine, id: int, n_tokens: int, entry_class: EntryClass, source: Source) -> Entry:
    """Stores the first n_tokens of an entry as a learned entry, and those that continue it against it."""
    saved = engine.read(id)
    if saved is None:
        raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
    if not 0 < n_tokens <= saved.entry.n_tokens:
        raise InvalidInputError(
            f"n_tokens is {n_tokens}, the entry has {saved.entry.n_tokens}", hint="give a number from 1 to that"
        )
    main, draft = saved.main, saved.draft
    tokens = saved.tokens[:n_tokens]
    if n_tokens < saved.entry.n_tokens:
        main = layout.crop(main, n_tokens)
        if draft is not None:
            try:
                draft = layout.crop(draft, n_tokens)
            except LayoutError:
                draft = None  # the prefix then speeds up the main model alone
    with engine.db.read() as c:
        head = queries.head(c, id)
    if head is not None and n_tokens < saved.entry.n_tokens:
        found = slotfile.read_head(as_bytes(head))
        media = [m for m in found.media if m.start < n_tokens]
        head = slotfile.head_bytes(found.kind, found.version, (), found.packed, media)
    learned = engine.put(
        Job(
            id=new_id(),
            tokens=tokens,
            key=prefixes.key_of(tokens),
            main=main,
            draft=draft,
            digests=Digests(main=main, draft=draft),
            cuts=cuts_of(main, n_tokens),
            entry_class=entry_class,
            source=source,
            ttl=None,
            family=saved.entry.family,
            excerpt=saved.entry.excerpt,
            n_input=n_tokens,
            n_images=0,
            share=False,
            head=head,
        )
    )
    adopt(engine, learned)
    return learned


def adopt(engine: Engine, learned: Entry) -> int:
    """Stores the entries that continue a learned prefix against it, each in a transaction of its own; their number."""
    with engine.db.read() as c:
        fingerprint = engine.fingerprint_id(c)
        tokens = queries.tokens(c, learned.id)
        if fingerprint is None or tokens is None:
            return 0
        ids = queries.continuing(c, fingerprint, prefixes.key_of(tokens))
    adopted = 0
    for id in ids:
        try:
            adopted += id != learned.id and _adopt_one(engine, id, learned)
        except CorruptStoreError as error:
            log.debug("entry %s stays as it is: %s", hex_id(id), error)  # its next get says what is wrong, and drops it
    return adopted


def _adopt_one(engine: Engine, id: int, learned: Entry) -> bool:
    """Re-encodes an entry against a learned prefix, if that is longer than its present parent."""
    started = time.perf_counter()
    with engine.db.read() as c:
        entry = queries.entry(c, id, None)
        if entry is None or entry.entry_class == "learned" or entry.parent == learned.id or engine.is_expired(entry):
            return False
        if queries.has_children(c, id):
            return False
        if entry.parent is not None:
            present = queries.entry(c, entry.parent, None)
            if present is not None and present.n_tokens >= learned.n_tokens:
                return False
        version = tuple(row.id for row in queries_blobs.blobs(c, id))
        digests = {row.part: row.digest for row in queries_blobs.blobs(c, id)}
        main, draft = engine.reader.read(c, entry)
        held = engine.reader.stored(c, learned.id)
    parent = Parent(learned.id, learned.n_tokens, held.version, held)
    parts, shared = engine.shelf.build(main, draft, digests, parent, engine.min_saved)
    stored = sum(part.data.size for part in parts)
    if not shared or stored >= entry.stored:
        return False
    with engine.space.room(stored, stored, learned.id) as (c, _):
        # Another thread or process may have been here since the read.
        if tuple(row.id for row in queries_blobs.blobs(c, id)) != version:
            return False
        if tuple(row.id for row in queries_blobs.blobs(c, learned.id)) != held.version:
            return False
        engine.replace_parts(c, entry, parts, learned.id)
    engine.ram.discard(id)
    log.info(
        "shared %s: %d tokens, %d of them from learned prefix %s, %.1f MiB instead of %.1f MiB, %.3f s",
        entry.hex_id, entry.n_tokens, learned.n_tokens, learned.hex_id, stored / policy.MIB, entry.size / policy.MIB,
        time.perf_counter() - started,
    )  # fmt: skip
    return True


class AutoLearn:
    """Learns the prefixes that three entries of a family would each save min_saved bytes by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self) -> list[Entry]:
        """Looks at the families that were put to since the last run; gives what was learned."""
        learned = []
        for family in self._engine.take_families():
            entry = self._family(family)
            if entry is not None:
                learned.append(entry)
        return learned

    def _family(self, family: int) -> Entry | None:
        engine = self._engine
        with engine.db.read() as c:
            fingerprint = engine.fingerprint_id(c)
            if fingerprint is None:
                return None
            rows = queries.family_tokens(c, fingerprint, family, engine.now(), FAMILY_ENTRIES)
        candidates = sorted(
            (policy.Candidate(key, size / (len(key) // 4), shared) for _, key, size, shared in rows), key=lambda r: r.key
        )
        chosen = policy.prefix_to_learn(candidates, engine.min_saved)
        n_tokens = len(chosen) // 4
        for id, key, _, _ in rows if chosen else ():
            if key.startswith(chosen):
                try:
                    return learn(engine, id, n_tokens, "learned", "policy")
                except (LayoutError, NotFoundError) as error:
                    log.debug("no prefix of %d tokens from %s: %s", n_tokens, hex_id(id), error)
        return None
