"""Saves slots and puts them into the store, when nobody waits for the server."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from ... import slotfile
from ...errors import KVStoreError, LayoutError
from ...store import Store
from ...types import Entry, hex_id
from ...util.buffers import common_prefix_length
from .. import probe
from .backend_link import BackendLink
from .metrics import Metrics
from .prompt import Prompt
from .slots import Choice, Slot, SlotTable
from .tokenizer import Tokenizer, block_lengths
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
SAVE_SECONDS = 120.0
LAST_SAVES_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
# States that wait in memory for earlier puts; no slot is saved early while there are this many.
MAX_WAITING = 3
MAX_PUTS = 3  # attempts to store one state


@dataclass(frozen=True, eq=False)
class Unwritten:
    """A state whose put is under way."""

    store: Store
    file: slotfile.SlotFile


class Saver:
    """llama-server saves a slot in its one loop, so a save stops all answers for its whole duration. Saves therefore wait
    until no request is under way and `idle_seconds` have passed since the last one.

    The exception is a slot that another conversation is about to overwrite: it is saved first, if computing what would be
    lost takes longer than the save.
    """

    def __init__(self, link: BackendLink, slots: SlotTable, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.link = link
        self.slots = slots
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._wake = asyncio.Event()
        self._stopping = False
        self._puts: set[asyncio.Task[None]] = set()
        self.unwritten: list[Unwritten] = []
        self.n_saved = 0

    def wake(self) -> None:
        self._wake.set()

    def _worth(self, slot: Slot) -> bool:
        if slot.origin is None or self.link.store is None:
            return False
        if slot.unfit:
            self._drop(slot, "it may hold more than the computation of its tokens")
            return False
        if slot.unsaved < self.link.options.min_tokens or not self.link.reuses:
            self.metrics.count("saves_skipped")
            self.slots.save_declined(slot)
            return False
        return True

    def _drop(self, slot: Slot, why: str) -> None:
        self.metrics.count("saves_unfit")
        log.info("slot %d is not saved: %s", slot.id, why)
        self.slots.save_declined(slot)

    async def run(self) -> None:
        """Saves slots until `last` is called."""
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            slots = self.slots
            while not self._stopping and any(slot.origin is not None for slot in slots.all if not slot.busy):
                left = slots.last_active + self.link.options.idle_seconds - time.monotonic()
                if left > 0 or not slots.quiet:
                    await asyncio.sleep(max(left, 0.05))
                    continue
                slot: Slot | None = None
                try:
                    if not await self.link.awake():
                        continue
                    if await self.link.busy_elsewhere():
                        await asyncio.sleep(0.2)
                        continue
                    slot = next((s for s in slots.all if not s.busy and self._worth(s)), None)
                    if slot is not None and slots.lease_now(slot):
                        try:
                            await self._save(slot)
                        finally:
                            await slots.released(slot)
                except Exception:
                    self.metrics.count("failures")
                    log.warning("a slot was not saved", exc_info=True)
                    if slot is None:  # the server did not answer; the slots stay as they are
                        await asyncio.sleep(ASK_AGAIN_SECONDS)
                await asyncio.gather(*self._puts, return_exceptions=True)

    async def before_overwrite(self, choice: Choice) -> None:
        """Saves the slot of a choice, if that pays. The caller has leased it for a request."""
        rates = self.slots.rates
        slot = choice.slot
        if len(self._puts) >= MAX_WAITING or not self._worth(slot):
            return
        # The factor favours the save: both numbers are estimates.
        if rates.save_seconds(slot.n_total) > 2 * rates.prefill_seconds(slot.unsaved) + 0.01:
            return
        try:
            await self._save(slot)
            self.metrics.count("saves_before_overwrite")
        except Exception:
            self.metrics.count("failures")
            log.warning("a slot was not saved before it was overwritten", exc_info=True)

    async def last(self, run: asyncio.Task[None]) -> None:
        """At the end: saves what is not stored yet and waits for the puts, within limits of time. Ends `run`."""
        self._stopping = True
        self.wake()
        try:
            await asyncio.wait_for(run, LAST_SAVES_SECONDS)
            await asyncio.wait_for(self._last(), LAST_SAVES_SECONDS)
        except Exception:
            self.metrics.count("failures")
            log.warning("some slots were not saved at the end", exc_info=True)

    async def _last(self) -> None:
        slots = self.slots
        if any(slot.origin is not None for slot in slots.all) and await self.link.awake():
            for slot in slots.all:
                if self._worth(slot) and slots.lease_now(slot):
                    try:
                        await self._save(slot)
                    except (KVStoreError, OSError):
                        self.metrics.count("failures")
                        log.warning("a slot was not saved at the end", exc_info=True)
        await asyncio.gather(*self._puts)

    async def _save(self, slot: Slot) -> None:
        """Saves a slot, and starts the put."""
        link, slots = self.link, self.slots
        origin, n_prompt, store = slot.origin, slot.n_prompt, link.store
        if origin is None or store is None:
            slots.save_declined(slot)
            return
        try:
            vouched = await link.vouch(slot)
            slots.save_started(slot)
            if not vouched:
                self._drop(slot, "another client used it")
                return
            started = time.perf_counter()
            n_most = slot.n_total or (0 if link.identity is None else link.identity.n_ctx)
            file = await link.backend.save_slot(slot.id, SAVE_SECONDS, n_tokens=n_most)
            slots.rates.saved(file.tokens.shape[0], file.state.nbytes, time.perf_counter() - started)
            unchanged = await link.vouch(slot)
        except UpstreamError as error:
            slots.save_failed(slot)
            if error.status is None and not error.late:
                link.mark_unverified()
            raise
        except asyncio.CancelledError:
            slots.save_cancelled(slot, origin, n_prompt)
            raise
        if not unchanged:
            self._drop(slot, "another client used it")
            return
        if file.media:
            return
        if file.tokens.shape[0] < link.options.min_tokens:
            slots.saved(slot, file.tokens, putting=False)
            return
        if wrong := self._differs(slot, origin, n_prompt, file):
            slots.lost_to_others(slot)
            self._drop(slot, wrong)
            return
        if n_prompt and not self.tokenizer.reconcile(origin, file.tokens, n_prompt):
            self.metrics.count("token_mismatches")
            level = logging.INFO if origin.spliced else logging.WARNING
            log.log(level, "the server's tokens of a prompt differ from those it gave before: %d tokens", n_prompt)
        slots.saved(slot, file.tokens, putting=True)
        self.unwritten.append(Unwritten(store, file))
        self.n_saved += 1
        task = asyncio.create_task(self._put(store, origin, file, slot))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    def _differs(self, slot: Slot, origin: Prompt, n_prompt: int, file: slotfile.SlotFile) -> str | None:
        """Why a slot file cannot be what the request left in the slot; None where it can be."""
        n = file.tokens.shape[0]
        if int(file.tokens.min()) < 0:
            return "it holds more than text"
        try:
            if not probe.is_plain(file.state, n):
                return "its positions are not those of its tokens"
        except LayoutError as error:
            return f"its state is not understood: {error.message}"
        if n_prompt and abs(n - slot.n_total) > 2:
            return f"it holds {n} tokens, the last request left {slot.n_total}"
        if origin.tokens is None:
            known = min(slot.tokens.shape[0], n)
            same = common_prefix_length(slot.tokens, file.tokens) >= known
            return None if same else "its tokens are not those of the request"
        # The tokens that we found for a text may differ from those that the server computed.
        ours = origin.tokens
        shared, least = common_prefix_length(ours, file.tokens), min(ours.shape[0], n)
        if not (origin.given or not n_prompt):
            # Of an unpinned request nearly all must be equal, but for a start token: the slot may be another one.
            shifted = (common_prefix_length(ours[1:], file.tokens), common_prefix_length(ours, file.tokens[1:]))
            shared, least = max(shared, *shifted), 0 if origin.pinned else least // 2
        if shared < least:
            return "its tokens are not those of the prompt"
        return None

    async def _put(self, store: Store, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        try:
            await self._put_file(store, origin, file, slot)
        finally:
            self.unwritten = [each for each in self.unwritten if each.file is not file]
            self.slots.put_ended(slot)

    async def _put_file(self, store: Store, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        link = self.link
        try:
            n_system, user_start = await block_lengths(self.tokenizer, link.backend, origin, file.tokens)
        except (UpstreamError, KeyError, TypeError, ValueError, RecursionError) as error:
            log.info("the system block of a prompt was not found: %s", error)
            n_system = user_start = 0

        def put() -> Entry:
            n_input = None if origin.tokens is None else int(origin.tokens.shape[0])
            return store.put(
                file.tokens, file.state, n_system=n_system, user_start=user_start, excerpt=origin.excerpt, n_input=n_input
            )

        try:
            entry = await link.run_put(put)
        except Exception:
            self.metrics.count("failures")
            log.warning("a state was not stored", exc_info=True)
            await self._put_failed(origin, file, slot)
            return
        self.metrics.count("saves")
        self.slots.stored(slot, file.tokens, entry.id)
        log.debug("stored %s: %d tokens of slot %d", hex_id(entry.id), entry.n_tokens, slot.id)

    async def _put_failed(self, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        """Saves the slot again after a while, if it still holds the same tokens: most failures are temporary."""
        self.slots.put_failed(slot, file.tokens)
        origin.puts_failed += 1
        if not self._stopping and origin.puts_failed < MAX_PUTS:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            if self.slots.save_again(slot, file.tokens, origin):
                self.wake()
