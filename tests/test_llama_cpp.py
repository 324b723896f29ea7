"""llama-cpp-python: states that are restored go on as those that never stopped, and meet no other model's."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import ggufkit
import numpy as np
import pytest
from llamacppkit import (
    MODELS,
    WHOLE_ONLY,
    complete,
    count_evaluated,
    llama_cpp,
    logits_after,
    model_path,
    new,
    tokens_of,
)

from kvstore import InvalidInputError, Store, layout
from kvstore.engines import llama_cpp as adapter
from kvstore.engines.llama_cpp import KVStoreCache, fingerprint_of, open_store, restore, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


# -- restored states go on as those that never stopped


@pytest.mark.parametrize("name", MODELS)
def test_save_and_restore_go_on_bit_for_bit(name: str, path: Path) -> None:
    first = new(name)
    tokens, more = tokens_of(first, 150), tokens_of(first, 12, seed=2)
    first.eval(tokens)
    with open_store(path, first) as store:
        entry = save(store, first, excerpt="a test")
        assert (entry.n_tokens, entry.excerpt) == (150, "a test")
        expected = logits_after(first, more)
    second = new(name)
    with open_store(path, second) as store:
        assert restore(store, second, tokens + more) == 150
        assert second.n_tokens == 150
        assert np.array_equal(logits_after(second, more), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_partial_match_serves_the_common_prefix(name: str, path: Path) -> None:
    first = new(name)
    tokens, more = tokens_of(first, 150), tokens_of(first, 12, seed=2)
    first.eval(tokens[:100])
    state = first.save_state()
    first.eval(tokens[100:])
    with open_store(path, first) as store:
        KVStoreCache(store, first)[tokens] = first.save_state()
        second = new(name)
        n_past = restore(store, second, tokens[:100] + more)
        assert n_past == (0 if name in WHOLE_ONLY else 100)
        if n_past:
            third = new(name)
            third.eval(tokens[:100])
            assert np.array_equal(logits_after(second, more), logits_after(third, more))
        KVStoreCache(store, first)[tokens[:100]] = state


@pytest.mark.parametrize("name", MODELS)
def test_states_convert_to_what_the_engine_writes(name: str) -> None:
    llm = new(name)
    llm.eval(tokens_of(llm, 20))
    context, sequence = llm.save_state().llama_state, adapter._sequence_state(llm, 0)
    assert np.array_equal(adapter._to_sequence(context), sequence)
    assert adapter._to_context(sequence, llm).tobytes() == context
    assert layout.parse(sequence).can_crop == (name not in WHOLE_ONLY)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["longer", "the same", "another end"])
def test_completions_are_those_of_a_model_that_never_stopped(name: str, what: str, path: Path) -> None:
    first = new(name)
    stored, more = tokens_of(first, 150), tokens_of(first, 20, seed=2)
    prompt = {"longer": stored + more, "the same": stored, "another end": stored[:100] + more}[what]
    with KVStoreCache.open(path, first) as cache:
        first.eval(stored)
        cache[stored] = first.save_state()
        second = new(name)
        second.set_cache(KVStoreCache(cache.store, second))
        evaluated = count_evaluated(second)
        text = complete(second, prompt)
    reused = 0 if name in WHOLE_ONLY and what != "longer" else {"longer": 150, "the same": 149, "another end": 100}[what]
    assert evaluated[0] == len(prompt) - reused
    third = new(name)
    if reused:
        third.eval(prompt[:reused])
    assert text == complete(third, prompt)


def test_a_window_that_memory_lacks_is_not_computed_over(path: Path) -> None:
    """After a restore the window of an earlier position is gone; llama.cpp would go back there all the same."""
    first = new("gemma3")
    tokens = tokens_of(first, 150)
    with open_store(path, first) as store:
        first.eval(tokens)
        save(store, first)
        second = new("gemma3")
        restore(store, second, tokens)
        second.set_cache(KVStoreCache(store, second))
        prompt = tokens[:100] + tokens_of(first, 10, seed=2)
        assert complete(second, prompt) == complete(new("gemma3"), prompt)


def test_a_hybrid_takes_the_shorter_state_it_can_use(path: Path) -> None:
    llm = new("jamba")
    tokens = tokens_of(llm, 150)
    with KVStoreCache.open(path, llm) as cache:
        for stop in (100, 150):
            llm.reset()
            llm.eval(tokens[:stop])
            cache[tokens[:stop]] = llm.save_state()
        other = new("jamba")
        other.set_cache(KVStoreCache(cache.store, other))
        evaluated = count_evaluated(other)
        complete(other, tokens)
        assert evaluated[0] == 50


def test_sequences_other_than_the_first(path: Path) -> None:
    llm = new("llama", embedding=True)  # the only contexts of `Llama` with several sequences
    tokens = tokens_of(llm, 60)
    llm.eval(tokens)
    with open_store(path, llm) as store:
        save(store, llm)
        assert restore(store, llm, tokens, seq_id=3) == 60
        assert np.array_equal(adapter._sequence_state(llm, 3)[:8], np.array([0xAF143CD8, 3], "<u4").view(np.uint8))
        assert save(store, llm, 3, tokens=tokens, entry_class="pinned").entry_class == "pinned"
        with pytest.raises(InvalidInputError, match="sequence 3 are not known"):
            save(store, llm, 3)
        with pytest.raises(InvalidInputError, match="sequence 5 holds 0 positions"):
            save(store, llm, 5, tokens=tokens)
        for bad in (-1, 100_000):
            with pytest.raises(InvalidInputError, match="sequence"):
                restore(store, llm, tokens, seq_id=bad)


def test_save_cuts_what_llama_has_forgotten(path: Path) -> None:
    llm = new()
    tokens = tokens_of(llm, 60)
    llm.eval(tokens)
    llm.n_tokens = 40
    with open_store(path, llm) as store:
        assert save(store, llm).n_tokens == 40
        other = new()
        assert restore(store, other, tokens) == 40
        llm.n_tokens = 0
        with pytest.raises(InvalidInputError, match="no tokens"):
            save(store, llm)


# -- fingerprints


@pytest.mark.parametrize(
    "other",
    [{"n_ctx": 256}, {"flash_attn": True}, {"rope_freq_base": 20000.0}, {"flash_attn": True, "type_k": 8, "type_v": 8}],
)
def test_another_context_misses(other: dict[str, Any], path: Path) -> None:
    llm = new()
    tokens = tokens_of(llm, 60)
    llm.eval(tokens)
    with open_store(path, llm) as store:
        save(store, llm)
        stranger = new(**other)
        assert fingerprint_of(stranger) != fingerprint_of(llm)
        calls = (KVStoreCache, save, lambda store, llm: restore(store, llm, tokens))
        for call in calls:
            with pytest.raises(InvalidInputError, match="another fingerprint"):
                call(store, stranger)
    with open_store(path, stranger) as store:
        assert restore(store, stranger, tokens) == 0
        assert tokens not in KVStoreCache(store, stranger)


def test_fingerprints_name_the_model_and_not_its_place(tmp_path: Path) -> None:
    path = tmp_path / "moved.gguf"
    shutil.copy(model_path("llama"), path)
    moved = llama_cpp.Llama(str(path), n_ctx=512, n_batch=64, n_threads=2, verbose=False)
    assert fingerprint_of(moved) == fingerprint_of(new()) == fingerprint_of(new())
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    tuned = tmp_path / "tuned.gguf"
    tuned.write_bytes(data)
    other = llama_cpp.Llama(str(tuned), n_ctx=512, verbose=False)
    assert fingerprint_of(other) != fingerprint_of(moved)
    assert json.loads(fingerprint_of(moved))["llama_cpp"] == llama_cpp.__version__


def test_a_store_without_a_fingerprint_is_refused(path: Path) -> None:
    llm = new()
    with Store(path) as store, pytest.raises(InvalidInputError, match="open_store"):
        KVStoreCache(store, llm)
    with Store(path, fingerprint=fingerprint_of(llm)) as store:
        KVStoreCache(store, llm)
    with pytest.raises(InvalidInputError, match="not kvstore"):
        KVStoreCache({}, llm)  # type: ignore[arg-type]


# -- what was set past `Llama`


def control_vector(llm: Any, size: float) -> None:
    """The same push in every layer but the first; 0 takes it away."""
    n_embd, n_layer = llama_cpp.llama_model_n_embd(llm.model), llama_cpp.llama_model_n_layer(llm.model)
    n = n_embd * (n_layer - 1)
    data = (ctypes.c_float * n)(*([size] * n))
    assert llama_cpp.llama_set_adapter_cvec(llm.ctx, data if size else None, n, n_embd, 1, n_layer) == 0


def lora(llm: Any, path: Path) -> None:
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, str(path).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(llm.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_a_control_vector_changes_the_fingerprint(name: str) -> None:
    llm = new(name)
    first = fingerprint_of(llm)
    control_vector(llm, 0.1)
    assert fingerprint_of(llm) != first
    control_vector(llm, 0)
    assert fingerprint_of(llm) == first


def test_an_adapter_set_through_the_c_api_changes_the_fingerprint(tmp_path: Path) -> None:
    prints = []
    for seed in (0, 1, 2, 1):
        llm = new()
        lora(llm, ggufkit.write_lora(tmp_path / "adapter.gguf", seed))
        prints.append(fingerprint_of(llm))
    assert prints[0] == fingerprint_of(new())
    assert prints[1] == prints[3]
    assert len(set(prints)) == 3


def test_an_adapter_replaced_under_its_name_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    prints = []
    for seed in (1, 2, 1):
        ggufkit.write_lora(path, seed)
        prints.append(fingerprint_of(new(lora_path=str(path))))
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_fingerprint_disturbs_nothing(name: str, flash_attn: bool) -> None:
    llm, other = new(name, flash_attn=flash_attn), new(name, flash_attn=flash_attn, n_batch=4, n_threads=2)
    empty = fingerprint_of(llm)
    tokens, more = tokens_of(llm, 150), tokens_of(llm, 12, seed=2)
    llm.eval(tokens)
    logits = llm._ctx.get_logits_ith(-1)[: llm.n_vocab()]
    assert fingerprint_of(llm) == empty == fingerprint_of(other)
    assert llm._ctx.get_logits_ith(-1)[: llm.n_vocab()] == logits
    assert llm.n_tokens == 150
    same = new(name, flash_attn=flash_attn)
    same.eval(tokens)
    assert fingerprint_of(same) == empty  # probed for the first time
    third = new(name, flash_attn=flash_attn)
    third.eval(tokens)
    expected = logits_after(third, more)
    assert np.array_equal(logits_after(llm, more), expected)
    assert np.array_equal(logits_after(same, more), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_a_cache_serves_nothing_once_the_model_computes_other_numbers(
    name: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = new(name)
    tokens = tokens_of(llm, 100)
    with KVStoreCache.open(path, llm) as cache:
        llm.set_cache(cache)
        complete(llm, tokens)
        llm.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        control_vector(llm, 0.1)
        evaluated = count_evaluated(llm)
        n = len(list(cache.store.entries()))
        text = complete(llm, [*tokens, 7, 8])
        assert evaluated[0] == 102
        assert "other numbers" in caplog.text
        assert len(list(cache.store.entries())) == n
        plain = new(name)
        control_vector(plain, 0.1)
        assert complete(plain, [*tokens, 7, 8]) == text


def test_a_sequence_with_a_gap_is_not_saved(path: Path) -> None:
    llm = new()
    llm.eval(tokens_of(llm, 60))
    memory = llama_cpp.llama_get_memory(llm.ctx)
    llama_cpp.llama_memory_seq_rm(memory, 0, 20, 30)
    with open_store(path, llm) as store, pytest.raises(InvalidInputError, match="positions 0 to 59"):
        save(store, llm)
