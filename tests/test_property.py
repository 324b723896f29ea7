"""Random operations on a store, beside a model of its rules that is a plain dict."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from storekit import connect, noise, recurrent_state, state

from kvstore import LayoutError, NotFoundError, Store, layout
from kvstore.storage.queries import signed, unsigned

Tokens = tuple[int, ...]
FORMS = ["any", "any", "any", "none", "cuts"]


@dataclass
class Known:
    """An entry as the model has it. `cuts` is None where its state can be cut anywhere."""

    id: int
    tokens: Tokens
    main: bytes
    draft: bytes | None
    cuts: tuple[int, ...] | None
    entry_class: str
    source: str
    expires_at: int | None
    hits: int = 0

    def serves(self, n: int) -> bool:
        return n == len(self.tokens) or self.cuts is None or n in self.cuts


def prefix_of(a: Tokens, b: Tokens) -> bool:
    return len(a) < len(b) and b[: len(a)] == a


def common(a: Tokens, b: Tokens) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# Long common starts, so that there is something to share and to contain.
BASES = [tuple(range(100 * k, 100 * k + 40)) for k in (1, 2)]
sequences = st.builds(
    lambda base, n, tail: (*base[:n], *tail),
    st.sampled_from(BASES), st.sampled_from([10, 20, 30, 40]), st.lists(st.integers(-1, 2), max_size=3).map(tuple),
)  # fmt: skip


class StoreMachine(RuleBasedStateMachine):
    """`model` has what the store must hold, by id; entries whose going is the store's choice are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.ahead = 0
        self.base = int(time.time())
        self.patch.setattr(time, "time", lambda: float(self.base + self.ahead))
        self.model: dict[int, Known] = {}
        self.versions = 0

    @initialize(ram=st.sampled_from([0, 0.01, 64]), behind=st.booleans())
    def start(self, ram: float, behind: bool) -> None:
        self.options: dict[str, Any] = {
            "cache_ram_mib": ram, "write_behind": behind, "min_saved_mib": 0.0005, "fingerprint": "m",
        }  # fmt: skip
        self.open()

    def open(self) -> None:
        self.store = Store(Path(self.folder.name) / "kv", **self.options)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.patch.undo()
        self.folder.cleanup()

    # -- the model's side

    def now(self) -> int:
        return self.base + self.ahead

    def live(self) -> dict[int, Known]:
        return {id: e for id, e in self.model.items() if e.expires_at is None or e.expires_at > self.now()}

    def pick(self, data: Any) -> Known | None:
        return data.draw(st.sampled_from(sorted(self.model.values(), key=lambda e: e.tokens))) if self.model else None

    def form(self, tokens: Tokens, form: str, version: int) -> tuple[bytes, tuple[int, ...] | None]:
        if form == "any":
            return state(tokens, row=32, model=version), None
        if form == "none":
            return noise(hash((tokens, version)) & 0xFFFF, 900), ()
        counts = tuple(n for n in (10, 20, 30) if n < len(tokens))
        return recurrent_state(len(tokens), counts), counts

    def connect(self) -> apsw.Connection:
        return connect(Path(self.folder.name) / "kv")

    def n_tokens(self, id: int) -> int:
        with closing(self.connect()) as c:
            return int(c.execute("SELECT n_tokens FROM entries WHERE id = ?", (signed(id),)).get)

    def below(self, id: int) -> set[int]:
        """The entries that are stored against one, at any depth."""
        sql = """WITH RECURSIVE d(id) AS (SELECT entry FROM meta WHERE parent = ?1
 UNION SELECT m.entry FROM d JOIN meta m ON m.parent = d.id)
 SELECT m.entry FROM d JOIN meta m ON m.entry = d.id WHERE m.base = 0"""
        with closing(self.connect()) as c:
            return {unsigned(row[0]) for row in c.execute(sql, (signed(id),))}

    def drop(self, removed: list[int]) -> None:
        for id in removed:
            self.model.pop(id, None)

    # -- rules

    @rule(
        tokens=sequences, form=st.sampled_from(FORMS), version=st.integers(0, 1), draft=st.sampled_from([False, False, True]),
        entry_class=st.sampled_from(["normal", "normal", "normal", "learned", "pinned"]),
        ttl=st.sampled_from([None, None, None, 5]), share=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def put(self, tokens: Tokens, form: str, version: int, draft: bool, entry_class: str, ttl: int | None, share: bool) -> None:
        main, cuts = self.form(tokens, form, version)
        second = state(tokens, row=16, model=7) if draft else None
        source = "default" if entry_class == "normal" else "request"
        given = self.store.put(
            tokens, main, draft=second, entry_class=entry_class, source=source, ttl=ttl, share=share  # type: ignore[arg-type]
        )  # fmt: skip
        self.store.flush()
        expires = None if ttl is None else self.now() + ttl
        new = Known(given.id, tokens, main, second, cuts, entry_class, source, expires)
        for old in [e for e in self.model.values() if e.tokens == tokens]:
            if new.entry_class == "normal" and new.source == "default" and old.id in self.live():
                new.entry_class, new.source = old.entry_class, old.source
            if old.id == given.id:
                assert (old.main, old.draft) == (main, second)
                new.hits = old.hits
            del self.model[old.id]
        assert given.id not in self.model
        self.model[given.id] = new
        entry = self.store.entry(given.id)
        assert entry is not None
        assert (entry.n_tokens, entry.size) == (len(tokens), len(main) + len(second or b""))
        if entry.parent in self.model:
            assert prefix_of(self.model[entry.parent].tokens, tokens)
        if entry.parent is not None:
            assert self.n_tokens(entry.parent) < len(tokens)
        here = {e.id for e in self.store.entries()}
        for old in list(self.live().values()):
            if old.id not in here:
                # Only what the new entry serves may have gone.
                assert old.entry_class == "normal"
                assert prefix_of(old.tokens, tokens)
                assert new.serves(len(old.tokens))
                assert old.draft is None or second is not None
                del self.model[old.id]

    @rule(data=st.data(), n=st.sampled_from([None, None, 10, 20, 25]))
    def get(self, data: Any, n: int | None) -> None:
        known = self.pick(data)
        if known is None:
            return
        alive = known.id in self.live()
        if n is not None and n < len(known.tokens):
            if not alive:
                assert self.store.get(known.id, n_tokens=n) is None
                return
            known.hits += 1
            if known.serves(n) and (known.draft is None or known.cuts is None):
                saved = self.store.get(known.id, n_tokens=n)
                assert saved is not None
                assert saved.main.tobytes() == layout.crop(known.main, n).tobytes()
                assert tuple(saved.tokens.tolist()) == known.tokens[:n]
            else:
                try:
                    saved = self.store.get(known.id, n_tokens=n)
                    assert known.serves(n)
                except LayoutError:
                    assert not known.serves(n) or known.draft is not None
            return
        saved = self.store.get(known.id)
        if not alive:
            assert saved is None
            return
        known.hits += 1
        assert saved is not None
        assert saved.main.tobytes() == known.main
        assert (None if saved.draft is None else saved.draft.tobytes()) == known.draft
        assert tuple(saved.tokens.tolist()) == known.tokens
        assert saved.entry.entry_class == known.entry_class

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        known = self.pick(data)
        if known is None:
            return
        self.store.flush()
        kids = self.below(known.id)
        saved = self.store.take(known.id)
        if known.id not in self.live():
            assert saved is None
            return
        assert saved is not None
        assert saved.main.tobytes() == known.main
        if known.entry_class == "normal":
            here = {e.id for e in self.store.entries()}
            assert known.id not in here
            del self.model[known.id]
            self.drop([k for k in kids if k not in here])
        else:
            known.hits += 1

    @rule(tokens=sequences)
    def match(self, tokens: Tokens) -> None:
        best = 0
        for known in self.live().values():
            n = common(known.tokens, tokens)
            best = max(best, n if known.serves(n) else max((c for c in known.cuts or () if c <= n), default=0))
        found = self.store.match(tokens)
        assert (0 if found is None else found.n_common) == best
        if found is not None:
            known = self.live()[found.entry.id]
            assert common(known.tokens, tokens) >= best
            assert known.serves(best)

    @rule(data=st.data(), children=st.sampled_from(["resident", "keep", "drop"]))
    def delete(self, data: Any, children: str) -> None:
        known = self.pick(data)
        if known is None:
            return
        self.store.flush()
        kids = self.below(known.id) & set(self.live())
        removed = self.store.delete(known.id, children=children)
        gone = set(removed) & set(self.live()) - {known.id}
        assert gone <= kids
        if children == "drop":
            assert gone == kids
        if children == "keep":
            assert gone == set()
        assert known.id in removed or known.id not in self.live()
        self.drop([known.id, *removed])

    @rule(data=st.data(), entry_class=st.sampled_from([None, "normal", "learned", "pinned"]), ttl=st.sampled_from([None, 0, 7]))
    def set(self, data: Any, entry_class: Any, ttl: int | None) -> None:
        known = self.pick(data)
        if known is None:
            return
        if known.id not in self.live():
            with pytest.raises(NotFoundError):
                self.store.set(known.id, entry_class=entry_class, ttl=ttl)
            return
        entry = self.store.set(known.id, entry_class=entry_class, ttl=ttl)
        if entry_class is not None:
            known.entry_class, known.source = entry_class, "request"
        if ttl is not None:
            known.expires_at = None if ttl == 0 else self.now() + ttl
        assert (entry.entry_class, entry.expires_at) == (known.entry_class, known.expires_at)

    @rule(seconds=st.sampled_from([1, 3, 6, -4]))
    def time_passes(self, seconds: int) -> None:
        if seconds < 0:  # a clock that jumps back resurrects nothing
            before = set(self.live())
            self.ahead += seconds
            assert {e.id for e in self.store.entries()} <= before
            self.ahead -= seconds
        else:
            self.ahead += seconds
            self.store.match((0,))  # the store looks at the clock

    @rule()
    def gc(self) -> None:
        self.store.gc()
        self.model = self.live()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    # -- what holds after each

    @invariant()
    def the_store_lists_what_the_model_has(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.flush()  # counts of uses are on their way to the file for a moment
        entries = {e.id: e for e in self.store.entries()}
        live = self.live()
        assert {id: (e.entry_class, e.n_tokens) for id, e in entries.items()} == {
            id: (k.entry_class, len(k.tokens)) for id, k in live.items()
        }
        for id, entry in entries.items():
            assert entry.hits == live[id].hits

    @invariant()
    def ram_keeps_its_budget(self) -> None:
        if hasattr(self, "store"):
            budget = self.options["cache_ram_mib"] * (1 << 20)
            assert self.store.stats().ram_bytes <= budget


class VerifiedMachine(StoreMachine):
    @rule()
    def verify(self) -> None:
        assert self.store.verify() == []


TestStore = VerifiedMachine.TestCase
TestStore.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestStoreLong(VerifiedMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
