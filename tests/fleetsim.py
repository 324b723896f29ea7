"""A fleet in one process: machines with a skewed clock each, an index each, one store in memory, and time that is only counted.

The code of the machines is the real one (`FleetClient`, `RemoteIndex`), and so is obstore's memory store. Only the clock of the
object store is virtual: times of objects are noted when they are written. Once an hour what is past its lifetime is deleted,
as a lifecycle rule does.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import storekit
from fleetkit import FINGERPRINT, KEY

from kvstore.errors import RemoteError
from kvstore.fleet.client import BadObjectError, FleetClient, MissingObjectError
from kvstore.fleet.contents import PublishedState
from kvstore.fleet.index import Listed, RemoteIndex
from kvstore.fleet.names import Names, ObjectName, parse_path
from kvstore.fleet.object_store import GoneError, ObjectStore
from kvstore.fleet.options import RemoteOptions
from kvstore.storage.remote_file import RemoteFile
from kvstore.store.fleet_link import published
from kvstore.types import Entry, SavedState, Tokens

HOUR, DAY = 3600.0, 86400.0
START = 1_796_256_000.0  # a midnight
PREFIX_TOKENS, CHAT_TOKENS = 130, 70
_numbers = itertools.count()


@dataclass
class Report:
    """What happened, and what must not."""

    clients: int
    days: float
    lookups: int = 0
    hits: int = 0
    fetched: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    wrong: int = 0
    orphans: int = 0
    failures: int = 0
    most_objects: int = 0
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def requests_per_client_hour(self) -> float:
        return sum(self.requests.values()) / (self.clients * self.days * 24)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {n:,}" for name, n in sorted(self.requests.items()))
        return (
            f"{self.clients:,} clients, {self.days:g} days: {self.lookups:,} lookups, {self.hits:,} hits, "
            f"{self.fetched:,} fetches, {self.published:,} published of which {self.duplicates} twice, "
            f"{self.requests_per_client_hour:.3f} requests a client-hour ({each}), at most {self.most_objects:,} objects, "
            f"{self.failures:,} requests that failed, {self.refused} refused, {self.orphans} orphans, {self.wrong} wrong states"
        )


class VirtualStore:
    """The memory store with a clock of its own, and requests that fail now and then."""

    def __init__(self, report: Report, chance: random.Random, faults: float) -> None:
        self.url = f"memory://simulation-{next(_numbers)}"
        self.inner = ObjectStore(self.url)
        self.now = START
        self.written: dict[str, float] = {}
        self._report, self._chance, self._faults = report, chance, faults

    def _request(self, name: str) -> None:
        self._report.requests[name] += 1
        if self._chance.random() < self._faults:
            self._report.failures += 1
            raise RemoteError("the object store failed")

    async def pages(self, prefix: str, offset: str | None = None) -> AsyncIterator[list[Listed]]:
        self._request("LIST")
        async for page in self.inner.pages(prefix, offset):
            yield [Listed(item.path, item.size, int(self.written[item.path])) for item in page]

    async def folders(self, prefix: str) -> list[str]:
        self._request("LIST")
        return await self.inner.folders(prefix)

    async def get_range(self, path: str, start: int, length: int) -> Any:
        self._request("GET")
        return await self.inner.get_range(path, start, length)

    async def put(self, path: str, size: int, pieces: Iterator[Any]) -> None:
        self._request("PUT")
        await self.inner.put(path, size, pieces)
        self.written[path] = self.now

    async def copy(self, source: str, target: str) -> None:
        self._request("COPY")
        await self.inner.copy(source, target)
        self.written[target] = self.now

    async def delete_expired(self, lifetime: float) -> None:
        gone = [path for path, at in self.written.items() if self.now - at > lifetime]
        if gone:
            await self.inner.delete(gone)
        for path in gone:
            del self.written[path]


class Truth:
    """The prompts of the fleet and the states that an engine computes for them."""

    def __init__(self, prefixes: int) -> None:
        self.prefixes = prefixes
        self._states: dict[tuple[int, int], PublishedState] = {}

    def tokens(self, prefix: int, chat: int) -> Tokens:
        first = np.arange(PREFIX_TOKENS, dtype=np.int32) + 1000 * prefix
        if not chat:
            return first
        return np.concatenate([first, np.arange(CHAT_TOKENS, dtype=np.int32) + 10_000_000 + 1000 * chat])

    def state(self, prefix: int, chat: int) -> PublishedState:
        key = (prefix, chat)
        if key not in self._states:
            values = self.tokens(prefix, chat)
            main = np.frombuffer(storekit.state(values.tolist(), row=16, layers=1), np.uint8)
            entry = Entry(
                id=1, n_tokens=len(values), n_images=0, entry_class="normal" if chat else "learned", source="default",
                created_at=0, last_used=0, expires_at=None, ttl=None, hits=0, family=prefix, n_input=len(values), excerpt="",
                parent=None, size=main.size, stored=main.size,
            )  # fmt: skip
            self._states[key] = published(SavedState(entry, values, main, None), FINGERPRINT, None)
        return self._states[key]


class Machine:
    """One machine: what it holds, and its client."""

    def __init__(self, number: int, store: VirtualStore, truth: Truth, chance: random.Random, lifetime: float) -> None:
        self._number = number
        self._store, self._truth, self._chance = store, truth, chance
        self._lifetime = lifetime
        self.skew = chance.uniform(-600, 600)
        self.held: dict[int, PublishedState] = {}
        self.has: set[tuple[int, int]] = set()
        self._ids = itertools.count(1)
        self.start()

    def start(self) -> None:
        """A new machine, or one that lost its disk."""
        self.held.clear()
        self.has.clear()
        options = RemoteOptions(self._store.url, (KEY,), lifetime_days=self._lifetime / DAY)
        index = RemoteIndex(RemoteFile(":memory:"), [Names(KEY, FINGERPRINT)])
        self.client = FleetClient(
            self._store, index, self, options, clock=lambda: self._store.now + self.skew, chance=self._chance.random
        )

    def read(self, id: int) -> PublishedState | None:
        return self.held.get(id)

    def exists(self, id: int) -> bool:
        return id in self.held

    def hold(self, key: tuple[int, int], state: PublishedState) -> int:
        id = next(self._ids)
        self.held[id] = state
        self.has.add(key)
        return id


class Simulation:
    def __init__(
        self, clients: int, days: float, *, requests_a_day: float, prefixes: int, lifetime_days: float, faults: float,
        chats: float, seed: int,
    ) -> None:  # fmt: skip
        self._chance = random.Random(seed)
        self.report = Report(clients, days)
        self._store = VirtualStore(self.report, self._chance, faults)
        self._truth = Truth(prefixes)
        self._lifetime = lifetime_days * DAY
        self._gap = DAY / requests_a_day
        self._machines = [Machine(n, self._store, self._truth, self._chance, self._lifetime) for n in range(clients)]
        self._chats = itertools.count(1)
        self._chat_share = chats
        self._recent: list[tuple[int, int]] = []

    async def run(self) -> Report:
        end = START + self.report.days * DAY
        events = [(START + self._chance.expovariate(1 / self._gap), n) for n in range(len(self._machines))]
        heapq.heapify(events)
        next_hour = START + HOUR
        while events and events[0][0] < end:
            at, n = heapq.heappop(events)
            while at >= next_hour:
                self._store.now = next_hour
                await self._hour()
                next_hour += HOUR
            self._store.now = at
            machine = self._machines[n]
            if self._chance.random() < self._gap / (3 * DAY):
                machine.client.index.file.close()
                machine.start()
            try:
                await self._request(machine)
            except RemoteError as error:
                machine.client.failed(error)
            heapq.heappush(events, (at + self._chance.expovariate(1 / self._gap), n))
        return self.report

    async def _hour(self) -> None:
        """The lifecycle rule, and a count of deltas that lost their parent before half their lifetime."""
        await self._store.delete_expired(self._lifetime)
        names = {path: name for path in self._store.written if (name := parse_path(path)) is not None}
        self.report.most_objects = max(self.report.most_objects, len(names))
        whole = {name.state for name in names.values() if not name.is_delta}
        for path, name in names.items():
            young = self._store.now - self._store.written[path] < self._lifetime / 2
            self.report.orphans += name.is_delta and young and name.parent not in whole

    def _prompt(self) -> tuple[int, int]:
        """A prefix, the first ones most often; sometimes with a chat, which may be one that another machine began."""
        if self._recent and self._chance.random() < 0.1:
            return self._chance.choice(self._recent)
        prefix = min(self._truth.prefixes - 1, int(self._chance.paretovariate(0.7)) - 1)
        if self._chance.random() < self._chat_share:
            chat = (prefix, next(self._chats))
            self._recent = [*self._recent[-20:], chat]
            return chat
        return prefix, 0

    async def _request(self, machine: Machine) -> None:
        prefix, chat = self._prompt()
        client = machine.client
        if (prefix, chat) in machine.has:
            return
        self.report.lookups += 1
        n_local = PREFIX_TOKENS if chat and (prefix, 0) in machine.has else 0
        if client.breaker.open:
            return
        if not client.polled_at:
            await client.poll()
        request = self._truth.tokens(prefix, chat)
        await self._fetch(machine, request, n_local, prefix, chat)
        if (prefix, chat) not in machine.has:
            if machine.client._clock() - client.polled_at >= 30:
                await client.poll()
            await self._compute(machine, prefix, chat)
        client.succeeded()

    async def _fetch(self, machine: Machine, request: Tokens, n_local: int, prefix: int, chat: int) -> None:
        client = machine.client
        names = client.names
        for each in list(client.index.candidates([(names, names.chain(request))], n_local)):
            self.report.hits += 1
            try:
                fetched = await client.fetch(each.found)
            except BadObjectError:
                self.report.refused += 1
                continue
            except MissingObjectError as error:
                client.index.forget(error.found)
                continue
            except GoneError:
                continue
            self.report.fetched += 1
            for found, state in [(fetched.found, fetched.state), *([fetched.parent] if fetched.parent else [])]:
                self._keep(machine, found.name, state)
            if not np.array_equal(fetched.state.tokens[: each.n_common], request[: each.n_common]):
                self.report.wrong += 1
            await client.used(fetched)
            return

    def _keep(self, machine: Machine, name: ObjectName, state: PublishedState) -> None:
        prefix = int(state.tokens[0]) // 1000
        chat = 0 if len(state.tokens) == PREFIX_TOKENS else (int(state.tokens[PREFIX_TOKENS]) - 10_000_000) // 1000
        want = self._truth.state(prefix, chat)
        if state.main.tobytes() != want.main.tobytes() or not np.array_equal(state.tokens, want.tokens):
            self.report.wrong += 1
        id = machine.hold((prefix, chat), state)
        machine.client.index.set_local_entry(machine.client.names, name.state, id)

    async def _compute(self, machine: Machine, prefix: int, chat: int) -> None:
        """The machine computes the prompt itself, and publishes it."""
        for each in ([(prefix, 0)] if chat and (prefix, 0) not in machine.has else []) + [(prefix, chat)]:
            state = self._truth.state(*each)
            id = machine.hold(each, state)
            await machine.client.poll()
            before = machine.client.counters["published"]
            there = self._known(state)
            await machine.client.publish(state, cuttable=True, id=id)
            if machine.client.counters["published"] > before:
                self.report.published += 1
                self.report.duplicates += there

    def _known(self, state: PublishedState) -> bool:
        names = self._machines[0].client.names
        whole = names.chain(state.tokens).whole(names.hasher, len(state.tokens))
        return any(f"-{whole}-" in path for path in self._store.written)


def simulate(
    clients: int,
    days: float,
    *,
    requests_a_day: float = 4,
    prefixes: int = 60,
    lifetime_days: float = 2,
    faults: float = 0.003,
    chats: float = 0.15,
    seed: int = 1,
) -> Report:
    simulation = Simulation(
        clients, days, requests_a_day=requests_a_day, prefixes=prefixes, lifetime_days=lifetime_days, faults=faults,
        chats=chats, seed=seed,
    )  # fmt: skip
    return asyncio.run(simulation.run())
