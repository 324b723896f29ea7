"""The cache's part of a request: its tokens, the match, the slot, the restore; and afterwards what the slot holds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import dataclass, replace

from ... import layout, slotfile
from ...errors import LayoutError
from ...store import Store
from ...types import Entry, Match, Tokens, hex_id
from .fingerprint import erase, restore
from .metrics import Metrics, Recent
from .prompt import Prompt, common, continues
from .saver import Saver
from .server import Server
from .slots import NOTHING, Choice, Slot
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
LOOKUP_SECONDS = 5.0
RESTORE_SECONDS = 120.0
# A chat that adds less computing than this to what its slot holds is sent there without a look into the store.
HOT_SECONDS = 0.15
CHARS_PER_TOKEN = 3
_TIMINGS = re.compile(rb'"timings":(\{[^{}]*\})')
TAIL_BYTES = 16 << 10  # of an answer's end, where its timings are


@dataclass(frozen=True)
class Timings:
    """What the server says of a request it answered."""

    cached: int
    computed: int
    computed_ms: float
    generated: int

    @classmethod
    def find(cls, tail: bytes) -> Timings | None:
        """In the end of an answer, streamed or not. Text of the model has its quotes escaped, so it is not found."""
        found = _TIMINGS.findall(tail)
        if not found:
            return None
        try:
            t = json.loads(found[-1])
            return cls(int(t["cache_n"]), int(t["prompt_n"]), float(t["prompt_ms"]), int(t["predicted_n"]))
        except (ValueError, KeyError, TypeError):
            return None


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


class Lease:
    """A slot for one request, ready for it. `body` goes to the server; `finish` gives the slot back."""

    def __init__(self, cache: Cache, prompt: Prompt, choice: Choice, match: Match | None, recent: Recent) -> None:
        self.prompt = prompt
        self.in_store = 0 if match is None else match.n_common
        self.slot = choice.slot
        self.held = choice.held
        self.restored: Match | None = None
        self.recent = recent
        slots = cache.server.slots
        self.meddled = choice.slot.meddled
        self._tainted = -1 if slots.tainting else slots.tainted
        self.body = prompt.for_slot(choice.slot.id, plain=True)
        self._cache = cache

    @property
    def overlapped(self) -> bool:
        """Whether a request with other numbers was under way at the same time: it may have had the slot just before."""
        slots = self._cache.server.slots
        return bool(slots.tainting) or slots.tainted != self._tainted

    async def finish(self, status: int | None, tail: bytes) -> None:
        """After the answer: its status (None where it was cut off) and the end of its body."""
        try:
            timings = Timings.find(tail) if status == 200 else None
            if self.meddled != self.slot.meddled:
                self.slot.forget()
            elif timings is not None:
                self._cache.learn(self, timings)
                self._cache.server.sure()
            elif status in (None, 200):
                self._cache.unknown(self)
            else:
                self.slot.forget()
        except Exception:
            log.warning("what a request left in its slot is not known", exc_info=True)
            self._cache.metrics.count("failures")
            self.slot.forget()
        finally:
            self._cache.server.note(self.slot)
            await self._cache.server.slots.release(self.slot)
            self._cache.saver.wake()


class Cache:
    def __init__(self, server: Server, saver: Saver, metrics: Metrics) -> None:
        self.server = server
        self.saver = saver
        self.metrics = metrics

    # -- before the request

    async def lease(self, path: str, prompt: Prompt) -> Lease | None:
        """A slot for the request, with as much of its prompt as pays; None where it has to pass without the cache."""
        choice: Choice | None = None
        started = time.perf_counter()
        try:
            n_saved = self.saver.n_saved
            found = await asyncio.wait_for(self._look_up(prompt), LOOKUP_SECONDS + 10)
            if found is None:
                return None
            hot, match, stuck = found
            looked = time.perf_counter() - started
            slots = self.server.slots
            if hot is not None and slots.take(hot):
                choice = Choice(hot, hot.n_total, None, 0)
            else:
                choice = await slots.acquire(prompt, match, stuck)
                if self.saver.n_saved != n_saved:  # while it waited: what had its slot before, perhaps
                    match = await self._match(prompt)
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
                found_it = await self._restore(lease, choice.restore)
                if not found_it and (again := await self._match(prompt)) is not None:
                    # It gave way to a longer one of its conversation while the request waited.
                    await self._restore(lease, again)
            if choice.slot.needs_erase:
                await self._erase(choice.slot)
            self.metrics.count("requests")
            return lease
        except BaseException as error:
            if choice is not None:
                await self.server.slots.release(choice.slot)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, UpstreamError) and error.status is not None:
                return None  # the server will say what is wrong with the request
            self.metrics.count("failures")
            log.warning("the cache failed; the request is served without it", exc_info=True)
            return None

    async def _look_up(self, prompt: Prompt) -> tuple[Slot | None, Match | None, frozenset[int]] | None:
        """The slot that surely is the one, or what the store has; None where the cache is off."""
        server = self.server
        if prompt.kind == "chat" and self._hot(prompt) is not None:
            if not await server.check():
                return None
            if (hot := self._hot(prompt)) is not None:
                return hot, None, frozenset()
        fill = prompt.text is None and prompt.tokens is None
        if fill:
            text, linked = await asyncio.gather(server.tokenizer.template(prompt), server.check(), return_exceptions=True)
            if isinstance(text, BaseException):
                raise text
            if isinstance(linked, BaseException):
                raise linked
            prompt.text = text
        else:
            linked = await server.check()
        store = server.store
        if not linked or store is None:
            return None
        if prompt.id_slot is not None and prompt.id_slot >= len(server.slots.all):
            return None
        if prompt.tokens is None:
            await server.tokenizer.fill(prompt)
        match = await self._match(prompt)
        unsure = server.slots.foreign or any(slot.cut for slot in server.slots.all)
        stuck = await server.working() if unsure else frozenset()
        return None, match, stuck

    def _hot(self, prompt: Prompt) -> Slot | None:
        """The free slot whose chat this one continues by little."""
        shape = None
        for slot in self.server.slots.all:
            if slot.busy or slot.chat is None or prompt.id_slot not in (None, slot.id):
                continue
            added = continues(slot.chat[1], prompt.data["messages"])
            if added is None:
                continue
            shape = prompt.shape() if shape is None else shape
            if shape == slot.chat[0]:
                seconds = self.server.slots.rates.prefill_seconds(added / CHARS_PER_TOKEN)
                return slot if seconds < HOT_SECONDS else None
        return None

    async def _restore(self, lease: Lease, match: Match) -> bool:
        """Puts a stored state into the slot; False where the entry is gone. Where it fails the slot is empty, and the
        request goes on."""
        server, slot = self.server, lease.slot
        store, identity = server.store, server.identity
        assert store is not None
        assert identity is not None
        started = time.perf_counter()
        try:
            file = await server.run(self._state, store, match, identity.form)
        except Exception:
            self.metrics.count("failures")
            log.warning("entry %s was not read", hex_id(match.entry.id), exc_info=True)
            return True
        if file is None:
            return False
        slot.forget()
        try:
            n = await restore(server.upstream, server.files, slot.id, file, RESTORE_SECONDS)
        except UpstreamError as error:
            self.metrics.count("restores_failed")
            if error.status is not None:
                server.bad.add(match.entry.id)
            elif not error.late:
                server.suspect()
            log.warning("entry %s was not restored: %s", hex_id(match.entry.id), error.message)
            return True
        except Exception:
            self.metrics.count("failures")
            log.warning("entry %s was not restored", hex_id(match.entry.id), exc_info=True)
            return True
        seconds = time.perf_counter() - started
        slot.tokens, slot.n_total, slot.stored, slot.entry = file.tokens[:n], n, n, match.entry.id or None
        slot.unfit = n != file.tokens.shape[0]
        lease.restored = match
        lease.recent.restore_ms = seconds * 1e3
        lease.recent.entry = match.entry.hex_id if match.entry.id else None
        server.slots.rates.restored(file.state.nbytes, seconds)
        self.metrics.count("restores")
        self.metrics.seconds["restore_seconds"] += seconds
        return True

    async def _erase(self, slot: Slot) -> None:
        """Empties a slot: the server would go on from what it holds, computed with an adapter perhaps."""
        try:
            await erase(self.server.upstream, slot.id)
            slot.unfit = False
        except UpstreamError as error:
            if error.status is None:
                self.server.suspect()
            log.info("slot %d was not erased: %s", slot.id, error.message)

    async def _match(self, prompt: Prompt) -> Match | None:
        """What the store has of a prompt, if this server can take it."""
        server, tokens = self.server, prompt.tokens
        store, identity = server.store, server.identity
        if store is None or identity is None or tokens is None:
            return None
        if not server.reuses or tokens.size < server.settings.min_tokens:
            return None
        waiting = self._unwritten(tokens)  # looked at first: its put may end meanwhile
        match = await asyncio.wait_for(server.run(store.match, tokens), LOOKUP_SECONDS)
        if match is not None and (match.entry.id in server.bad or match.entry.n_images):
            match = None
        if waiting is not None and (match is None or waiting.n_common > match.n_common):
            match = waiting
        return None if match is None or 0 < identity.n_ctx <= match.n_common else match

    def _unwritten(self, tokens: Tokens) -> UnwrittenMatch | None:
        """The state on its way into the store that serves the most of these tokens."""
        server, identity = self.server, self.server.identity
        assert identity is not None
        best: UnwrittenMatch | None = None
        for each in self.saver.unwritten:
            n = common(each.file.tokens, tokens)
            fits = n == each.file.tokens.shape[0] or (n > 0 and identity.crops)
            if each.store is server.store and fits and (best is None or n > best.n_common):
                best = UnwrittenMatch.of(each.file, n)
        return best

    def _state(self, store: Store, match: Match, form: slotfile.SlotFile) -> slotfile.SlotFile | None:
        """The slot file of a match; cut to what serves where it can be cut."""
        if isinstance(match, UnwrittenMatch):
            return match.state()
        try:
            saved = store.get(match.entry.id, n_tokens=match.n_common)
        except LayoutError:
            saved = store.get(match.entry.id)
        if saved is None:
            return None
        return replace(form, tokens=saved.tokens, state=saved.main, media=(), padding=b"")

    # -- after the request

    def unknown(self, lease: Lease) -> None:
        """The request was cut off: the slot holds some of it, and a save will tell how much."""
        slot, prompt, identity = lease.slot, lease.prompt, self.server.identity
        unfit = slot.unfit or lease.overlapped
        slot.forget()
        # A context shift that keeps the start of the prompt would not show in the tokens.
        if unfit or identity is None or identity.keeps or {"n_keep", "n_discard"} & prompt.data.keys():
            return
        slot.unfit = False
        slot.origin, slot.n_prompt = prompt, 0
        slot.n_total = 0 if prompt.tokens is None else prompt.tokens.shape[0]

    def _useless(self, match: Match, cached: int) -> None:
        server, entry = self.server, match.entry
        self.metrics.count("restores_useless")
        server.bad.add(entry.id)
        server.useless += 1
        log.warning("of %d tokens restored from %s the server used %d", match.n_common, entry.hex_id, cached)
        if not server.reuses:
            log.warning("this server makes nothing of its slot files: no restores and saves until it is another one")

    def _is_plain(self, lease: Lease, timings: Timings) -> bool:
        """Whether the slot holds the plain computation of its tokens now. Where it does not, nothing is kept of it."""
        slot, prompt, identity = lease.slot, lease.prompt, self.server.identity
        n_total = timings.cached + timings.computed + timings.generated
        if identity is None or 0 < identity.n_ctx <= n_total:
            slot.forget()  # the context was full: the server may have shifted it
            self.server.slots.strangers = True
            return False
        if timings.cached == 0:
            slot.unfit = False
        elif slot.needs_erase or lease.overlapped:
            slot.forget()
            return False
        elif prompt.tokens is not None:
            held, n_prompt = slot.holds(prompt.tokens), timings.cached + timings.computed
            least = min(held, n_prompt - 1) - 1 if identity.crops and prompt.tokens.shape[0] == n_prompt else 0
            if timings.cached < least:
                # Somebody else used the slot meanwhile: what was reused is theirs.
                slot.forget()
                self.server.slots.strangers = True
                return False
            # What follows the known tokens is the answer, whose tokens are not known yet, and their number only nearly.
            most = max(held, slot.n_total + 2) if held == slot.tokens.shape[0] else held
            if timings.cached > most and (self.server.slots.strangers or identity.adapters):
                # From the server's own cache, or moved chunks: whatever they were computed with.
                slot.unfit = True
        return True

    def learn(self, lease: Lease, timings: Timings) -> None:
        slot, prompt, slots = lease.slot, lease.prompt, self.server.slots
        n_prompt = timings.cached + timings.computed
        recent = lease.recent
        recent.prompt_tokens, recent.cached_tokens = n_prompt, timings.cached
        slots.rates.computed(timings.computed, timings.computed_ms / 1e3)
        if lease.restored is not None:
            used = max(0, min(timings.cached, lease.restored.n_common) - lease.held)
            recent.restored_tokens = used
            saved = slots.rates.prefill_seconds(used) - recent.restore_ms / 1e3
            self.metrics.seconds["saved_seconds"] += max(0.0, saved)
            if timings.cached < lease.restored.n_common // 2:
                self._useless(lease.restored, timings.cached)
            else:
                self.server.useless = 0
        if timings.cached:
            recent.source = "store" if recent.restored_tokens else "slot"
        self.metrics.done(recent)
        if not self._is_plain(lease, timings):
            return
        known = slot.tokens[: min(slot.tokens.shape[0], timings.cached)]
        if prompt.tokens is not None and prompt.tokens.shape[0] == n_prompt:
            kept = common(slot.tokens, prompt.tokens)
            slot.tokens = prompt.tokens
        else:
            kept = known.shape[0]
            slot.tokens = known if prompt.tokens is None else NOTHING
        if slot.stored > max(kept, timings.cached):
            # The slot left the way of the entry that it was restored from or stored as.
            slot.stored, slot.entry = min(slot.stored, kept), None
        slot.stored = max(slot.stored, min(lease.in_store, n_prompt))
        slot.n_total = n_prompt + max(0, timings.generated - 1)
        slot.n_prompt = n_prompt
        slot.origin = None if slot.unfit else prompt
        slot.chat = (prompt.shape(), prompt.messages) if prompt.kind == "chat" else None
        slot.used = time.monotonic()
        slot.seen = None
