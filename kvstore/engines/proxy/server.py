"""The link to one llama-server: which process it is, the store of its states, and what is known of its slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import KVStoreError
from ...store import Store
from .files import SlotFiles
from .fingerprint import CacheOff, Identity, ask_adapters, identify, marker_of
from .metrics import Metrics
from .prompt import Tokenizer
from .slots import Rates, Slot, Slots
from .upstream import Upstream, UpstreamError

log = logging.getLogger("kvstore.proxy")
T = TypeVar("T")
POLL_SECONDS = 2.0
LINK_SECONDS = 10.0  # as long a request waits for the look at a new server; then it passes without a cache
CHECK_SECONDS = 2.0
VOUCH_SECONDS = 120.0
SURE_SECONDS = 0.1  # no server starts again in less
RETRY_SECONDS = 15.0  # until a server whose slots cannot be saved is looked at again
# A build that makes nothing of its own slot files (windows and recurrent states before October 2026) is left alone.
MAX_USELESS = 3


@dataclass(frozen=True)
class Settings:
    """What `serve` takes for the cache. `store_options` go to Store."""

    slot_dir: Path
    store: str
    store_options: dict[str, Any]
    min_tokens: int = 16
    idle_seconds: float = 0.15


class Server:
    """One llama-server and the store of its states.

    `store` is None until the server was looked at, and where the cache is off; `off` says why then.
    """

    def __init__(self, upstream: Upstream, settings: Settings, metrics: Metrics) -> None:
        self.upstream = upstream
        self.settings = settings
        self.metrics = metrics
        self.files = SlotFiles(settings.slot_dir)
        self.slots = Slots(Rates(), settings.min_tokens)
        self.tokenizer = Tokenizer(upstream.ask)
        self.identity: Identity | None = None
        self.store: Store | None = None
        self.off = "the server was not reached yet"
        self.bad: set[int] = set()  # entries that this process could make nothing of
        self.useless = 0  # restores in a row that gave nothing
        self._linking: asyncio.Task[None] | None = None
        self._failed_at = 0.0
        self._suspect = True
        self._refused = False
        self._sure_at = 0.0
        self._lists_slots = True
        self._asleep = False  # when it should have been linked to: the next request wakes it anyway
        self._asked = False
        self._tells_tasks = False  # /slots names the last task of a slot
        self._notes: set[asyncio.Task[None]] = set()
        # What a request waits for never stands behind a put, nor behind a page: figures wait for writers.
        self._quick = ThreadPoolExecutor(4, "kvstore-proxy")
        self._puts = ThreadPoolExecutor(1, "kvstore-proxy-put")
        self._pages = ThreadPoolExecutor(1, "kvstore-proxy-page")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """A blocking call, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, function, *args)

    async def run_put(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._puts, function, *args)

    async def run_page(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pages, function, *args)

    @property
    def reuses(self) -> bool:
        """Whether there is a point in restoring and saving."""
        return self.useless < MAX_USELESS

    def sure(self) -> None:
        """It answered just now."""
        if not self.slots.foreign:
            self._sure_at = time.monotonic()

    def suspect(self) -> None:
        """A connection failed: the process may be another one next time."""
        self._suspect = True

    def forget(self) -> None:
        """Settings of the server may change (adapters): look at it again."""
        self.identity = None
        self._suspect = True
        self._sure_at = 0.0

    async def check(self) -> bool:
        """Whether this is still the process that we know, with slots as we left them. Links to a new one."""
        if self._refused:
            if time.monotonic() - self._failed_at > RETRY_SECONDS:
                self._start_link()  # this request does not wait for it
            return False
        if not self._suspect and time.monotonic() - self._sure_at < SURE_SECONDS:
            return self.store is not None
        if self.identity is not None:
            try:
                # /props is answered beside the server's loop, /slots by it, which may be in the middle of a batch.
                if self.slots.quiet and self._lists_slots:
                    props, listed, adapters = await asyncio.gather(self._props(), self._listed(), self._adapters())
                else:
                    props, listed, adapters = await self._props(), None, self.identity.adapters
                if self._same(props, listed) and adapters == self.identity.adapters:
                    self._suspect = False
                    self._sure_at = time.monotonic()
                    self._compare(listed)
                    return self.store is not None
            except UpstreamError as error:
                if error.late and not self._suspect:
                    # It has its hands full, with our requests or somebody else's.
                    return self.store is not None and not self.slots.quiet
                log.info("llama-server does not answer: %s", error.message)
            self._suspect = True
        await self._link()
        return self.store is not None and not self._suspect

    async def _props(self) -> dict[str, Any]:
        """Neither wakes a sleeping server nor keeps one awake. Takes notice of one that sleeps. Raises UpstreamError."""
        events = self.slots.events
        props = await self.upstream.ask("GET", "/props", timeout=CHECK_SECONDS)
        if not isinstance(props, dict):
            raise UpstreamError("GET /props: not an object")
        if props.get("is_sleeping") and events == self.slots.events:
            self.slots.lost()
        return props

    def _same(self, props: dict[str, Any], listed: list[dict[str, Any]] | None = None) -> bool:
        """Whether this is the process that we know."""
        if self.identity is None or marker_of(props) != self.identity.marker:
            return False
        return bool(props.get("media_marker")) or not (self._suspect or self._restarted(listed))

    async def _listed(self, timeout: float = CHECK_SECONDS) -> list[dict[str, Any]] | None:
        """The slots as the server sees them, without those that a request of ours took meanwhile.

        None where the server does not say, or not in time, or where another's request passed: the list is old then.
        """
        uses = {slot.id: slot.uses for slot in self.slots.all}
        passed = (self.slots.foreign, self.slots.passes)
        try:
            listed = list(await self.upstream.ask("GET", "/slots", timeout=timeout))
        except UpstreamError as error:
            if error.status is None and not error.late:
                raise
            if error.status in (401, 403, 404, 501):
                self._lists_slots = False  # --no-slots
            return None
        if passed != (self.slots.foreign, self.slots.passes):
            return None
        now = {slot.id: slot.uses for slot in self.slots.all}
        return [each for each in listed if now.get(int(each["id"])) == uses.get(int(each["id"]))]

    async def _adapters(self, timeout: float = CHECK_SECONDS) -> Any:
        """The adapters and their scales, which a request can change."""
        known = None if self.identity is None else self.identity.adapters
        return None if known is None else await ask_adapters(self.upstream, timeout)

    def _restarted(self, listed: list[dict[str, Any]] | None) -> bool:
        """A slot that had a task and has none, or an older one, is a new process's."""
        for slot, now in self._pairs(listed):
            if slot.seen is not None and slot.seen[0] is not None:
                task = now.get("id_task")
                if task is None or task < slot.seen[0]:
                    return True
        return False

    def _pairs(self, listed: list[dict[str, Any]] | None) -> list[tuple[Slot, dict[str, Any]]]:
        by_id = {int(now["id"]): now for now in listed or ()}
        return [(slot, by_id[slot.id]) for slot in self.slots.all if slot.id in by_id]

    def _compare(self, listed: list[dict[str, Any]] | None, only: Slot | None = None) -> None:
        """Forgets slots that somebody else used: all, or one of them."""
        self._tells_tasks |= any(now.get("id_task") is not None for now in listed or ())
        for slot, now in self._pairs(listed):
            if now.get("is_processing") or only not in (None, slot):
                continue
            if self._tells_tasks and slot.n_total and now.get("id_task") is None:
                slot.forget()  # no task since it slept
            seen = (now.get("id_task"), now.get("n_prompt_tokens"))
            if slot.seen is None:
                if self.slots.foreign:
                    continue  # it may be theirs
                # Ours was the last request, unless another passed since, or the tokens are far from what ours left.
                if slot.passes != self.slots.passes and not slot.unfit:
                    self._strange(slot)
                elif slot.cut:
                    slot.n_total = int(seen[1] or slot.n_total)
                elif seen[1] is not None and abs(int(seen[1]) - slot.n_total) > 2:
                    self._strange(slot)
            elif slot.seen != seen:
                self._strange(slot)
            if not self._plain_adapters(now):
                self._strange(slot)
            slot.seen = seen

    def _strange(self, slot: Slot) -> None:
        slot.forget()
        self.slots.strangers = True

    def _plain_adapters(self, now: dict[str, Any]) -> bool:
        """Whether the last request in a slot had the server's adapters, and none of its own."""
        own = (now.get("params") or {}).get("lora")
        common = None if self.identity is None else self.identity.adapters
        scales = {a.get("id"): a.get("scale") for a in common or () if isinstance(a, dict)}
        return not own or {a.get("id"): a.get("scale") for a in own} == scales

    def note(self, slot: Slot) -> None:
        """A request in the slot has just ended: ask the server for the mark it left there, so that another's is told
        apart from it. Nobody waits for this."""
        uses = slot.uses
        slot.passes = self.slots.passes

        async def ask() -> None:
            with suppress(UpstreamError):
                listed = await self._listed()
                if slot.uses == uses and slot.seen is None:
                    self._compare(listed, slot)

        if self._lists_slots:
            task = asyncio.create_task(ask())
            self._notes.add(task)
            task.add_done_callback(self._notes.discard)

    async def vouch(self, slot: Slot) -> bool:
        """Whether the slot surely holds what the last request that we know of left there, and nothing but the plain
        computation of it. Raises UpstreamError."""
        if slot.unfit:
            return False
        if not self._lists_slots:
            return slot.passes == self.slots.passes and not self.slots.foreign
        # The server answers when its batch is done, as it does with the save itself.
        listed, adapters = await asyncio.gather(self._listed(VOUCH_SECONDS), self._adapters(VOUCH_SECONDS))
        if self.identity is None or adapters != self.identity.adapters:
            self.forget()
            slot.forget()
            return False
        if listed is None:
            return slot.passes == self.slots.passes and not self.slots.foreign
        if any(now.get("is_processing") for each, now in self._pairs(listed) if each is slot):
            return False
        self._compare(listed, slot)
        return not slot.unfit and slot.seen is not None

    async def working(self) -> frozenset[int]:
        """Slots that the server works in for somebody else, or for a client that left: not every build stops then."""
        if not self._lists_slots:
            return frozenset()
        listed = await self._listed()
        if self.slots.quiet:
            self._compare(listed)
        return frozenset(slot.id for slot, now in self._pairs(listed) if now.get("is_processing") and not slot.busy)

    async def awake(self) -> bool:
        """Whether the slots still hold something. Raises UpstreamError."""
        return not (await self._props()).get("is_sleeping")

    def _start_link(self) -> asyncio.Task[None]:
        if self._linking is None or self._linking.done():
            self._linking = asyncio.create_task(self._look())
        return self._linking

    async def _link(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._start_link()), LINK_SECONDS)

    async def _look(self) -> None:
        """Find out which server this is, and open its states. Never raises."""
        self._asleep = False
        try:
            identity = await identify(self.upstream, self.files)
            if self.identity is not None and self.identity.marker != identity.marker:
                self.metrics.count("upstream_changes")
            old = self.identity
            if self.store is None or old is None or old.fingerprint != identity.fingerprint:
                await self._open(identity.fingerprint)
                self.tokenizer = Tokenizer(self.upstream.ask)
                self.slots.rates = Rates()
            self.identity = identity
            await self.slots.reset(identity.n_slots)
            self.slots.strangers = not identity.fresh
            self.bad.clear()
            self.useless = 0
            self._suspect = self._refused = False
            self._lists_slots, self._tells_tasks = True, False
            if self.off:
                log.info("caching for %s, %d slots", identity.model, identity.n_slots)
            self.off = ""
        except UpstreamError as error:
            self._refused = error.status not in (None, 503)  # 503: it loads its model
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
        await self.slots.reset(0)

    async def _open(self, fingerprint: str) -> None:
        old, self.store = self.store, None
        options = {"auto_learn": True, **self.settings.store_options, "fingerprint": fingerprint}
        if old is not None:
            await self.run_put(old.close)  # behind the puts that are under way
        self.store = await self.run_put(lambda: Store(self.settings.store, **options))

    def look_again(self) -> None:
        """Somebody wants to know how the server is."""
        self._asked = True

    async def watch(self) -> None:
        """Links to the server as soon as it is there, so that no request has to wait for it. After that the server is not
        asked anything unless somebody wants to know: it may be about to sleep."""
        while True:
            try:
                asked, self._asked = self._asked, False
                if asked or not (self._refused or self._asleep or not self._suspect):
                    await self._glance()
            except Exception:
                log.warning("the look at the server failed", exc_info=True)
            await asyncio.sleep(POLL_SECONDS if self.store is not None else POLL_SECONDS / 4)

    async def _glance(self) -> None:
        """A look that does not wake the server."""
        if self._refused and time.monotonic() - self._failed_at < RETRY_SECONDS:
            return
        asleep = same = False
        try:
            props = await self._props()
            asleep, same = bool(props.get("is_sleeping")), self._same(props)
        except UpstreamError as error:
            if error.late:
                return
            if error.status in (None, 503):
                self._suspect, self._refused = True, False
                await self._turn_off(str(error))
                return
        if asleep and (self._suspect or self._refused):
            self._asleep = True
            if self.store is None:
                self.off = "the server sleeps, the next request wakes it"
        elif self._refused:
            await self._link()
        elif self._suspect or not same:
            await self.check()

    async def close(self) -> None:
        for note in self._notes:
            note.cancel()
        if self._linking is not None:
            self._linking.cancel()
            with suppress(asyncio.CancelledError):
                await self._linking
        with suppress(OSError):
            await self.files.close()
        if self.store is not None:
            with suppress(KVStoreError):
                await self.run_put(self.store.close)
        self._quick.shutdown(wait=False)
        self._puts.shutdown(wait=False)
        self._pages.shutdown(wait=False)
        await self.upstream.close()
