"""The cache's part of a request: it finds tokens, match and slot, restores, and records the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from ... import layout, slotfile
from ...errors import LayoutError
from ...store import Store
from ...types import Entry, Match, Tokens, hex_id
from ...util.buffers import common_prefix_length
from .backend import Identity, Timings
from .backend_link import BackendLink
from .fleet import FleetLookup
from .metrics import Metrics, Recent
from .prompt import Prompt, continues
from .saver import Saver
from .slots import Choice, Slot, SlotTable
from .tokenizer import Tokenizer
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
LOOKUP_SECONDS = 5.0
RESTORE_SECONDS = 120.0
# A chat that adds less computing than this to the contents of its slot goes there without a look into the store.
HOT_SECONDS = 0.15
CHARS_PER_TOKEN = 3
NOT_SERVED = (404, 501)  # the server has no such path, or its model cannot do this: no slot was used
KEPT_BYTES = 16 << 10  # of the beginning and of the end of an answer, which have the timings


@dataclass(frozen=True, slots=True)
class UnwrittenMatch(Match):
    """A match whose state is in memory: its put is under way, and `entry` is what will be known of it, but for the id."""

    file: slotfile.SlotFile

    @classmethod
    def of(cls, file: slotfile.SlotFile, n_common: int) -> UnwrittenMatch:
        now, n = int(time.time()), int(file.tokens.shape[0])
        size = int(file.state.nbytes)
        entry = Entry(
            id=0, n_tokens=n, n_images=0, entry_class="normal", source="default", created_at=now, last_used=now,
            expires_at=None, ttl=None, hits=0, family=0, n_input=n, excerpt="", parent=None, size=size, stored=size,
        )  # fmt: skip
        return cls(entry, n_common, file)

    def state(self) -> slotfile.SlotFile:
        """Cut to what serves. Raises LayoutError."""
        if self.n_common == self.entry.n_tokens:
            return self.file
        cut = layout.crop(self.file.state, self.n_common)
        return replace(self.file, tokens=self.file.tokens[: self.n_common], state=cut)


def longer(match: Match | None, other: Match | None) -> Match | None:
    """The match that serves more tokens; of two that serve as many the first."""
    if match is None or other is None:
        return match or other
    return other if other.n_common > match.n_common else match


class Lease:
    """A slot for one request, ready for it. `body` goes to the server while `under_way`; `finish` gives the slot back."""

    def __init__(self, cache: Cache, prompt: Prompt, choice: Choice, match: Match | None, recent: Recent) -> None:
        self.prompt = prompt
        self.in_store = 0 if match is None else match.n_common
        self.slot = choice.slot
        self.held = choice.held
        self.restored: Match | None = None
        self.recent = recent
        slots = cache.slots
        self.meddled = choice.slot.meddled
        self._tainted = -1 if slots.tainting else slots.tainted
        self._foreign = -1 if slots.foreign_requests else slots.foreign
        self.body = prompt.for_slot(choice.slot.id, plain=True) if prompt.pinned else prompt.body
        self._cache = cache

    @property
    def overlapped(self) -> bool:
        """Whether a request that taints was under way at the same time: it may have had the slot just before."""
        slots = self._cache.slots
        return bool(slots.tainting) or slots.tainted != self._tainted

    def under_way(self) -> AbstractContextManager[None]:
        return nullcontext() if self.prompt.pinned else self._cache.slots.unpinned()

    async def finish(self, status: int | None, head: bytes, tail: bytes) -> None:
        """After the answer: its status (None where it was cut off), the beginning and the end of its body."""
        link, slots = self._cache.link, self._cache.slots
        slot: Slot | None = self.slot
        try:
            timings = link.backend.parse_timings(head, tail) if status == 200 else None
            if self.meddled != self.slot.meddled:
                slots.invalidated(self.slot)
            elif timings is not None:
                slot = await self._placed(timings)
                self._cache.record_result(self, slot, timings)
                link.mark_verified()
            elif status in NOT_SERVED:
                self._cache.tokenizer.shapes.unserved.add(self.prompt.shape.path)
            elif status in (None, 200) and self.prompt.pinned:
                self._cache.record_cut_off(self)
            else:
                slots.invalidated(self.slot)
        except Exception:
            log.warning("the contents of a slot after a request are unknown", exc_info=True)
            self._cache.metrics.count("failures")
            slots.invalidated(self.slot)
        finally:
            link.note(self.slot if slot is None else slot)
            await slots.released(self.slot)
            self._cache.saver.wake()

    async def _placed(self, timings: Timings) -> Slot | None:
        """The slot that the server took; None where that is not sure."""
        if self.prompt.pinned:
            return self.slot
        link, slots = self._cache.link, self._cache.slots
        n_total = timings.cached + timings.computed + max(0, timings.generated - 1)
        listing = await link.list_slots() if len(slots.all) > 1 else None
        slot = slots.placed(self.slot, listing, link.identity, n_total, self._foreign)
        if slot is not self.slot:
            self._cache.metrics.count("placed_elsewhere")
            log.debug("the server answered in slot %s, not in slot %d", None if slot is None else slot.id, self.slot.id)
            if slot is None or self.restored is not None:
                slots.invalidated(self.slot)
            slots.listed(listing, link.identity, self.slot)
        return slot


class Cache:
    def __init__(
        self, link: BackendLink, slots: SlotTable, tokenizer: Tokenizer, saver: Saver, metrics: Metrics
    ) -> None:
        self.link = link
        self.slots = slots
        self.tokenizer = tokenizer
        self.saver = saver
        self.metrics = metrics
        self.fleet = FleetLookup(link, slots)

    # -- before the request

    async def lease(self, path: str, prompt: Prompt) -> Lease | None:
        """A slot for the request, with as much of its prompt as pays; None where the request must pass without the cache."""
        shapes = self.tokenizer.shapes
        if path in shapes.unserved:
            return None
        if not shapes.trusts(prompt.shape):
            self.metrics.count("passed_by_shape")
            return None
        with self.slots.arriving():
            return await self._lease(path, prompt)

    async def _lease(self, path: str, prompt: Prompt) -> Lease | None:
        choice: Choice | None = None
        started = time.perf_counter()
        try:
            n_saved = self.saver.n_saved
            found = await asyncio.wait_for(self._look_up(prompt), LOOKUP_SECONDS + 10)
            if found is None:
                return None
            hot, match, busy_elsewhere = found
            looked = time.perf_counter() - started
            if hot is None:
                match = await self._fetched(prompt, match)
            slots = self.slots
            if hot is not None and slots.lease_now(hot):
                choice = Choice(hot, hot.n_total, None, 0)
            else:
                choice = await slots.acquire(prompt, match, busy_elsewhere)
                if self.saver.n_saved != n_saved:  # while it waited: what had its slot before, perhaps
                    match = longer(await self._match(prompt), match if isinstance(match, UnwrittenMatch) else None)
                    choice = slots.choose(choice.slot, prompt, match)
            if choice.skipped:
                self.metrics.count("restores_skipped")
                slots.rates.skipped()
            lease = Lease(self, prompt, choice, match, Recent(time.time(), path, choice.slot.id, prompt.excerpt))
            lease.recent.overhead_ms = looked * 1e3
            self.metrics.seconds["overhead_seconds"] += looked
            if choice.displaced:
                await self.saver.before_overwrite(choice)
            if choice.restore is not None:
                still_stored = await self._restore(lease, choice.restore)
                if not still_stored and (again := await self._match(prompt)) is not None:
                    # A longer entry of the conversation replaced it while the request waited.
                    await self._restore(lease, again)
            if choice.slot.needs_erase:
                await self._erase(choice.slot)
            self.metrics.count("requests")
            return lease
        except BaseException as error:
            if choice is not None:
                await self.slots.released(choice.slot)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, UpstreamError) and error.status is not None:
                return None  # the server itself reports what is wrong with the request
            self.metrics.count("failures")
            log.warning("the cache failed; the request is served without it", exc_info=True)
            return None

    async def _look_up(self, prompt: Prompt) -> tuple[Slot | None, Match | None, frozenset[int]] | None:
        """The slot that is sure to be the right one, or the match in the store; None where the cache is off."""
        link = self.link
        if prompt.kind == "chat" and prompt.pinned and self._hot(prompt) is not None:
            if not await link.check():
                return None
            if (hot := self._hot(prompt)) is not None:
                return hot, None, frozenset()
        if prompt.kind == "chat":
            template, check = self.tokenizer.template(prompt), link.check()
            text, linked = await asyncio.gather(template, check, return_exceptions=True)
            if isinstance(text, BaseException):
                raise text
            if isinstance(linked, BaseException):
                raise linked
            prompt.text = text
        else:
            linked = await link.check()
        store = link.store
        if not linked or store is None:
            return None
        if prompt.id_slot is not None and prompt.id_slot >= len(self.slots.all):
            return None
        if prompt.tokens is None:
            await self.tokenizer.fill(prompt, 0 if link.identity is None else link.identity.n_ctx)
        match = await self._match(prompt)
        unsure = self.slots.unleased_requests or any(slot.cut for slot in self.slots.all)
        return None, match, await link.busy_elsewhere() if unsure else frozenset()

    def _hot(self, prompt: Prompt) -> Slot | None:
        """The free slot whose chat this one continues with few tokens."""
        fields = None
        for slot in self.slots.all:
            if slot.busy or slot.chat is None or prompt.id_slot not in (None, slot.id):
                continue
            added = continues(slot.chat[1], prompt.messages)
            if added is None:
                continue
            fields = prompt.template_fields() if fields is None else fields
            if fields == slot.chat[0]:
                seconds = self.slots.rates.prefill_seconds(added / CHARS_PER_TOKEN)
                return slot if seconds < HOT_SECONDS else None
        return None

    async def _restore(self, lease: Lease, match: Match) -> bool:
        """Puts a stored state into the slot; False where the entry is gone. After a failure the contents of the slot are
        unknown, and the request goes on."""
        link, slot = self.link, lease.slot
        store, identity = link.store, link.identity
        assert store is not None
        assert identity is not None
        started = time.perf_counter()
        try:
            file = await link.run(self._state, store, match, identity)
        except Exception:
            self.metrics.count("failures")
            log.warning("entry %s was not read", hex_id(match.entry.id), exc_info=True)
            return True
        if file is None:
            return False
        self.slots.restoring(slot)
        try:
            n = await link.backend.restore_slot(slot.id, file, RESTORE_SECONDS)
        except UpstreamError as error:
            self.metrics.count("restores_failed")
            if error.status is not None:
                link.rejected_entries.add(match.entry.id)
            elif not error.late:
                link.mark_unverified()
            log.warning("entry %s was not restored: %s", hex_id(match.entry.id), error.message)
            return True
        except Exception:
            self.metrics.count("failures")
            log.warning("entry %s was not restored", hex_id(match.entry.id), exc_info=True)
            return True
        seconds = time.perf_counter() - started
        self.slots.restored(slot, file.tokens, n, match.entry.id or None)
        lease.restored = match
        lease.recent.restore_ms = seconds * 1e3
        lease.recent.entry = match.entry.hex_id if match.entry.id else None
        self.slots.rates.restored(file.state.nbytes, seconds)
        self.metrics.count("restores")
        self.metrics.seconds["restore_seconds"] += seconds
        return True

    async def _erase(self, slot: Slot) -> None:
        """Empties a slot: the server would continue from its unknown contents, perhaps computed with an adapter."""
        try:
            await self.link.backend.erase_slot(slot.id)
            self.slots.erased(slot)
        except UpstreamError as error:
            if error.status is None:
                self.link.mark_unverified()
            log.info("slot %d was not erased: %s", slot.id, error.message)

    async def _match(self, prompt: Prompt) -> Match | None:
        """The stored state that has most of a prompt, if this server can take it."""
        link, tokens = self.link, prompt.tokens
        store, identity = link.store, link.identity
        if store is None or identity is None or tokens is None:
            return None
        if not link.reuses or tokens.size < link.options.min_tokens:
            return None
        waiting = self._unwritten(tokens)  # looked at first: its put may end meanwhile
        match = await asyncio.wait_for(link.run(store.match, tokens), LOOKUP_SECONDS)
        if match is not None and (match.entry.id in link.rejected_entries or match.entry.n_images):
            match = None
        match = longer(match, waiting)
        return None if match is None or 0 < identity.n_ctx <= match.n_common else match

    async def _fetched(self, prompt: Prompt, match: Match | None) -> Match | None:
        """The match, or what the fleet has more of."""
        file = await self.fleet.fetch(prompt.tokens, 0 if match is None else match.n_common)
        return longer(match, None if file is None else UnwrittenMatch.of(file, int(file.tokens.shape[0])))

    def _unwritten(self, tokens: Tokens) -> UnwrittenMatch | None:
        """The state on its way into the store that serves the most of these tokens."""
        link, identity = self.link, self.link.identity
        assert identity is not None
        best: UnwrittenMatch | None = None
        for each in self.saver.unwritten:
            n = common_prefix_length(each.file.tokens, tokens)
            fits = n == each.file.tokens.shape[0] or (n > 0 and identity.crops)
            if each.store is link.store and fits and (best is None or n > best.n_common):
                best = UnwrittenMatch.of(each.file, n)
        return best

    def _state(self, store: Store, match: Match, identity: Identity) -> slotfile.SlotFile | None:
        """The slot file of a match, cut to the common tokens where its layout allows that."""
        if isinstance(match, UnwrittenMatch):
            return match.state()
        try:
            saved = store.get(match.entry.id, n_tokens=match.n_common)
        except LayoutError:
            saved = store.get(match.entry.id)
        if saved is None:
            return None
        return identity.slot_file(saved.tokens, saved.main)

    # -- after the request

    def record_cut_off(self, lease: Lease) -> None:
        """The request was cut off."""
        prompt, identity = lease.prompt, self.link.identity
        # A context shift that keeps the start of the prompt would not show in the tokens.
        shifts = identity is None or identity.keeps or bool({"n_keep", "n_discard"} & prompt.data.keys())
        self.slots.aborted(lease.slot, prompt, keeps=not lease.overlapped and not shifts)

    def _record_futile(self, match: Match, cached: int) -> None:
        link, entry = self.link, match.entry
        self.metrics.count("restores_useless")
        link.rejected_entries.add(entry.id)
        link.futile_restores += 1
        log.warning("of %d tokens restored from %s the server used %d", match.n_common, entry.hex_id, cached)
        if not link.reuses:
            log.warning("this server does not use its own slot files: restores and saves end until another one is there")

    def _record_warm(self, lease: Lease, cached: int) -> None:
        """A request had a slot that was restored before it came: the store saved it that computing."""
        link, recent = self.link, lease.recent
        used = min(cached, lease.held)
        if used < lease.held // 2:
            self.metrics.count("restores_useless")
            link.futile_restores += 1
            return
        if used:
            link.futile_restores = 0
        recent.restored_tokens = used
        recent.entry = None if lease.slot.entry is None else hex_id(lease.slot.entry)
        self.metrics.seconds["saved_seconds"] += self.slots.rates.prefill_seconds(used)

    def record_result(self, lease: Lease, slot: Slot | None, timings: Timings) -> None:
        """The request was answered in this slot: updates metrics, rates and the slot."""
        link, slots = self.link, self.slots
        n_prompt = timings.cached + timings.computed
        recent = lease.recent
        recent.prompt_tokens, recent.cached_tokens = n_prompt, timings.cached
        self.tokenizer.counted(lease.prompt, n_prompt)
        slots.rates.computed(timings.computed, timings.computed_ms / 1e3)
        if lease.restored is not None:
            used = max(0, min(timings.cached, lease.restored.n_common) - lease.held)
            recent.restored_tokens = used
            saved = slots.rates.prefill_seconds(used) - recent.restore_ms / 1e3
            self.metrics.seconds["saved_seconds"] += max(0.0, saved)
            if slot is not lease.slot or lease.prompt.disagrees:
                pass  # the entry is not to blame
            elif timings.cached < lease.restored.n_common // 2:
                self._record_futile(lease.restored, timings.cached)
            else:
                link.futile_restores = 0
        elif slot is lease.slot and slot.warm:
            self._record_warm(lease, timings.cached)
        if timings.cached:
            recent.source = "store" if recent.restored_tokens else "slot"
        if slot is not None:
            recent.slot = slot.id
            slots.answered(
                slot, lease.prompt, timings, link.identity, in_store=lease.in_store, overlapped=lease.overlapped
            )
        self.metrics.done(recent)
