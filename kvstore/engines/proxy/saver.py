"""Behind the answers: slots are saved and put into the store when nobody waits for the server."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from ... import slotfile
from ...errors import KVStoreError, LayoutError
from ...store import Store
from ...types import Entry, hex_id
from .. import probe
from .fingerprint import save
from .metrics import Metrics
from .prompt import Prompt, common, starts
from .server import Server
from .slots import Choice, Slot
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
SAVE_SECONDS = 120.0
LAST_SAVES_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
# States that wait in memory for the put before them; more than this are not kept.
MAX_WAITING = 3
MAX_PUTS = 3  # of one state, where the store fails


@dataclass(frozen=True, eq=False)
class Unwritten:
    """A state whose put is under way."""

    store: Store
    file: slotfile.SlotFile


class Saver:
    """llama-server saves a slot in its one loop, so every save stops all its answers for as long as it takes: they are
    left for a moment when none is under way, `idle_seconds` after the last.

    The exception is a slot that another conversation is about to overwrite before that moment came: it is saved first,
    if computing what would be lost takes longer than saving it.
    """

    def __init__(self, server: Server, metrics: Metrics) -> None:
        self.server = server
        self.metrics = metrics
        self._wake = asyncio.Event()
        self._stopping = False
        self._puts: set[asyncio.Task[None]] = set()
        self.unwritten: list[Unwritten] = []
        self.n_saved = 0

    def wake(self) -> None:
        self._wake.set()

    def _worth(self, slot: Slot) -> bool:
        if slot.origin is None or self.server.store is None:
            return False
        if slot.unfit:
            self._drop(slot, "it holds more than the computation of its tokens")
            return False
        if slot.unsaved < self.server.settings.min_tokens or not self.server.reuses:
            self.metrics.count("saves_skipped")
            slot.origin = None
            return False
        return True

    def _drop(self, slot: Slot, why: str) -> None:
        self.metrics.count("saves_unfit")
        log.info("slot %d is not saved: %s", slot.id, why)
        slot.origin = None

    async def run(self) -> None:
        """Until `last`."""
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            slots = self.server.slots
            while not self._stopping and any(slot.origin is not None for slot in slots.all if not slot.busy):
                left = slots.last_active + self.server.settings.idle_seconds - time.monotonic()
                if left > 0 or not slots.quiet:
                    await asyncio.sleep(max(left, 0.05))
                    continue
                slot: Slot | None = None
                try:
                    if not await self.server.awake():
                        continue
                    working = await self.server.working()
                    if working:
                        await asyncio.sleep(0.2)
                        continue
                    slot = next((s for s in slots.all if not s.busy and self._worth(s)), None)
                    if slot is not None and slots.take(slot):
                        try:
                            await self._save(slot)
                        finally:
                            await slots.release(slot)
                except Exception:
                    self.metrics.count("failures")
                    log.warning("a slot was not saved", exc_info=True)
                    if slot is None:  # the server could not be asked; the slots stay as they are
                        await asyncio.sleep(ASK_AGAIN_SECONDS)
                await asyncio.gather(*self._puts, return_exceptions=True)

    async def before_overwrite(self, choice: Choice) -> None:
        """The caller has the slot, and a request for it."""
        rates = self.server.slots.rates
        slot = choice.slot
        if len(self._puts) >= MAX_WAITING or not self._worth(slot):
            return
        # In favour of the save, since both are estimates.
        if rates.save_seconds(slot.n_total) > 2 * rates.prefill_seconds(slot.unsaved) + 0.01:
            return
        try:
            await self._save(slot)
            self.metrics.count("saves_before_overwrite")
        except Exception:
            self.metrics.count("failures")
            log.warning("a slot was not saved before it was overwritten", exc_info=True)

    async def last(self, run: asyncio.Task[None]) -> None:
        """At the end: what is not stored yet, and the puts under way, as far as the time goes. `run` ends with it."""
        self._stopping = True
        self.wake()
        try:
            await asyncio.wait_for(run, LAST_SAVES_SECONDS)
            await asyncio.wait_for(self._last(), LAST_SAVES_SECONDS)
        except Exception:
            self.metrics.count("failures")
            log.warning("not all was saved at the end", exc_info=True)

    async def _last(self) -> None:
        slots = self.server.slots.all
        if any(slot.origin is not None for slot in slots) and await self.server.awake():
            for slot in slots:
                if self._worth(slot) and self.server.slots.take(slot):
                    try:
                        await self._save(slot)
                    except (KVStoreError, OSError):
                        self.metrics.count("failures")
                        log.warning("a slot was not saved at the end", exc_info=True)
        await asyncio.gather(*self._puts)

    async def _save(self, slot: Slot) -> None:
        """Saves a slot, and starts the put."""
        server = self.server
        origin, n_prompt, store = slot.origin, slot.n_prompt, server.store
        if origin is None or store is None:
            slot.origin = None
            return
        try:
            vouched = await server.vouch(slot)
            slot.origin = None
            if not vouched:
                self._drop(slot, "somebody else used it")
                return
            started = time.perf_counter()
            file = await save(server.upstream, server.files, slot.id, SAVE_SECONDS)
            server.slots.rates.saved(file.tokens.shape[0], file.state.nbytes, time.perf_counter() - started)
            unchanged = await server.vouch(slot)
        except UpstreamError as error:
            slot.forget()
            if error.status is None and not error.late:
                server.suspect()
            raise
        except asyncio.CancelledError:
            slot.origin, slot.n_prompt = origin, n_prompt  # nothing happened to the slot
            raise
        if not unchanged:
            self._drop(slot, "somebody else used it")
            return
        if file.media:
            return
        if file.tokens.shape[0] < server.settings.min_tokens:
            slot.tokens, slot.n_total, slot.stored, slot.entry = file.tokens, file.tokens.shape[0], 0, None
            return
        if wrong := self._differs(slot, origin, n_prompt, file):
            slot.forget()
            server.slots.strangers = True
            self._drop(slot, wrong)
            return
        if n_prompt and not server.tokenizer.learn(origin, file.tokens, n_prompt):
            self.metrics.count("token_mismatches")
            level = logging.INFO if origin.spliced else logging.WARNING
            log.log(level, "the server's tokens of a prompt differ from those it gave before: %d tokens", n_prompt)
        slot.tokens, slot.n_total, slot.stored = file.tokens, file.tokens.shape[0], file.tokens.shape[0]
        slot.putting += 1
        self.unwritten.append(Unwritten(store, file))
        self.n_saved += 1
        task = asyncio.create_task(self._put(store, origin, file, slot))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    def _differs(self, slot: Slot, origin: Prompt, n_prompt: int, file: slotfile.SlotFile) -> str | None:
        """Why a slot file is not what the request left, as far as that is known; None where it is."""
        n = file.tokens.shape[0]
        if int(file.tokens.min()) < 0:
            return "it holds what is not text"
        try:
            if not probe.is_plain(file.state, n):
                return "its positions are not those of its tokens"
        except LayoutError as error:
            return f"its state is not understood: {error.message}"
        if n_prompt and abs(n - slot.n_total) > 2:
            return f"it holds {n} tokens, the last request left {slot.n_total}"
        if origin.tokens is None:
            return None if common(slot.tokens, file.tokens) >= min(slot.tokens.shape[0], n) else "its tokens are others"
        # A text's tokens, as they were known before the request, may be others than the server's own.
        exact = origin.text is None or not n_prompt
        if exact and common(origin.tokens, file.tokens) < min(origin.tokens.shape[0], n):
            return "its tokens are not those of the prompt"
        return None

    async def _put(self, store: Store, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        try:
            await self._put_file(store, origin, file, slot)
        finally:
            self.unwritten = [each for each in self.unwritten if each.file is not file]
            slot.putting -= 1

    async def _put_file(self, store: Store, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        server = self.server
        try:
            n_system, user_start = await starts(server.tokenizer, server.upstream.ask, origin, file.tokens)
        except (UpstreamError, KeyError, TypeError, ValueError, RecursionError) as error:
            log.info("the system block of a prompt is not known: %s", error)
            n_system = user_start = 0

        def put() -> Entry:
            n_input = None if origin.tokens is None else int(origin.tokens.shape[0])
            return store.put(
                file.tokens, file.state, n_system=n_system, user_start=user_start, excerpt=origin.excerpt, n_input=n_input
            )

        try:
            entry = await server.run_put(put)
        except Exception:
            self.metrics.count("failures")
            log.warning("a state was not stored", exc_info=True)
            await self._put_failed(origin, file, slot)
            return
        self.metrics.count("saves")
        if slot.tokens is file.tokens:
            slot.entry = entry.id
        log.debug("stored %s: %d tokens of slot %d", hex_id(entry.id), entry.n_tokens, slot.id)

    async def _put_failed(self, origin: Prompt, file: slotfile.SlotFile, slot: Slot) -> None:
        """The slot is saved again after a while, if it still holds the same: most failures pass."""
        if slot.tokens is file.tokens:
            slot.stored, slot.entry = 0, None
        origin.puts_failed += 1
        if not self._stopping and origin.puts_failed < MAX_PUTS:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            if slot.tokens is file.tokens and slot.origin is None:
                slot.origin = origin
                self.wake()
