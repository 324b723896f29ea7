"""The shared tier's part of a request: fetches what the fleet has more of than this machine, where that pays."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ... import slotfile
from ...store import Store
from ...types import Bytes, RemoteMatch, Tokens
from .backend_link import BackendLink
from .slots import SlotTable

if TYPE_CHECKING:
    from ...fleet.remote import Remote

log = logging.getLogger("kvstore.proxy")
AT_ONCE = 8  # requests that wait for fetches; the shared tier itself makes two at a time
AGAIN_SECONDS = 600.0  # until an object is fetched again that the server did not take, or the store did not keep
MAX_REMEMBERED = 4096


class FleetLookup:
    """Looks into the index of the fleet for each request, and fetches. Without a remote it does nothing."""

    def __init__(self, link: BackendLink, slots: SlotTable) -> None:
        self._link, self._slots = link, slots
        self._fetched: dict[str, float] = {}
        self._executor: ThreadPoolExecutor | None = None

    async def fetch(self, tokens: Tokens | None, n_local: int) -> slotfile.SlotFile | None:
        """The state of more leading tokens than n_local, and than any free slot has; None where there is none in time."""
        link = self._link
        store, identity = link.store, link.identity
        if store is None or store.remote is None or identity is None or tokens is None:
            return None
        if not link.reuses or tokens.size < link.options.min_tokens:
            return None
        remote = store.remote
        rate = 1 / max(1e-9, self._slots.rates.prefill_seconds(1))
        remote.prefill_rate = None if self._slots.rates.prefill is None else rate
        held = (slot.holds(tokens) for slot in self._slots.all if not slot.busy)
        match = await link.run(store.remote_match, tokens, max(n_local, *held, 0))
        if match is None or self._was_fetched(match) or 0 < identity.n_ctx <= match.n_common:
            return None
        decision = remote.decide(match, rate)
        if decision is None:
            return None
        started = time.perf_counter()
        found = await self._fetch(store, remote, match, decision.deadline)
        if found is None:
            return None
        remote.saved(match.n_saved / rate - (time.perf_counter() - started))
        tokens, state = found
        if 0 < identity.n_ctx <= tokens.size:
            return None
        return identity.slot_file(tokens, state)

    async def _fetch(self, store: Store, remote: Remote, match: RemoteMatch, deadline: float) -> tuple[Tokens, Bytes] | None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(AT_ONCE, "kvstore-proxy-fleet")

        def fetch() -> tuple[Tokens, Bytes] | None:
            saved = store.fetch(match, deadline, longest=True)
            return None if saved is None else (saved.tokens, saved.main)

        found = await asyncio.get_running_loop().run_in_executor(self._executor, fetch)
        if found is not None:
            self._fetched[match.path] = time.monotonic()
            log.info("fetched %d tokens from the fleet", len(found[0]))
        return found

    def _was_fetched(self, match: RemoteMatch) -> bool:
        now = time.monotonic()
        if len(self._fetched) > MAX_REMEMBERED:
            self._fetched.clear()
        return now - self._fetched.get(match.path, -AGAIN_SECONDS) < AGAIN_SECONDS
