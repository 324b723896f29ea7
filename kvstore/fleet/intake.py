"""Puts what was fetched into the local store, behind; fetches new learned prefixes before anyone asks for them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ..errors import KVStoreError
from .client import BadObjectError, Fetched, FleetClient, MissingObjectError
from .contents import PublishedState
from .index import Indexed
from .object_store import GoneError

log = logging.getLogger("kvstore.fleet")
PREFETCH_WAIT = 60.0  # at most, so that not all machines fetch at once


class Keeper(Protocol):
    def keep(self, state: PublishedState) -> int | None:
        """Puts a fetched state; its id in the store, or None where it was not put."""


class Intake:
    def __init__(
        self, client: FleetClient, local: Keeper, work: Callable[[int], None], kept: Callable[[int], None], *, active: bool
    ) -> None:
        """kept: is told the id of each entry that was put."""
        self._client, self._local, self._work, self._kept = client, local, work, kept
        self._active = active
        self._prefetched = 0
        self._executor = ThreadPoolExecutor(1, "kvstore-fleet-keep")

    def keep(self, fetched: Fetched) -> None:
        """Queues the put of a state, and of its parent."""
        if not self._active:
            return
        self._work(1)

        def run() -> None:
            try:
                self.put(fetched)
            except KVStoreError as error:
                log.warning("a fetched state was not kept: %s", error.message)
            except Exception:
                log.warning("a fetched state was not kept", exc_info=True)
            finally:
                self._work(-1)

        try:
            self._executor.submit(run)
        except RuntimeError:  # closing
            self._work(-1)

    def put(self, fetched: Fetched) -> None:
        for each in (fetched.parent, (fetched.found, fetched.state)):
            if each is None:
                continue
            found, state = each
            id = self._local.keep(state)
            if id is not None:
                index = self._client.index
                index.set_local_entry(index.names_of(found.name), found.name.state, id)
                self._kept(id)

    def is_here(self, found: Indexed) -> bool:
        return self._client.is_here(found.name, found.name.state)

    async def pull(self, found: Indexed) -> Fetched | None:
        """Fetches an object; None where it must not be served, or is gone. Raises RemoteError."""
        try:
            return await self._client.fetch(found)
        except BadObjectError as error:
            self._client.refused(error)
        except MissingObjectError as error:
            self._client.index.forget(error.found)
        except GoneError:
            log.info("%s: its parent is gone", found.path)
        return None

    async def prefetch(self, new: list[Indexed]) -> None:
        """Fetches new learned objects, the youngest first, up to `prefetch_gib` in all."""
        options = self._client.options
        wanted = [each for each in new if each.name.entry_class == "learned" and not each.name.is_delta]
        for found in sorted(wanted, key=lambda each: -each.modified):
            if self._prefetched + found.size > options.prefetch_bytes:
                return
            await asyncio.sleep(random.random() * min(PREFETCH_WAIT, 2 * options.poll_seconds))
            if self._client.breaker.open or self.is_here(found):
                continue
            try:
                fetched = await self.pull(found)
            except KVStoreError as error:
                self._client.failed(error)
                continue
            if fetched is not None:
                self._prefetched += found.size
                self.keep(fetched)

    def close(self) -> None:
        self._executor.shutdown(wait=True)
