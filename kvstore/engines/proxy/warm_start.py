"""Restores the states most likely to be wanted into the empty slots of a new server process, while no request waits."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable

from ... import layout, operate
from ...errors import KVStoreError
from ...store import Store
from ...types import Entry, hex_id
from .backend import Identity
from .backend_link import BackendLink
from .metrics import Metrics
from .server_process import ProcessWatch
from .slots import Listing, Slot, SlotTable
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
RESTORE_SECONDS = 120.0
LIST_SECONDS = 2.0
QUIET_SECONDS = 0.1  # since the last request
CANDIDATES = 64  # of each order that the store has
# An entry that was used twice as often is as likely to be wanted as one that was used an hour later.
DOUBLING_SECONDS = 3600.0


def _rank(entry: Entry) -> float:
    return entry.last_used + DOUBLING_SECONDS * math.log2(1 + entry.hits + (entry.entry_class == "pinned"))


def ranked(entries: Iterable[Entry], *, crops: bool) -> list[Entry]:
    """The entries, the most likely first.

    Where a state can be cropped, an entry that is stored against another one serves all that the other serves: it takes
    the other's place, with the better rank of the two.
    """
    found = {entry.id: entry for entry in entries}
    score = {id: _rank(entry) for id, entry in found.items()}
    best = sorted(found.values(), key=lambda entry: (-score[entry.id], -entry.n_tokens))
    if not crops:
        return best
    replaced: set[int] = set()
    for entry in best:
        parent, seen = entry.parent, {entry.id}
        while parent in found and parent not in seen:
            if parent not in replaced:
                replaced.add(parent)
                score[entry.id] = max(score[entry.id], score[parent])
            seen.add(parent)
            parent = found[parent].parent
    return sorted((e for e in best if e.id not in replaced), key=lambda entry: (-score[entry.id], -entry.n_tokens))


def _candidates(store: Store) -> list[Entry]:
    found = {entry.id: entry for entry in operate.listing(store, order="used", limit=CANDIDATES)}
    for entry_class in ("learned", "pinned"):
        for entry in operate.listing(store, order="hits", limit=CANDIDATES, entry_class=entry_class):
            found[entry.id] = entry
    return list(found.values())


def _room(identity: Identity) -> float:
    """How many tokens all warm slots may have together: half of a buffer that the slots share."""
    shared = any(part.n_stream in (None, 1) for part in layout.parse(identity.form.state).attention)
    return identity.n_ctx // 2 if shared and identity.n_slots > 1 else math.inf


class WarmStart:
    """A request never waits for a state to be read: a slot is taken only when its state is ready for the server, and only
    if no request came meanwhile. What a request can meet is the server's own restore of one slot. The other slots are free
    then; llama-server does one thing at a time, as with a restore that the request would have needed itself.
    """

    def __init__(self, link: BackendLink, slots: SlotTable, metrics: Metrics) -> None:
        self.link = link
        self.slots = slots
        self.metrics = metrics
        self._process = ProcessWatch(link.backend.url, link.mark_unverified)

    async def run(self) -> None:
        """Fills the slots of each new server process."""
        try:
            while True:
                await self.slots.started.wait()
                self.slots.started.clear()
                await self._new_process()
        finally:
            self._process.close()

    async def _new_process(self) -> None:
        try:
            # When this one ends, the link looks for the next one, so that its slots are filled before a request comes.
            await self._process.begin()
            await self._fill()
        except UpstreamError as error:
            log.info("the warm start ends: %s", error.message)
        except Exception:
            self.metrics.count("failures")
            log.warning("the warm start ends", exc_info=True)

    async def _fill(self) -> None:
        link, table = self.link, self.slots.all
        store, identity = link.store, link.identity
        if store is None or identity is None:
            return
        entries = ranked(await link.run(_candidates, store), crops=identity.crops)
        least, room = link.options.min_tokens, _room(identity)
        entries = [e for e in entries if least <= e.n_tokens < (identity.n_ctx or math.inf) and not e.n_images]
        while entries and link.reuses:
            slot = await self._empty_slot()
            if self.slots.all is not table or link.store is not store or link.identity is not identity:
                return  # another process, which has its own warm start
            if slot is None:
                return
            entry = entries[0]
            if entry.n_tokens > room or entry.id in link.rejected_entries or self._held(entry):
                entries.pop(0)
            elif await self._restore(store, identity, entry, slot):
                entries.pop(0)
                room -= slot.n_total

    def _held(self, entry: Entry) -> bool:
        return any(slot.entry == entry.id for slot in self.slots.all)

    async def _quiet(self) -> None:
        """Returns when no request is under way, and none has been for a moment."""
        while not self.slots.idle or time.monotonic() - self.slots.last_active < QUIET_SECONDS:
            await asyncio.sleep(QUIET_SECONDS / 4)

    async def _empty_slot(self) -> Slot | None:
        """A slot that the server lists as empty; None where there is none, or the server lists no slots."""
        pairs = None
        while pairs is None:  # a request that passed meanwhile may have had any slot
            await self._quiet()
            generation = self.slots.generation()
            pairs = self.slots.current(Listing(await self.link.backend.list_slots(LIST_SECONDS), generation))
        for slot, report in pairs:
            # A slot that had no task has no number of tokens.
            empty = report.n_tokens == 0 or (report.task is None and report.n_tokens is None)
            if empty and not (report.working or slot.busy or slot.n_total or slot.origin is not None):
                return slot
        return None

    async def _restore(self, store: Store, identity: Identity, entry: Entry, slot: Slot) -> bool:
        """Whether the server was asked to restore the entry, or the entry is gone; False where a request came first."""
        link, slots, uses = self.link, self.slots, slot.uses
        try:
            saved = await link.run(lambda: store.get(entry.id, count=False))
        except KVStoreError as error:
            log.info("entry %s was not read: %s", hex_id(entry.id), error.message)
            return True
        if saved is None:
            return True
        file = identity.slot_file(saved.tokens, saved.main)
        began: float | None = None

        def begin() -> bool:
            nonlocal began
            if slots.idle and slot.uses == uses and link.identity is identity and slots.lease_now(slot):
                began = time.perf_counter()
                slots.restoring(slot)
            return began is not None

        try:
            n = await link.backend.restore_slot(slot.id, file, RESTORE_SECONDS, begin=begin)
            if began is not None:
                seconds = time.perf_counter() - began
                slots.restored(slot, file.tokens, n, entry.id, warm=True)
                self._count(int(file.state.nbytes), seconds)
                log.debug("warm start: %s, %d tokens in slot %d", hex_id(entry.id), n, slot.id)
        except UpstreamError as error:
            self.metrics.count("restores_failed")
            if error.status is None:
                if not error.late:
                    link.mark_unverified()
                raise
            link.rejected_entries.add(entry.id)
            log.warning("entry %s was not restored: %s", hex_id(entry.id), error.message)
        finally:
            if began is not None:
                link.note(slot)
                await slots.released(slot)
        return began is not None

    def _count(self, n_bytes: int, seconds: float) -> None:
        self.slots.rates.restored(n_bytes, seconds)
        for name in ("restores", "warm_restores"):
            self.metrics.count(name)
        self.metrics.count("warm_bytes", n_bytes)
        for name in ("restore_seconds", "warm_seconds"):
            self.metrics.seconds[name] += seconds
