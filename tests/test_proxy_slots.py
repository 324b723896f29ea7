"""The slot table: nobody else writes slot state, and what it says of a slot is true of a server that anybody may use."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from kvstore import slotfile
from kvstore.engines import proxy
from kvstore.engines.proxy.backend import Identity, SlotReport, Timings
from kvstore.engines.proxy.prompt import Prompt, parse
from kvstore.engines.proxy.rates import Rates
from kvstore.engines.proxy.slots import Listing, Slot, SlotTable

FIELDS = {f.name for f in fields(Slot)}
# Other records of the proxy that have fields of the same names.
OTHERS = {"self", "prompt", "recent", "lease.recent"}


def writes(tree: ast.AST) -> list[str]:
    """The assignments to a field of a Slot outside of SlotTable: whatever the name of the variable."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name == "SlotTable":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and node.attr in FIELDS:
            base = ast.unparse(node.value)
            if base not in OTHERS:
                found.append(f"line {node.lineno}: {base}.{node.attr}")
        if isinstance(node, ast.Name) and node.id in ("setattr", "delattr"):
            found.append(f"line {node.lineno}: {node.id}")
        if isinstance(node, ast.Attribute) and node.attr in ("__setattr__", "__dict__"):
            found.append(f"line {node.lineno}: {node.attr}")
        found += writes(node)
    return found


def test_only_the_table_assigns_fields_of_a_slot() -> None:
    for path in sorted(Path(proxy.__file__).parent.glob("*.py")):
        assert writes(ast.parse(path.read_text(encoding="utf-8"))) == [], path.name


@pytest.mark.parametrize("line", ["x.busy = True", "a.slot.tokens += b", "lease.slot.origin, y = 1, 2", "del s.entry",
                                  "for s.uses in z: pass", "setattr(s, n, 1)"])  # fmt: skip
def test_an_assignment_elsewhere_is_found(line: str) -> None:
    assert writes(ast.parse(f"class Cache:\n def f(self):\n  {line}")) != []


def test_only_the_backend_names_paths_of_llama_server() -> None:
    paths = re.compile(r"/(?:props|slots|tokenize|detokenize|apply-template|lora-adapters|v1/models|health)\b")
    for path in sorted(Path(proxy.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        named = {text for text in found if paths.match(text)}
        assert not named or path.name in ("llama_backend.py", "fingerprint.py"), (path.name, named)


# -- the table beside a server that anybody may use


@dataclass
class Real:
    """What a slot of the server really holds."""

    tokens: list[int] = field(default_factory=list)
    plain: bool = True
    partial: bool = False  # restored in part: the server continues from it
    task: int | None = None
    working: bool = False


class Run:
    """A table and a server, and events at random: ours, those of clients that pass, those of clients beside the proxy."""

    def __init__(self, seed: int, n_slots: int = 3) -> None:
        self.rng = random.Random(seed)
        self.table = SlotTable(Rates(), 4)
        self.real = [Real() for _ in range(n_slots)]
        self.tasks = 0
        self.leased: dict[int, int] = {}  # slot id: `tainted` at its lease, -1 for tainting
        self.passing: list[tuple[Any, int, bool]] = []
        self.listings: list[Listing] = []
        self.store: list[list[int]] = []
        form = slotfile.SlotFile(tokens=np.zeros(1, np.int32), state=np.zeros(1, np.uint8))
        self.identity = Identity("m", "f", n_slots, 1000, "m", form)
        self.identity.__dict__["crops"] = True
        self.kept = 0

    def words(self, n: int) -> list[int]:
        return [self.rng.randint(1, 2) for _ in range(n)]

    def text(self) -> list[int]:
        """Tokens that often begin as those of a slot or of the store."""
        known = self.rng.choice([r.tokens for r in self.real] + self.store + [[]])
        return known[: self.rng.randint(0, len(known))] + self.words(self.rng.randint(8, 30))

    def compute(self, real: Real, tokens: list[int], plain: bool) -> int:
        """The server computes a prompt in a slot; how many tokens it reused."""
        self.tasks += 1
        real.task = self.tasks
        cached = 0
        if real.plain == plain or real.partial:  # the server drops what other adapters computed
            cached = min(common(real.tokens, tokens), len(tokens) - 1)
        real.partial = real.partial and cached > 0
        real.tokens, real.plain = list(tokens), plain and not real.partial
        return cached

    def listing(self) -> Listing:
        reports = [SlotReport(i, r.task, len(r.tokens), r.working) for i, r in enumerate(self.real)]
        return Listing(reports, self.table.generation())

    def prompt(self, tokens: list[int]) -> Prompt:
        found = parse("/completion", json.dumps({"prompt": tokens}).encode())
        assert found is not None
        return found

    # -- events

    async def link(self) -> None:
        for context, _, _ in self.passing:
            context.__exit__(None, None, None)
        self.passing, self.listings, self.leased = [], [], {}
        self.real = [Real() for _ in self.real]
        await self.table.linked(len(self.real))

    async def lease(self) -> None:
        if self.table.quiet:
            self.table.listed(self.listing(), self.identity)
        free = [s for s in self.table.all if not s.busy]
        if not free:
            return
        slot, mark = self.rng.choice(free), -1 if self.table.tainting else self.table.tainted
        uses = slot.uses
        assert self.table.lease_now(slot)
        assert not self.table.lease_now(slot)
        assert slot.uses == uses + 1
        self.leased[slot.id] = mark
        if self.rng.random() < 0.3 and self.store:
            tokens = np.array(self.rng.choice(self.store), np.int32)
            self.table.restoring(slot)
            assert slot.needs_erase
            way = self.rng.random()
            if way < 0.9:
                # A state of which the server takes only a part may have lost what belongs to the rest.
                n = tokens.shape[0] if way < 0.7 else tokens.shape[0] // 2
                self.real[slot.id].tokens, self.real[slot.id].plain = tokens[:n].tolist(), way < 0.7
                self.real[slot.id].partial = way >= 0.7
                self.table.restored(slot, tokens, n, 1)
        if slot.needs_erase:
            self.real[slot.id].tokens, self.real[slot.id].plain = [], True
            self.real[slot.id].partial = False
            self.table.erased(slot)

    async def answer(self) -> None:
        if not self.leased:
            return
        id = self.rng.choice(list(self.leased))
        mark = self.leased.pop(id)
        slot, real, tokens, table = self.table.all[id], self.real[id], self.text(), self.table
        prompt, end = self.prompt(tokens), self.rng.random()
        overlapped = bool(table.tainting) or table.tainted != mark
        cached = self.compute(real, tokens, True)
        if end < 0.7:
            generated = self.rng.randint(1, 5)
            real.tokens += self.words(generated - 1)
            in_store = max((common(s, tokens) for s in self.store), default=0)
            timings = Timings(cached, len(tokens) - cached, 1.0, generated)
            table.answered(slot, prompt, timings, self.identity, in_store=in_store, overlapped=overlapped)
        elif end < 0.9:
            real.tokens = real.tokens[: self.rng.randint(cached, len(tokens))]
            table.aborted(slot, prompt, keeps=not overlapped)
        else:
            table.invalidated(slot)
        table.ended(slot)
        table.listed(self.listing(), self.identity, slot)
        await table.released(slot)

    async def save(self) -> None:
        free = [s for s in self.table.all if not s.busy and s.origin is not None]
        if not free:
            return
        slot, table = self.rng.choice(free), self.table
        assert table.lease_now(slot)
        table.listed(self.listing(), self.identity, slot)
        origin, n_prompt = slot.origin, slot.n_prompt
        if origin is None or slot.unfit:
            table.save_declined(slot)
        elif (way := self.rng.random()) < 0.1:
            table.save_failed(slot)
        elif way < 0.2:
            table.save_started(slot)
            table.save_cancelled(slot, origin, n_prompt)
        elif not self.passing:
            self.kept += 1
            table.save_started(slot)
            tokens = np.array(self.real[slot.id].tokens, np.int32)
            assert self.real[slot.id].plain
            if tokens.shape[0] < table.min_gain:
                table.saved(slot, tokens, putting=False)
                await table.released(slot)
                return
            table.saved(slot, tokens, putting=True)
            self.store.append(tokens.tolist())
            if self.rng.random() < 0.8:
                table.stored(slot, tokens, 7)
                assert slot.entry == 7
            else:
                table.put_failed(slot, tokens)
                assert (slot.stored, slot.entry) == (0, None)
                assert table.save_again(slot, tokens, origin)
            table.put_ended(slot)
            assert slot.putting == 0
        await table.released(slot)

    async def begin_pass(self) -> None:
        taints = self.rng.random() < 0.4
        context = self.table.passing(taints=taints)
        context.__enter__()
        id = self.rng.randrange(len(self.real))
        self.passing.append((context, id, taints))
        self.compute(self.real[id], self.text(), not taints)

    async def end_pass(self) -> None:
        if self.passing:
            self.passing.pop(self.rng.randrange(len(self.passing)))[0].__exit__(None, None, None)

    async def meddle(self) -> None:
        id = self.rng.randrange(len(self.real))
        with self.table.passing(slot_id=id):
            self.real[id].tokens, self.real[id].plain = self.words(9), False
        assert self.table.all[id].n_total == 0

    async def beside(self) -> None:
        """A client that does not use the proxy; the server chooses an idle slot."""
        free = [s for s in self.table.all if not s.busy]
        if free:
            slot = self.rng.choice(free)
            self.compute(self.real[slot.id], self.text() + self.words(slot.n_total + 3), self.rng.random() < 0.7)

    async def ask(self) -> None:
        self.listings.append(self.listing())

    async def late(self) -> None:
        """A list arrives that was asked for a while ago."""
        if not self.listings:
            return
        listing = self.listings.pop(self.rng.randrange(len(self.listings)))
        before = {s.id: (s.tokens, s.n_total, s.stored, s.unfit, s.last_listing) for s in self.table.all}
        passes = (self.table.unleased_requests, self.table.passes)
        self.table.listed(listing, self.identity)
        for s in self.table.all:
            if passes != listing.generation.passes or s.uses != listing.generation.uses.get(s.id):
                after = (s.tokens, s.n_total, s.stored, s.unfit, s.last_listing)
                assert all(a is b or a == b for a, b in zip(after, before[s.id], strict=True))

    async def sleep(self) -> None:
        generation = self.table.generation()
        if self.leased or self.passing:
            return
        changed = self.rng.random() < 0.3
        if changed:
            await self.lease()
        else:
            for real in self.real:
                real.tokens, real.plain, real.partial, real.task = [], True, False, None
            self.listings.clear()
        kept = [s.n_total for s in self.table.all]
        self.table.slept(generation)
        assert [s.n_total for s in self.table.all] == (kept if changed else [0] * len(kept))

    # -- what holds

    def check(self) -> None:
        for slot in self.table.all:
            assert slot.busy == (slot.id in self.leased)
            assert slot.n_total >= slot.tokens.shape[0]
            assert 0 <= slot.stored <= slot.n_total
            assert slot.origin is None or not slot.unfit
            if slot.entry is not None:
                assert slot.stored
        if self.passing:
            return
        self.table.listed(self.listing(), self.identity)
        for slot, real in zip(self.table.all, self.real, strict=True):
            if slot.busy:
                continue
            known = slot.tokens.tolist()
            assert real.tokens[: len(known)] == known
            assert slot.unfit or real.plain
            assert not slot.stored or max(common(s, real.tokens) for s in self.store) >= slot.stored
            assert slot.unfit or slot.origin is None or slot.cut or abs(len(real.tokens) - slot.n_total) <= 2


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(40))
def test_what_the_table_says_is_true_of_the_server(seed: int) -> None:
    async def run() -> int:
        world = Run(seed)
        await world.link()
        events = [world.lease, world.lease, world.answer, world.answer, world.save, world.save, world.begin_pass,
                  world.end_pass, world.end_pass, world.end_pass, world.beside, world.ask, world.late]  # fmt: skip
        rare = [world.meddle, world.sleep, world.link]
        for _ in range(500):
            await world.rng.choice(rare if world.rng.random() < 0.05 else events)()
            if world.rng.random() < 0.5:
                world.check()
        return world.kept

    assert asyncio.run(run()) > 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_overlapped_answer_that_reused_tokens_is_not_kept(overlapped: bool) -> None:
    async def run() -> None:
        world = Run(0)
        await world.link()
        slot, tokens = world.table.all[0], world.words(20)
        world.table.restored(slot, np.array(tokens, np.int32), 20, 1)
        longer = world.prompt([*tokens, 1, 2, 1])
        timings = Timings(20, 3, 1.0, 1)
        world.table.answered(slot, longer, timings, world.identity, in_store=20, overlapped=overlapped)
        assert (slot.origin is longer, slot.unfit, slot.n_total) == (not overlapped, overlapped, 0 if overlapped else 23)
        # Nothing was reused: nothing of another request can be in it.
        world.table.answered(slot, longer, Timings(0, 23, 1.0, 1), world.identity, in_store=0, overlapped=overlapped)
        assert (slot.origin, slot.unfit) == (longer, False)

    asyncio.run(run())
