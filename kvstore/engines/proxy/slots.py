"""The slots of a server: what each one holds, who uses it, and which slot a request gets.

`SlotTable` is the only writer of slot state. Everything that happens is one of its events; readers use `Slot` as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...types import Entry, Match, Tokens
from ...util.buffers import common_prefix_length
from .backend import Identity, SlotReport, Timings
from .prompt import Prompt
from .rates import Rates as Rates
from .slot import NOTHING
from .slot import Choice as Choice
from .slot import Generation as Generation
from .slot import Listing as Listing
from .slot import Slot as Slot
from .upstream import UpstreamError

# The number of tokens in a slot may differ by this from the count in an answer's timings.
UNSURE_TOKENS = 2


def restore_bytes(entry: Entry, n: int) -> float:
    return entry.size * n / max(1, entry.n_tokens)


class SlotTable:
    """The slots, their contents and their leases. Requests wait here while all slots are taken.

    The use of a slot:

        FREE --acquire, lease_now--> LEASED --released--> FREE

    The contents of a slot. Only UNSAVED has an `origin`, and only EMPTY, UNSAVED and SETTLED are fit to be saved:

        any      --linked, slept, meddled, restoring, save_failed, invalidated, lost_to_others--> UNKNOWN
        any      --listed (another's task, an adapter of a request's own, other tokens)---------> UNKNOWN
        UNKNOWN  --erased----------------------------------------> EMPTY
        UNKNOWN  --restored (all tokens taken)-------------------> SETTLED
        UNKNOWN  --restored (only some of them)------------------> UNFIT
        any      --answered (computed from the first token on)---> UNSAVED
        EMPTY, UNSAVED, SETTLED --answered-----------------------> UNSAVED
        EMPTY, UNSAVED, SETTLED --answered (more reused than the slot held)--> UNFIT
        UNFIT    --answered--------------------------------------> UNFIT
        EMPTY, UNSAVED, SETTLED --aborted (the tokens become unknown, a save will tell them)--> UNSAVED
        UNFIT, UNKNOWN          --aborted--> UNKNOWN
        UNSAVED  --save_started, save_declined-------------------> SETTLED
        SETTLED  --saved-----------------------------------------> SETTLED, its tokens stored
        SETTLED  --save_cancelled, save_again (the put failed)---> UNSAVED

    `passed` (a request that the server places itself has ended) marks every slot as doubtful: the next `listed` decides.
    What was listed in a generation says nothing of a slot that was leased since, and nothing at all if a request passed
    since.
    """

    def __init__(self, rates: Rates, min_gain: int, count: Callable[[str], None] = lambda name: None) -> None:
        self.rates = rates
        self.started = asyncio.Event()  # set for each new server process
        self._count = count
        self.min_gain = min_gain
        self.all: list[Slot] = []
        self.events = 0  # leases, releases and passing requests
        self.unleased_requests = 0  # requests under way that the server finds a slot for by itself
        self.passes = 0  # how many of them have ended
        # Of these, the requests without a lease: under way, and begun in all.
        self.foreign_requests = self.foreign = 0
        # Requests that want other numbers (adapters, moved chunks): under way, and begun in all.
        self.tainting = self.tainted = 0
        # Whether the server's own prompt cache may have states that no request of ours computed.
        self.strangers = True
        self.waiting = 0
        self.arrivals = 0  # requests for which a slot is being found
        self.last_active = time.monotonic()
        self._lists_tasks = False  # whether the server's list names the last task of a slot
        self._free = asyncio.Condition()

    # -- reading

    @property
    def quiet(self) -> bool:
        """Nothing of ours runs in the server."""
        return not self.unleased_requests and not self.waiting and not any(slot.busy for slot in self.all)

    @property
    def idle(self) -> bool:
        """As `quiet`, and no request of ours is on its way to a slot."""
        return self.quiet and not self.arrivals

    def generation(self) -> Generation:
        uses = {slot.id: slot.uses for slot in self.all}
        return Generation(self.events, (self.unleased_requests, self.passes), uses)

    def current(self, listing: Listing | None) -> list[tuple[Slot, SlotReport]] | None:
        """The slots of a listing that no request of ours took since it was asked for. None where there is no listing, or
        where a request passed since: then the listing says nothing."""
        if listing is None or listing.generation.passes != (self.unleased_requests, self.passes):
            return None
        by_id = {report.id: report for report in listing.reports}
        uses = listing.generation.uses
        return [(s, by_id[s.id]) for s in self.all if s.id in by_id and uses.get(s.id) == s.uses]

    def restarted(self, listing: Listing | None) -> bool:
        """Whether a slot that had a task has none, or an older one: then the list is another process's."""
        for slot, report in self.current(listing) or ():
            known = None if slot.last_listing is None else slot.last_listing[0]
            if known is not None and (report.task is None or report.task < known):
                return True
        return False

    def working(self, listing: Listing | None) -> frozenset[int]:
        """The slots in which the server works, though no request of ours has them."""
        return frozenset(s.id for s, report in self.current(listing) or () if report.working and not s.busy)

    def undisturbed(self, slot: Slot) -> bool:
        """Whether no request has passed since the last request in the slot ended."""
        return slot.passes == self.passes and not self.unleased_requests

    # -- events of the server

    async def linked(self, n: int, *, strangers: bool = True, rates: Rates | None = None) -> None:
        """A new server process: n slots whose contents are unknown. Old leases are released without effect; requests that
        wait for a slot fail. `rates` replaces the measurements where the model is another one."""
        async with self._free:
            for slot in self.all:
                self._ends_warm(slot, hit=False)
            self.all = [Slot(i) for i in range(n)]
            if n:
                self.started.set()
            self.strangers, self._lists_tasks = strangers, False
            self.rates = self.rates if rates is None else rates
            self.events += 1
            self._free.notify_all()

    async def unlinked(self) -> None:
        """The server went away."""
        await self.linked(0)

    def slept(self, generation: Generation) -> None:
        """A look in this generation found the server asleep: it unloaded its model, and what the slots held."""
        if generation.events == self.events:
            for slot in self.all:
                if not slot.busy:
                    self.invalidated(slot)

    def listed(self, listing: Listing | None, identity: Identity | None, only: Slot | None = None) -> None:
        """The server listed its slots: those that another client used are unknown now. `only` leaves the others alone."""
        pairs = self.current(listing) or ()
        self._lists_tasks |= any(report.task is not None for _, report in pairs)
        # The slot of the probe had a task. A warm slot may have had none.
        slept = listing is not None and all(report.task is None for report in listing.reports)
        for slot, report in pairs:
            if report.working or only not in (None, slot):
                continue
            if self._lists_tasks and slot.n_total and report.task is None and (slept or not slot.warm):
                self.invalidated(slot)  # the server slept since
            if slot.last_listing is None and self.unleased_requests:
                continue  # the report may be of another client's request
            if not self._is_ours(slot, report) or not _has_common_adapters(report, identity):
                self.lost_to_others(slot)
            slot.last_listing = (report.task, report.n_tokens)

    def _is_ours(self, slot: Slot, report: SlotReport) -> bool:
        """Whether the last request in a slot was ours. Of a request that was cut off, the report tells the number of
        tokens."""
        if slot.last_listing is not None:
            return slot.last_listing == (report.task, report.n_tokens)
        if slot.passes != self.passes and not slot.unfit:
            return False
        if slot.cut:
            slot.n_total = report.n_tokens or slot.n_total
            return True
        return report.n_tokens is None or abs(report.n_tokens - slot.n_total) <= UNSURE_TOKENS

    def invalidated(self, slot: Slot) -> None:
        """The contents are unknown, or must not be kept."""
        self._ends_warm(slot, hit=False)
        slot.tokens, slot.n_total, slot.stored, slot.entry = NOTHING, 0, 0, None
        slot.origin = slot.chat = slot.last_listing = None
        slot.unfit = True

    def _ends_warm(self, slot: Slot, *, hit: bool) -> None:
        if slot.warm:
            slot.warm = False
            self._count("warm_hits" if hit else "warm_wasted")

    def lost_to_others(self, slot: Slot) -> None:
        """Another client used the slot; the server's own prompt cache may have its state as well."""
        self.invalidated(slot)
        self.strangers = True

    # -- events of leases

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A request that wants a slot, until it has one that is ready."""
        self.arrivals += 1
        try:
            yield
        finally:
            self.arrivals -= 1

    @contextmanager
    def passing(self, *, taints: bool = False, slot_id: int | None = None) -> Iterator[None]:
        """A request that the server finds a slot for: when it has `passed`, any slot may hold something else. `slot_id` is
        the slot that it names itself, `taints` says whether it wants other numbers than other requests get."""
        self.unleased_requests += 1
        self.foreign_requests += 1
        self.foreign += 1
        self.events += 1
        self.strangers = True
        self.tainting += taints
        self.tainted += taints
        self.meddled(slot_id)
        try:
            yield
        finally:
            self.meddled(slot_id)
            self.tainting -= taints
            self.foreign_requests -= 1
            self.passed()

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """A leased request for which the server chooses the slot. When it has `passed`, `placed` finds the slot."""
        self.unleased_requests += 1
        self.events += 1
        try:
            yield
        finally:
            self.passed()

    def placed(
        self, leased: Slot, listing: Listing | None, identity: Identity | None, n_total: int, passes: int
    ) -> Slot | None:
        """An unpinned request was answered and left n_total tokens: the slot that the server chose, None where that is not
        sure. `passes` is `foreign` from before the request: what others asked meanwhile may be in any slot."""
        if passes != self.foreign or self.foreign_requests:
            return None
        if len(self.all) == 1:
            return leased if self.all[0] is leased and not self.unleased_requests else None
        found: list[tuple[int, bool, Slot]] = []
        for slot, report in self.current(listing) or ():
            fits = report.n_tokens is not None and abs(report.n_tokens - n_total) <= UNSURE_TOKENS
            known = slot.last_listing == (report.task, report.n_tokens)
            if not fits or known or report.working or (slot.busy and slot is not leased):
                continue
            if _has_common_adapters(report, identity):
                found.append((-1 if report.task is None else report.task, slot is leased, slot))
        if not found or (found[0][0] < 0 and len(found) > 1):
            return None
        slot = max(found, key=lambda each: each[:2])[2]
        slot.passes = self.passes
        return slot

    def passed(self) -> None:
        self.unleased_requests -= 1
        self.events += 1
        self.passes += 1
        self.last_active = time.monotonic()

    def meddled(self, slot_id: int | None) -> None:
        """A client saves, restores or erases a slot itself."""
        if slot_id is not None and slot_id < len(self.all):
            slot = self.all[slot_id]
            slot.meddled += 1
            self.invalidated(slot)

    async def acquire(self, prompt: Prompt, match: Match | None, busy_elsewhere: frozenset[int] = frozenset()) -> Choice:
        """Waits for a slot and leases it. `busy_elsewhere` are the slots in which the server works for another client.

        Raises UpstreamError where the server went away meanwhile.
        """
        self.waiting += 1
        now = self.all
        try:
            async with self._free:
                while self.all is now and now:
                    free = [s for s in self.all if not s.busy and (prompt.id_slot is None or s.id == prompt.id_slot)]
                    if free:
                        free = [s for s in free if s.id not in busy_elsewhere] or free
                        choice = min((self._weigh(s, prompt, match) for s in free), key=lambda c: c[0])[1]
                        self.lease_now(choice.slot)
                        return choice
                    await self._free.wait()
            raise UpstreamError("llama-server went away")
        finally:
            self.waiting -= 1

    def lease_now(self, slot: Slot) -> bool:
        """Leases the slot if it is free; whether it was."""
        if slot.busy:
            return False
        slot.busy = True
        self.events += 1
        slot.uses += 1
        return True

    async def released(self, slot: Slot) -> None:
        async with self._free:
            slot.busy = False
            self.events += 1
            self._free.notify_all()
        self.last_active = time.monotonic()

    def restoring(self, slot: Slot) -> None:
        """A restore begins: until it is done, the contents are unknown."""
        self.invalidated(slot)

    def restored(self, slot: Slot, tokens: Tokens, n: int, entry: int | None, *, warm: bool = False) -> None:
        """The server took n tokens of an entry. `warm`: no request asked for them."""
        slot.tokens, slot.n_total, slot.stored, slot.entry, slot.warm = tokens[:n], n, n, entry, warm
        slot.unfit = n != tokens.shape[0]

    def erased(self, slot: Slot) -> None:
        slot.unfit = False

    def answered(
        self, slot: Slot, prompt: Prompt, timings: Timings, identity: Identity | None, *, in_store: int, overlapped: bool
    ) -> None:
        """The server answered a request in the slot. in_store: how many of the prompt's tokens the store has. overlapped:
        whether a request that taints was under way at the same time."""
        self._ends_warm(slot, hit=timings.cached >= self.min_gain)
        if not self._keeps(slot, prompt, timings, identity, overlapped):
            return
        n_prompt = timings.cached + timings.computed
        known = slot.tokens[: min(slot.tokens.shape[0], timings.cached)]
        if prompt.tokens is not None and prompt.tokens.shape[0] == n_prompt:
            kept = common_prefix_length(slot.tokens, prompt.tokens)
            slot.tokens = prompt.tokens
        else:
            kept = known.shape[0]
            slot.tokens = known if prompt.tokens is None else NOTHING
        if slot.stored > max(kept, timings.cached):
            # The slot has diverged from the entry it was restored from or saved as.
            slot.stored, slot.entry = min(slot.stored, kept), None
        slot.stored = max(slot.stored, min(in_store, n_prompt))
        slot.n_total = n_prompt + max(0, timings.generated - 1)
        slot.n_prompt = n_prompt
        slot.origin = None if slot.unfit else prompt
        slot.chat = (prompt.template_fields(), prompt.messages) if prompt.kind == "chat" else None
        slot.used = time.monotonic()
        slot.last_listing = None

    def _keeps(
        self, slot: Slot, prompt: Prompt, timings: Timings, identity: Identity | None, overlapped: bool
    ) -> bool:
        """Whether the contents are known after an answer; decides also whether the slot is fit to be saved."""
        n_total = timings.cached + timings.computed + timings.generated
        if identity is None or 0 < identity.n_ctx <= n_total:
            self.lost_to_others(slot)  # the context was full: the server may have shifted it
            return False
        if timings.cached == 0:
            slot.unfit = False
        elif slot.needs_erase or overlapped:
            self.invalidated(slot)
            return False
        elif prompt.tokens is not None:
            held, n_prompt = slot.holds(prompt.tokens), timings.cached + timings.computed
            least = min(held, n_prompt - 1) - 1 if identity.crops and prompt.tokens.shape[0] == n_prompt else 0
            if timings.cached < least:
                # Another client used the slot meanwhile: the server reused that client's tokens.
                self.lost_to_others(slot)
                return False
            # The known tokens are followed by those of the answer, whose number is known only nearly.
            most = max(held, slot.n_total + UNSURE_TOKENS) if held == slot.tokens.shape[0] else held
            if timings.cached > most and (self.strangers or identity.adapters or not prompt.pinned):
                # From the server's own prompt cache, or moved chunks: nobody knows what computed them.
                slot.unfit = True
        return True

    def aborted(self, slot: Slot, prompt: Prompt, *, keeps: bool) -> None:
        """The request was cut off: the slot holds a part of it, and a save will tell how much. `keeps` says whether that
        part can be the plain computation of the prompt."""
        keeps = keeps and not slot.unfit
        self.invalidated(slot)
        if keeps:
            slot.unfit = False
            slot.origin, slot.n_prompt = prompt, 0
            slot.n_total = 0 if prompt.tokens is None else prompt.tokens.shape[0]

    def ended(self, slot: Slot) -> None:
        """A request in the slot ended; the lease has not."""
        slot.passes = self.passes

    # -- events of saves

    def save_declined(self, slot: Slot) -> None:
        """What the slot holds is not to be saved."""
        slot.origin = None

    def save_started(self, slot: Slot) -> None:
        slot.origin = None

    def save_cancelled(self, slot: Slot, origin: Prompt, n_prompt: int) -> None:
        """Nothing happened to the slot."""
        slot.origin, slot.n_prompt = origin, n_prompt

    def save_failed(self, slot: Slot) -> None:
        self.invalidated(slot)

    def saved(self, slot: Slot, tokens: Tokens, *, putting: bool) -> None:
        """The server wrote the slot's tokens and state. With `putting` they are on their way into the store."""
        slot.tokens, slot.n_total, slot.stored = tokens, tokens.shape[0], tokens.shape[0] if putting else 0
        if putting:
            slot.putting += 1
        else:
            slot.entry = None

    def put_ended(self, slot: Slot) -> None:
        slot.putting -= 1

    def stored(self, slot: Slot, tokens: Tokens, entry: int) -> None:
        """The store has the saved tokens; the slot may have gone on since."""
        if slot.tokens is tokens:
            slot.entry = entry

    def put_failed(self, slot: Slot, tokens: Tokens) -> None:
        if slot.tokens is tokens:
            slot.stored, slot.entry = 0, None

    def save_again(self, slot: Slot, tokens: Tokens, origin: Prompt) -> bool:
        """The slot is to be saved again, if it still holds the tokens whose put failed; whether it does."""
        if slot.tokens is not tokens or slot.origin is not None:
            return False
        slot.origin = origin
        return True

    # -- the choice of a slot
    def choose(self, slot: Slot, prompt: Prompt, match: Match | None) -> Choice:
        """What to do with a slot that the request has already."""
        return self._weigh(slot, prompt, match)[1]

    def _weigh(self, slot: Slot, prompt: Prompt, match: Match | None) -> tuple[tuple[float, float], Choice]:
        """The seconds that the request would cost in this slot, with what it would take from the slot's present owner."""
        rates = self.rates
        n = 0 if prompt.tokens is None else prompt.tokens.shape[0]
        held = 0 if prompt.tokens is None else slot.holds(prompt.tokens)
        rest = slot.n_total - slot.tokens.shape[0] if held == slot.tokens.shape[0] else 0
        restore, skipped = None, False
        cost = rates.prefill_seconds(n - held)
        if match is not None and match.n_common - held >= self.min_gain + rest and match.entry.id != slot.entry:
            other = rates.prefill_seconds(n - match.n_common) + rates.restore_seconds(
                restore_bytes(match.entry, match.n_common)
            )
            if other < cost:
                restore, cost = match, other
            else:
                skipped = True
        # A request that continues most of a slot is taken for the same conversation.
        lost = slot.n_total - held if slot.n_total - held > max(self.min_gain, 0.25 * held) + rest else 0
        displaced = lost if slot.unsaved >= self.min_gain and lost else 0
        if lost:
            back = rates.restore_seconds(slot.n_total * rates.token_bytes)
            age = time.monotonic() - slot.used
            cost += (back + (rates.prefill_seconds(slot.unsaved) if displaced else 0)) / (1 + age / 60)
        return (cost, slot.used), Choice(slot, held, restore, displaced, skipped)


def _has_common_adapters(report: SlotReport, identity: Identity | None) -> bool:
    """Whether the last request in a slot had the server's adapters, and none of its own."""
    own = report.adapters
    shared = None if identity is None else identity.adapters
    scales = {a.get("id"): a.get("scale") for a in shared or () if isinstance(a, dict)}
    return not own or {a.get("id"): a.get("scale") for a in own} == scales
