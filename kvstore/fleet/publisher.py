"""Publishes entries behind the puts: a queue of a few, one upload at a time, and what was learned while nobody listened."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ..errors import KVStoreError
from ..types import Entry, Tokens
from .client import FleetClient
from .contents import PublishedState
from .index import Indexed
from .names import MIN_TOKENS
from .uploads import UploadQueue, Waiting

log = logging.getLogger("kvstore.fleet")
TICK_SECONDS = 1.0
UPLOAD_TRIES = 3


class Published(Protocol):
    """What is read of the store beside the remote. All calls block, and are made by threads of the remote."""

    def read(self, id: int) -> PublishedState | None: ...
    def tokens(self, id: int) -> Tokens | None:
        """The tokens of an entry; None where there is none."""

    def cuttable(self, state: PublishedState) -> bool:
        """Whether the states can be cut at any token."""

    def base(self, id: int) -> int | None:
        """The nearest learned entry that an entry is stored against, through any number of deltas."""

    def kept_classes(self) -> list[Entry]:
        """The learned and pinned entries."""


class Publisher:
    def __init__(self, client: FleetClient, local: Published, work: Callable[[int], None], *, active: bool) -> None:
        """work: counts uploads under way. active: whether anything is published without being asked."""
        self._client, self._local, self._work = client, local, work
        self._options = client.options
        self._active = active
        self._rescan = active and self._options.publish != "none"
        self.queue = UploadQueue()
        self.offered: asyncio.Event | None = None
        self.checked: set[int] = set()  # entries that are known to be published, or not to be published
        self.prefill_rate: float | None = None

    def offer(self, entry: Entry) -> bool:
        """Queues an entry to be published, where it is of those that are; whether it is. Never waits."""
        publish = self._options.publish
        wanted = publish == "all" or (publish == "learned" and entry.entry_class != "normal")
        if not wanted or not self._active or entry.n_tokens < MIN_TOKENS or entry.n_images:
            return False
        self.queue.add(Waiting(entry.id, entry.n_tokens, entry.entry_class))
        return True

    async def run(self) -> None:
        assert self.offered is not None
        while True:
            self._work(1)
            try:
                await self._next()
            finally:
                self._work(-1)
            if not self.queue or self._client.breaker.open:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.offered.wait(), TICK_SECONDS)
                self.offered.clear()

    async def _next(self) -> None:
        if self._client.breaker.open or not self._active:
            return
        if self._rescan:
            self._rescan = False
            await self._find_unpublished()
        waiting = self.queue.take()
        if waiting is not None:
            await self._upload(waiting)

    async def _upload(self, waiting: Waiting) -> None:
        try:
            await self._client.poll()
            await self.publish(waiting)
            self._client.succeeded()
        except KVStoreError as error:
            self._client.failed(error)
            if waiting.tries + 1 < UPLOAD_TRIES:
                self.queue.add(waiting.again())
            await asyncio.sleep(0.2 * (1 + random.random()))
        except Exception:
            log.warning("an entry was not published", exc_info=True)

    async def push(self, id: int) -> Indexed | None:
        await self._client.poll()
        return await self.publish(Waiting(id, 0, "pinned"))

    async def publish(self, waiting: Waiting) -> Indexed | None:
        """Publishes an entry, after the learned prefix that it would travel as a delta against."""
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(None, self._local.tokens, waiting.id)
        if tokens is None or len(tokens) < MIN_TOKENS:
            return None
        self.checked.add(waiting.id)
        if waiting.entry_class == "normal" and not self._pays(len(tokens)):
            return None
        chain = await self._client.chain(tokens)
        known = await self._client.published(chain)
        if known is not None:
            return known
        base = await loop.run_in_executor(None, self._local.base, waiting.id)
        if base is not None and base not in self.checked:
            await self.publish(Waiting(base, 0, "learned"))
        state = await loop.run_in_executor(None, self._local.read, waiting.id)
        if state is None:
            return None
        cuttable = await loop.run_in_executor(None, self._local.cuttable, state)
        return await self._client.publish(state, cuttable=cuttable, id=waiting.id, chain=chain)

    def _pays(self, n_tokens: int) -> bool:
        """Whether others would compute a chat for longer than they fetch it, where the speed of computing is known."""
        if not self.prefill_rate:
            return True
        return n_tokens / self.prefill_rate > self._client.link.latency

    async def _find_unpublished(self) -> None:
        """Queues what was learned by another process, or while the object store was down."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.run_in_executor(None, self._local.kept_classes)
        except KVStoreError as error:
            log.info("the learned entries were not read: %s", error.message)
            return
        recent = time.time() - self._options.lifetime / 2
        for entry in sorted(entries, key=lambda e: e.n_tokens):
            if entry.id not in self.checked and entry.last_used >= recent and entry.n_tokens >= MIN_TOKENS:
                self.queue.add_later(Waiting(entry.id, entry.n_tokens, entry.entry_class))

    def look_again(self) -> None:
        """Looks soon for entries that are not published: after a listing of all names."""
        self.checked.clear()
        self._rescan = self._active and self._options.publish != "none"
