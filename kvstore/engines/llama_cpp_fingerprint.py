"""The fingerprint of a `Llama`: what its states depend on."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp

from . import model_file
from .llama_cpp_probe import compute

_CONTEXT = (
    "n_seq_max",
    "kv_unified",
    "swa_full",
    "type_k",
    "type_v",
    "flash_attn_type",
    "attention_type",
    "pooling_type",
    "embeddings",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_files: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def fingerprint_of(llm: Any) -> str:
    """The fingerprint of a `Llama`, for `Store(fingerprint=...)`: JSON of what its states depend on.

    The model (its metadata, and of its files the size, the head, the end and samples between), LoRA, overrides of its
    metadata, n_ctx, KV types, flash attention, rope and window settings, and the version of llama-cpp-python, whose
    releases change the layout of states without notice. Not the path, threads, batch sizes or GPU layers as such. A few
    computed tokens show the rest: adapters and control vectors that were set past `Llama`, through the C API. The
    context holds afterwards what it held before. One with a sliding window that holds anything is not probed again.
    Raises StoreIOError where a model file cannot be read.
    """
    facts = _files.get(llm)
    if facts is None:
        facts = {"model": _model(llm), "lora": _lora(llm)}
        _files[llm] = facts
    params = llm.context_params
    return json.dumps(
        {
            **facts,
            "overrides": None if not llm.kv_overrides else {k: repr(v) for k, v in llm.kv_overrides.items()},
            "n_ctx": int(llm.n_ctx()),
            "context": {name: _plain(getattr(params, name)) for name in _CONTEXT if hasattr(params, name)},
            "llama_cpp": llama_cpp.__version__,
            "probe": compute(llm),
        },
        sort_keys=True,
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else repr(value)


def _model(llm: Any) -> str:
    metadata = json.dumps(llm.metadata, sort_keys=True).encode()
    return "-".join([model_file.digest(llm.model_path), hashlib.blake2b(metadata, digest_size=8).hexdigest()])


def _lora(llm: Any) -> str | None:
    if not llm.lora_path:
        return None
    return f"{model_file.digest(llm.lora_path)} x {float(llm.lora_scale)!r}"
