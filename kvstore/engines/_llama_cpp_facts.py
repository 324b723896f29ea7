"""What a state of llama-cpp-python depends on, as a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp

from kvstore import StoreIOError

_ENDS = 1 << 20
# Fine-tunes of one model have the same size and metadata: the weights themselves are sampled, 1 MiB in all.
_SAMPLES, _SAMPLE = 16, 1 << 16
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")

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
    releases change the layout of states without notice. Not the path, threads, batch sizes or GPU layers. An adapter
    that is set past `Llama`, through the C API, is not seen. Raises StoreIOError where a model file cannot be read.
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
        },
        sort_keys=True,
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else repr(value)


def _model(llm: Any) -> str:
    path = os.fspath(llm.model_path)
    shards = [path]
    if found := _SHARD.search(path):
        total = int(found[1])
        shards = [f"{path[: found.start()]}-{i:05}-of-{total:05}.gguf" for i in range(1, total + 1)]
    metadata = json.dumps(llm.metadata, sort_keys=True).encode()
    return "-".join([*map(_file, shards), hashlib.blake2b(metadata, digest_size=8).hexdigest()])


def _lora(llm: Any) -> str | None:
    if not llm.lora_path:
        return None
    return f"{_file(llm.lora_path)} x {float(llm.lora_scale)!r}"


def _file(path: str) -> str:
    """A file's size, and a digest of its ends and of samples between."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            digest = hashlib.blake2b(digest_size=16)
            spans = [(0, _ENDS), (max(0, size - _ENDS), _ENDS)]
            spans += [(size * i // (_SAMPLES + 1), _SAMPLE) for i in range(1, _SAMPLES + 1)]
            for start, length in spans:
                f.seek(start)
                digest.update(f.read(length))
    except OSError as error:
        raise StoreIOError(f"{path} cannot be read: {error.strerror or error}", path=path) from error
    return f"{size}-{digest.hexdigest()}"
