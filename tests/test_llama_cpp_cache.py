"""llama-cpp-python's completions with a store as their cache."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamacppkit import (
    GRAMMAR,
    complete,
    count_evaluated,
    letters,
    llama_cpp,
    logits_after,
    model_path,
    new,
    tokens_of,
)

from kvstore import InvalidInputError, KVStoreError, Store
from kvstore.engines import llama_cpp as adapter
from kvstore.engines.llama_cpp import KVStoreCache, restore, save

DOC = Path(__file__).parents[1] / "docs" / "llama-cpp-python.md"
CHAT = ["What is a prefix?", "And what is a suffix?", "Which comes first?"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


# -- the cache of create_completion and create_chat_completion


def chat(llm: Any, history: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    history = [*history, {"role": "user", "content": question}]
    done = llm.create_chat_completion(history, temperature=0, max_tokens=12, grammar=letters())
    return [*history, done["choices"][0]["message"]]


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_a_chat_over_restarts_reads_as_one_that_never_stopped(name: str, path: Path) -> None:
    steady = new(name)
    expected: list[dict[str, str]] = []
    for question in CHAT:
        expected = chat(steady, expected, question)
    history: list[dict[str, str]] = []
    reused = 0
    for question in CHAT:
        llm = new(name)
        evaluated = count_evaluated(llm)
        with KVStoreCache.open(path, llm) as cache:
            llm.set_cache(cache)
            history = chat(llm, history, question)
            reused += llm.n_tokens - sum(evaluated)
    assert history == expected
    # The tokens of a random answer are not those of its text, and a hybrid's state serves all of its tokens or none.
    assert reused > 0 or name == "jamba"


def test_streams_store_too(path: Path) -> None:
    llm = new()
    prompt = tokens_of(llm, 60)
    with KVStoreCache.open(path, llm) as cache:
        llm.set_cache(cache)
        parts = llm.create_completion(prompt, stream=True, temperature=0, grammar=letters())
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert [entry.n_tokens for entry in cache.store.entries()] == [llm.n_tokens]
    assert text == complete(new(), prompt, 16)


def test_the_protocol_of_the_caches_of_llama_cpp(path: Path) -> None:
    llm = new()
    tokens = tokens_of(llm, 100)
    with KVStoreCache.open(path, llm) as cache:
        assert isinstance(cache, llama_cpp.llama_cache.BaseLlamaCache)
        assert bool(cache)
        assert cache.cache_size == 0
        assert tokens not in cache
        assert [] not in cache
        with pytest.raises(KeyError):
            cache[tokens]
        llm.eval(tokens)
        cache[tokens] = llm.save_state()
        assert tokens in cache
        assert cache.cache_size == next(cache.store.entries()).stored
        for _ in range(2):  # reads take nothing out
            state = cache[[*tokens, 7, 8]]
            assert isinstance(state, llama_cpp.LlamaState)
            assert (state.n_tokens, state.input_ids[:100].tolist()) == (100, tokens)
        assert tokens_of(llm, 100, seed=2) not in cache
        expected = logits_after(llm, [7, 8])
        other = new()
        other.load_state(cache[[*tokens, 7, 8]])
        assert np.array_equal(logits_after(other, [7, 8]), expected)


def test_a_state_is_stored_under_its_own_tokens(path: Path) -> None:
    llm = new()
    tokens = tokens_of(llm, 60)
    llm.eval(tokens)
    state = llm.save_state()
    llm.reset()
    llm.eval(tokens[:40])
    with KVStoreCache.open(path, llm) as cache:
        cache[[1, 2, 3]] = state
        assert [entry.n_tokens for entry in cache.store.entries()] == [60]
        assert cache.store.match(tokens).n_common == 60  # type: ignore[union-attr]


def test_what_the_model_holds_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new()
    prompt = tokens_of(llm, 100)
    with KVStoreCache.open(path, llm) as cache:
        llm.set_cache(cache)
        complete(llm, prompt)
        monkeypatch.setattr(Store, "get", lambda *args, **kwargs: pytest.fail("the store was read"))
        complete(llm, prompt + [9] * 10)


def test_a_few_tokens_are_not_worth_a_restore(path: Path) -> None:
    llm = new()
    tokens = tokens_of(llm, 150)
    with KVStoreCache.open(path, llm) as cache:
        llm.eval(tokens)
        cache[tokens] = llm.save_state()
        assert tokens[:20] + [9] * 100 not in cache
        assert tokens[:40] + [9] * 100 in cache
        assert tokens[:20] in cache
        llm.n_tokens = 130
        with pytest.raises(KeyError):
            cache[tokens]


@pytest.mark.parametrize("seed", [None, 7])
def test_sampling_is_that_of_a_model_without_a_cache(seed: int | None, path: Path) -> None:
    texts = []
    for cached in (False, True):
        llm = new()
        prompt = tokens_of(llm, 60)
        with KVStoreCache.open(path, llm) as cache:
            if cached:
                llm.set_cache(cache)
                cache.store.learn(prompt, 50)
            texts.append([complete(llm, prompt, temperature=1.0, seed=seed) for _ in range(3)])
            if not cached:
                llm.reset()
                llm.eval(prompt)
                cache[prompt] = llm.save_state()
    assert texts[0] == texts[1]


def test_log_probabilities(path: Path) -> None:
    """Those of the answer are right; those of prompt tokens that came from the store are not numbers."""
    first = new(logits_all=True)
    prompt = tokens_of(first, 60)
    with KVStoreCache.open(path, first) as cache:
        first.eval(prompt)
        cache[prompt] = first.save_state()
        found = []
        for cached in (False, True):
            llm = new(logits_all=True)
            llm.eval(prompt[:59])
            if cached:
                llm = new(logits_all=True)
                llm.set_cache(KVStoreCache(cache.store, llm))
            done = llm.create_completion(prompt, max_tokens=4, temperature=0, logprobs=2, grammar=letters())
            found.append(done["choices"][0]["logprobs"]["token_logprobs"])
            assert bool(np.isnan(llm.scores[:59]).all()) == cached
        assert found[0] == found[1]


def test_states_share_a_learned_prefix(path: Path) -> None:
    llm = new("llama")
    system = tokens_of(llm, 200)
    with KVStoreCache.open(path, llm, min_saved_mib=0.01) as cache:
        llm.set_cache(cache)
        llm.eval(system)
        learned = save(cache.store, llm, entry_class="learned")
        for seed in (2, 3):
            complete(llm, system + tokens_of(llm, 20, seed=seed))
        children = list(cache.store.entries(entry_class="normal"))
        assert [child.parent for child in children] == [learned.id] * 2
        assert all(child.stored < child.size / 2 for child in children)
        other = new("llama")
        prompt = system + tokens_of(llm, 20, seed=2) + [9]
        other.set_cache(KVStoreCache(cache.store, other))
        steady = new("llama")
        steady.eval(system)
        complete(steady, prompt[:-1])
        assert complete(other, prompt) == complete(steady, prompt)


SCRIPT = """
import json, sys
from llama_cpp import Llama, LlamaGrammar
from kvstore.engines.llama_cpp import KVStoreCache
model, store, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = Llama(model, n_ctx=512, n_batch=128, n_threads=1, n_threads_batch=1, verbose=False)
with KVStoreCache.open(store, llm) as cache:
    llm.set_cache(cache)
    n = max((m.n_common for m in [cache.store.match(prompt)] if m), default=0)
    grammar = LlamaGrammar.from_string(sys.argv[4], verbose=False)
    text = llm.create_completion(prompt, max_tokens=8, temperature=0, grammar=grammar)["choices"][0]["text"]
print(json.dumps([n, text]))
"""


def test_another_process_goes_on(path: Path) -> None:
    steady = new()
    prompt, more = tokens_of(steady, 60), tokens_of(steady, 5, seed=2)
    expected = []
    got = []
    for tokens in (prompt, prompt + more):
        expected.append(complete(steady, tokens))
        argv = [sys.executable, "-c", SCRIPT, str(model_path("llama")), str(path), json.dumps(tokens), GRAMMAR]
        env = {**os.environ, "PYTHONPATH": str(DOC.parents[1])}
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        got.append(json.loads(done.stdout.splitlines()[-1]))
    assert [text for _, text in got] == expected
    assert [n for n, _ in got] == [0, 60]


def test_a_damaged_entry_is_a_miss_and_generation_goes_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = new()
    prompt = tokens_of(llm, 100)
    with KVStoreCache.open(path, llm) as cache:
        llm.set_cache(cache)
        expected = complete(llm, prompt)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        changed = db.execute("UPDATE chunks SET data = zeroblob(length(data))").rowcount
    assert changed > 0
    other = new()
    with KVStoreCache.open(path, other) as cache:
        other.set_cache(cache)
        with caplog.at_level(logging.WARNING, "kvstore"):
            assert complete(other, prompt) == expected
        assert "damaged" in caplog.text
        assert prompt in cache  # stored anew


@pytest.mark.parametrize("state", ["no state", "of other tokens", "of another model"])
def test_a_state_that_does_not_fit_is_a_miss(state: str, path: Path) -> None:
    llm, source = new(), new("qwen2vl" if state == "of another model" else "llama")
    prompt = tokens_of(llm, 100)
    source.eval(prompt[:50] if state == "of other tokens" else prompt)
    with KVStoreCache.open(path, llm) as cache:
        blob = b"no state" * 100 if state == "no state" else adapter._sequence_state(source, 0)
        cache.store.put(prompt, blob)
        with pytest.raises(KVStoreError, match="did not take"):
            restore(cache.store, llm, [*prompt, 8])
        llm.set_cache(cache)
        assert complete(llm, [*prompt, 9]) == complete(new(), [*prompt, 9])


def test_a_store_that_fails_stops_no_generation(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = new()
    prompt = tokens_of(llm, 60)
    cache = KVStoreCache.open(path, llm)
    cache.close()
    llm.set_cache(cache)
    assert complete(llm, prompt) == complete(new(), prompt)
    assert "was not stored" in caplog.text


def test_what_a_multimodal_handler_made_is_not_stored(path: Path) -> None:
    class Handler:
        clip_model_path = "clip.gguf"

    llm = new(chat_handler=Handler())
    with KVStoreCache.open(path, llm) as cache:
        llm.set_cache(cache)
        complete(llm, tokens_of(llm, 60))
        assert list(cache.store.entries()) == []
        with pytest.raises(InvalidInputError, match="multimodal"):
            save(cache.store, llm)


# -- figures and the how-to


@pytest.mark.slow
def test_disk_use(tmp_path: Path) -> None:
    """200 tokens of SmolLM2: the states, not the scores."""
    tokens: list[int] = []
    sizes = []
    for kind in ("its own", "kvstore"):
        folder = tmp_path / kind
        folder.mkdir()
        llm = new("smollm2", n_batch=512)
        tokens = tokens_of(llm, 200)
        with contextlib.ExitStack() as stack:
            if kind == "kvstore":
                llm.set_cache(stack.enter_context(KVStoreCache.open(folder / "cache.db", llm)))
            else:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                llm.set_cache(llama_cpp.LlamaDiskCache(str(folder)))
            complete(llm, tokens, 1)
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    assert sizes[0] > 40e6
    assert sizes[1] < 7e6


@pytest.fixture
def beside_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(model_path("llama"), tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("beside_a_model")
def test_the_how_to_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOC), "exec"), names)
