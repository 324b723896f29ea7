"""Learned prefixes: cropped out of a stored state without the engine; the parents of the entries that continue them."""

from __future__ import annotations

import logging
import time

from .. import layout, slotfile
from ..errors import CorruptStoreError, InvalidInputError, LayoutError, NotFoundError
from ..storage import policy, queries, queries_blobs, queries_chains
from ..storage import prefix_index as prefixes
from ..storage.db import Connection
from ..types import Entry, EntryClass, Source, Tokens, hex_id
from ..util.buffers import as_u8
from . import get, put
from .core import StoreCore
from .entry_codec import encode_entry, load_base
from .put_request import ParsedStates, new_request
from .update import known_of, replace_parts

log = logging.getLogger("kvstore")
FAMILY_ENTRIES = 256  # entries of a family that are considered, the most recently used first


def source_of(core: StoreCore, c: Connection, tokens: Tokens) -> int | None:
    """An entry that begins with all of these tokens and can be cut there."""
    fingerprint = core.fingerprint_id(c)
    if fingerprint is None:
        return None
    found = prefixes.longest(c, core.filters, fingerprint, prefixes.key_of(tokens), core.now())
    return found[0] if found is not None and found[1] == len(tokens) else None


def learn(core: StoreCore, id: int, n_tokens: int, entry_class: EntryClass, source: Source) -> Entry:
    """Stores the first n_tokens of an entry as a learned entry, and the entries that continue it as deltas against it."""
    saved = get.read(core, id)
    if saved is None:
        raise NotFoundError(f"no entry {hex_id(id)}", id=hex_id(id))
    if not 0 < n_tokens <= saved.entry.n_tokens:
        raise InvalidInputError(
            f"n_tokens is {n_tokens}, the entry has {saved.entry.n_tokens}", hint="give a number from 1 to that"
        )
    main, draft = saved.main, saved.draft
    tokens = saved.tokens[:n_tokens]
    if n_tokens < saved.entry.n_tokens:
        get.refuse_opaque(saved.entry, main)
        main = layout.crop(main, n_tokens)
        if draft is not None:
            try:
                draft = layout.crop(draft, n_tokens)
            except LayoutError:
                draft = None  # the prefix then speeds up the main model alone
    with core.db.read() as c:
        head = queries.head(c, id)
    if head is not None and n_tokens < saved.entry.n_tokens:
        found = slotfile.read_head(as_u8(head))
        media = [m for m in found.media if m.start < n_tokens]
        head = slotfile.head_bytes(found.kind, found.version, (), found.packed, media)
    learned = put.put(
        core,
        new_request(
            tokens,
            main,
            draft,
            entry_class=entry_class,
            source=source,
            ttl=None,
            family=saved.entry.family,
            excerpt=saved.entry.excerpt,
            n_input=n_tokens,
            n_images=0,
            share=True,
            head=head,
        ),
    )
    adopt(core, learned)
    return learned


def adopt(core: StoreCore, learned: Entry) -> int:
    """Stores what continues a learned prefix against it, each in a transaction of its own; their number."""
    with core.db.read() as c:
        fingerprint = core.fingerprint_id(c)
        tokens = queries.tokens(c, learned.id)
        if fingerprint is None or tokens is None:
            return 0
        ids = queries.continuing(c, fingerprint, prefixes.key_of(tokens))
    adopted = 0
    for id in ids:
        try:
            adopted += id != learned.id and _adopt_one(core, id, learned)
        except CorruptStoreError as error:
            log.debug("entry %s stays as it is: %s", hex_id(id), error)  # its next get says what is wrong, and drops it
    return adopted


def _adopt_one(core: StoreCore, id: int, learned: Entry) -> bool:
    """Re-encodes an entry or a base against a learned prefix, which is longer than its present parent."""
    started = time.perf_counter()
    with core.db.read() as c:
        entry = queries.entry(c, id, None, bases=True)
        if entry is None or entry.parent == learned.id:
            return False
        links = queries_chains.links(c, id)
        if core.is_expired(entry) and not queries_chains.is_base(c, id):
            return False
        version = links[0].version if links else ()
        main, draft = core.reader.read(c, entry)
        base = load_base(core.reader, c, learned.id, learned.n_tokens)
    if base is None:
        return False
    encoded = encode_entry(core.reader, ParsedStates(main, draft), *known_of(links[0]), base, core.min_saved)
    stored = encoded.stored
    if not encoded.shared or stored >= entry.stored:
        return False
    with core.budget.reserve(stored, stored, learned.id) as (c, dropped):
        # Another thread or process may have been here since the read.
        if queries_blobs.version(c, id) != version:
            return False
        if queries_blobs.version(c, base.id) != base.version:
            return False
        shared = replace_parts(core, c, entry, encoded.parts, base.id)
        base.record_samples(c)
        if entry.parent is not None:
            dropped.bases += queries_chains.delete_childless_bases(c, [entry.parent])
    core.ram.discard(id)
    put.log_shared(shared, base.n_tokens, base.id, started)
    return True


class AutoLearn:
    """Learns the prefixes that three entries of a family would each save min_saved bytes by."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def run(self) -> list[Entry]:
        """Looks at the families that were put to since the last run; gives what was learned."""
        learned = []
        for family in self._core.take_families():
            entry = self._family(family)
            if entry is not None:
                learned.append(entry)
        return learned

    def _family(self, family: int) -> Entry | None:
        core = self._core
        with core.db.read() as c:
            fingerprint = core.fingerprint_id(c)
            if fingerprint is None:
                return None
            rows = queries.family_tokens(c, fingerprint, family, core.now(), FAMILY_ENTRIES)
        candidates = sorted(
            (policy.Candidate(key, size / (len(key) // 4), shared) for _, key, size, shared in rows), key=lambda r: r.key
        )
        chosen = policy.prefix_to_learn(candidates, core.min_saved)
        n_tokens = len(chosen) // 4
        for id, key, _, _ in rows if chosen else ():
            if key.startswith(chosen):
                try:
                    return learn(core, id, n_tokens, "learned", "policy")
                except (LayoutError, NotFoundError) as error:
                    log.debug("no prefix of %d tokens from %s: %s", n_tokens, hex_id(id), error)
        return None
