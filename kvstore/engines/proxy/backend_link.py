"""The link to one server: which process it is, the store of its states, and whether its slots are as we left them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import KVStoreError
from ...store import Store
from .backend import Backend, CacheOff, Identity, Status
from .metrics import Metrics
from .options import ProxyOptions
from .rates import Rates
from .slots import Listing, Slot, SlotTable
from .upstream import UpstreamError

log = logging.getLogger("kvstore.proxy")
T = TypeVar("T")
POLL_SECONDS = 2.0
LINK_SECONDS = 10.0  # a request waits at most this long for the probe of a new server, then it passes without the cache
CHECK_SECONDS = 2.0
VOUCH_SECONDS = 120.0
VERIFIED_SECONDS = 0.1  # no server restarts in less
RETRY_SECONDS = 15.0  # until a server whose slots cannot be saved is probed again
# Some builds cannot use their own slot files (windows and recurrent states before October 2026): after this many futile
# restores in a row, restores and saves end.
MAX_FUTILE = 3


class BackendLink:
    """One server and the store of its states. What it learns of the slots it tells `slots`.

    `store` is None until the server was probed, and while the cache is off; `off` says why.
    """

    def __init__(
        self,
        backend: Backend,
        slots: SlotTable,
        options: ProxyOptions,
        metrics: Metrics,
        *,
        on_new_model: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.slots = slots
        self.options = options
        self.metrics = metrics
        self._on_new_model = on_new_model
        self.identity: Identity | None = None
        self.store: Store | None = None
        self.off = "the server was not reached yet"
        self.rejected_entries: set[int] = set()  # entries that this process refused or did not use
        self.futile_restores = 0  # in a row: the server used little of what they gave
        self._linking: asyncio.Task[None] | None = None
        self._failed_at = 0.0
        self._unverified = True
        self._refused = False
        self._verified_at = 0.0
        self._lists_slots = True
        self._asleep = False  # the server was asleep before it was linked to: the next request wakes it anyway
        self._asked = False
        self._notes: set[asyncio.Task[None]] = set()
        # Nothing that a request waits for is queued behind a put.
        self._quick = ThreadPoolExecutor(4, "kvstore-proxy")
        self._puts = ThreadPoolExecutor(1, "kvstore-proxy-put")
        self._pages = ThreadPoolExecutor(1, "kvstore-proxy-page")  # the figures of a page wait for writers

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a blocking call outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, function, *args)

    async def run_page(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pages, function, *args)

    async def run_put(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._puts, function, *args)

    @property
    def reuses(self) -> bool:
        """Whether restores and saves are of use with this server."""
        return self.futile_restores < MAX_FUTILE

    def mark_verified(self) -> None:
        """The server that we know answered just now."""
        if not self.slots.unleased_requests:
            self._verified_at = time.monotonic()

    def mark_unverified(self) -> None:
        """A connection failed: the process may be another one next time."""
        self._unverified = True

    def invalidate(self) -> None:
        """The server's settings may change (adapters): it has to be probed again."""
        self.identity = None
        self._unverified = True
        self._verified_at = 0.0

    async def check(self) -> bool:
        """Whether this is still the process that we know, with slots as we left them. Links to a new process."""
        if self._refused:
            if time.monotonic() - self._failed_at > RETRY_SECONDS:
                self._start_link()  # this request does not wait for it
            return False
        if not self._unverified and time.monotonic() - self._verified_at < VERIFIED_SECONDS:
            return self.store is not None
        if self.identity is not None:
            try:
                # The server's loop answers a list of slots when its batch is done; it answers a status at once.
                if self.slots.quiet and self._lists_slots:
                    status, listing, adapters = await asyncio.gather(self._status(), self.list_slots(), self._adapters())
                else:
                    status, listing, adapters = await self._status(), None, self.identity.adapters
                if self._same(status, listing) and adapters == self.identity.adapters:
                    self._unverified = False
                    self._verified_at = time.monotonic()
                    self.slots.listed(listing, self.identity)
                    return self.store is not None
            except UpstreamError as error:
                if error.late and not self._unverified:
                    # The server is busy, with our requests or another client's.
                    return self.store is not None and not self.slots.quiet
                log.info("llama-server does not answer: %s", error.message)
            self._unverified = True
        await self._wait_for_link()
        return self.store is not None and not self._unverified

    async def _status(self) -> Status:
        """Neither wakes a sleeping server nor keeps a server awake. Raises UpstreamError."""
        generation = self.slots.generation()
        status = await self.backend.status(CHECK_SECONDS)
        if status.sleeping:
            self.slots.slept(generation)
        return status

    def _same(self, status: Status, listing: Listing | None = None) -> bool:
        """Whether this is the process that we know."""
        if self.identity is None or status.marker != self.identity.marker:
            return False
        return status.unique or not (self._unverified or self.slots.restarted(listing))

    async def list_slots(self, timeout: float = CHECK_SECONDS) -> Listing | None:
        """The server's list of slots; None where the server has none, or does not answer in time."""
        generation = self.slots.generation()
        try:
            return Listing(await self.backend.list_slots(timeout), generation)
        except UpstreamError as error:
            if error.status is None and not error.late:
                raise
            if error.status in (401, 403, 404, 501):
                self._lists_slots = False  # --no-slots
            return None

    async def _adapters(self, timeout: float = CHECK_SECONDS) -> Any:
        """The adapters and their scales, which a request can change."""
        known = None if self.identity is None else self.identity.adapters
        return None if known is None else await self.backend.list_adapters(timeout)

    def note(self, slot: Slot) -> None:
        """A request in the slot has just ended: asks the server for the task and the tokens of the slot, by which a later
        request of another client shows. No request waits for this."""
        uses = slot.uses
        self.slots.ended(slot)

        async def ask() -> None:
            with suppress(UpstreamError):
                listing = await self.list_slots()
                if slot.uses == uses and slot.last_listing is None:
                    self.slots.listed(listing, self.identity, slot)

        if self._lists_slots:
            task = asyncio.create_task(ask())
            self._notes.add(task)
            task.add_done_callback(self._notes.discard)

    async def vouch(self, slot: Slot) -> bool:
        """Whether the slot is sure to hold what the last request that we know of left there, and nothing but the plain
        computation of it. Raises UpstreamError."""
        slots = self.slots
        if slot.unfit:
            return False
        if not self._lists_slots:
            return slots.undisturbed(slot)
        # The server answers when its batch is done; the save itself waits for that too.
        listing, adapters = await asyncio.gather(self.list_slots(VOUCH_SECONDS), self._adapters(VOUCH_SECONDS))
        if self.identity is None or adapters != self.identity.adapters:
            self.invalidate()
            slots.invalidated(slot)
            return False
        current = slots.current(listing)
        if current is None:
            return slots.undisturbed(slot)
        if any(report.working for each, report in current if each is slot):
            return False
        slots.listed(listing, self.identity, slot)
        return not slot.unfit and slot.last_listing is not None

    async def busy_elsewhere(self) -> frozenset[int]:
        """The slots in which the server works for another client, or for one that left: not every build stops then."""
        if not self._lists_slots:
            return frozenset()
        listing = await self.list_slots()
        if self.slots.quiet:
            self.slots.listed(listing, self.identity)
        return self.slots.working(listing)

    async def awake(self) -> bool:
        """Whether the slots still hold something. Raises UpstreamError."""
        return not (await self._status()).sleeping

    def _start_link(self) -> asyncio.Task[None]:
        if self._linking is None or self._linking.done():
            self._linking = asyncio.create_task(self._probe())
        return self._linking

    async def _wait_for_link(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._start_link()), LINK_SECONDS)

    async def _probe(self) -> None:
        """Probes the server, and opens the store of its states. Never raises."""
        self._asleep = False
        try:
            identity = await self.backend.probe()
            if self.identity is not None and self.identity.marker != identity.marker:
                self.metrics.count("upstream_changes")
            old = self.identity
            rates: Rates | None = None
            if self.store is None or old is None or old.fingerprint != identity.fingerprint:
                await self._open(identity.fingerprint)
                self._on_new_model()
                rates = Rates()
            self.identity = identity
            await self.slots.linked(identity.n_slots, strangers=not identity.fresh, rates=rates)
            self.rejected_entries.clear()
            self.futile_restores = 0
            self._unverified = self._refused = False
            self._lists_slots = True
            if self.off:
                log.info("caching for %s, %d slots", identity.model, identity.n_slots)
            self.off = ""
        except UpstreamError as error:
            self._refused = error.status not in (None, 503)  # 503: the server loads its model
            await self._turn_off(f"{error} (give --upstream-api-key)" if error.status in (401, 403) else str(error))
        except (CacheOff, KVStoreError) as error:
            self._refused = True
            await self._turn_off(str(error))
        except Exception:
            log.warning("the cache cannot work with this server", exc_info=True)
            self._refused = True
            await self._turn_off("an internal error, see the log")

    async def _turn_off(self, reason: str) -> None:
        self._failed_at = time.monotonic()
        if self.off != reason:
            log.warning("no caching: %s", reason)
        self.off = reason
        await self.slots.unlinked()

    async def _open(self, fingerprint: str) -> None:
        old, self.store = self.store, None
        options = {"auto_learn": True, **self.options.store_options, "fingerprint": fingerprint}
        if old is not None:
            await self.run_put(old.close)  # after the puts under way
        self.store = await self.run_put(lambda: Store(self.options.store, **options))

    def look_again(self) -> None:
        """A client of the stats page wants to know the state of the server."""
        self._asked = True

    async def watch(self) -> None:
        """Links to the server as soon as it answers, so that no request waits for the probe. After that, the server gets
        no requests from here unless a client wants to know its state: it may be about to sleep."""
        while True:
            try:
                asked, self._asked = self._asked, False
                if asked or not (self._refused or self._asleep or not self._unverified):
                    await self._poll()
            except Exception:
                log.warning("the check of the server failed", exc_info=True)
            await asyncio.sleep(POLL_SECONDS if self.store is not None else POLL_SECONDS / 4)

    async def _poll(self) -> None:
        """Checks the server without waking it."""
        if self._refused and time.monotonic() - self._failed_at < RETRY_SECONDS:
            return
        asleep = same = False
        try:
            status = await self._status()
            asleep, same = status.sleeping, self._same(status)
        except UpstreamError as error:
            if error.late:
                return
            if error.status in (None, 503):
                self._unverified, self._refused = True, False
                await self._turn_off(str(error))
                return
        if asleep and (self._unverified or self._refused):
            self._asleep = True
            if self.store is None:
                self.off = "the server sleeps; the next request wakes it"
        elif self._refused:
            await self._wait_for_link()
        elif self._unverified or not same:
            await self.check()

    async def close(self) -> None:
        for note in self._notes:
            note.cancel()
        if self._linking is not None:
            self._linking.cancel()
            with suppress(asyncio.CancelledError):
                await self._linking
        with suppress(OSError):
            await self.backend.close()
        if self.store is not None:
            with suppress(KVStoreError):
                await self.run_put(self.store.close)
        self._quick.shutdown(wait=False)
        self._puts.shutdown(wait=False)
        self._pages.shutdown(wait=False)
