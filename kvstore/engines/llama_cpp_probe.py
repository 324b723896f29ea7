"""The computed probe of a `Llama`: it shows adapters and control vectors, which llama.cpp does not report."""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvstore import KVStoreError

from . import probe

# Fewer tokens than in a server's probe: this one is computed at every save and restore.
N_TOKENS = 8
Bytes = npt.NDArray[np.uint8]
_last: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


class LlamaCppError(KVStoreError):
    """llama.cpp did not return or accept a state."""

    code, exit_code = "llama_cpp", 33


def compute(llm: Any, *, keep: bool = True, window: bool = False) -> str | None:
    """The digest of the probe's rows; None where the context cannot be probed.

    The sequence used is 0, or a free one where there are several. With `keep`, what it held and the last logits are put
    back; else it is empty afterwards. After what is put back into a sliding window, sums are taken in another order. So
    where that holds anything, the context's last probe counts, or that of another context with the same settings, unless
    `window` asks for a new one.
    Raises LlamaCppError where llama.cpp does not take back what it gave.
    """
    memory = llama_cpp.llama_get_memory(llm.ctx)
    if memory is None:
        return None
    n_seq = int(llama_cpp.llama_n_seq_max(llm.ctx))
    ends = [int(llama_cpp.llama_memory_seq_pos_max(memory, seq)) for seq in range(n_seq)]
    seq = ends.index(-1) if n_seq > 1 and -1 in ends else 0
    holds = keep and ends[seq] >= 0
    slides = int(llama_cpp.llama_model_n_swa(llm.model)) > 0
    if holds and slides and not window:
        return _last[llm] if llm in _last else _in_another_context(llm)
    kept = None
    if holds:
        # The state of a sequence contains the window only; the next prompt may need the tokens before it.
        kept = _context_state(llm.ctx) if slides else sequence_state(llm.ctx, seq)
    logits = _logits(llm) if holds and llm.n_tokens > 0 else None
    last = None if logits is None else logits.copy()
    try:
        digest = _digest(llm.ctx, seq)
    finally:
        if kept is not None:
            set_state = _set_context_state if slides else set_sequence_state
            if set_state(llm.ctx, kept, seq) != kept.size:
                raise LlamaCppError(f"llama.cpp did not take back the state of sequence {seq}; it is empty now")
        if last is not None and (logits := _logits(llm)) is not None:
            logits[:] = last
    _last[llm] = digest
    return digest


def _in_another_context(llm: Any) -> str | None:
    """The probe of a new context. It has the adapter that `Llama` was given, and no other."""
    ctx = llama_cpp.llama_init_from_model(llm.model, llm.context_params)
    if not ctx:
        return None
    try:
        adapter = getattr(llm, "_lora_adapter", None)
        if adapter is not None:
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            if llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(llm.lora_scale)) != 0:
                return None
        return _digest(ctx, 0)
    finally:
        llama_cpp.llama_free(ctx)


def _digest(ctx: Any, seq: int) -> str | None:
    """Computes the probe in a sequence, which is empty before and afterwards."""
    memory = llama_cpp.llama_get_memory(ctx)
    llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
    try:
        if not _decode(ctx, seq):
            return None
        state = sequence_state(ctx, seq)
        return None if probe.depends_on_others(state, int(llama_cpp.llama_n_seq_max(ctx))) else probe.rows_digest(state)
    finally:
        llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)


def _decode(ctx: Any, seq: int) -> bool:
    """Computes the probe in an empty sequence; whether that worked."""
    tokens = probe.TOKENS[:N_TOKENS]
    size = max(1, min(N_TOKENS, int(llama_cpp.llama_n_batch(ctx))))
    batch = llama_cpp.llama_batch_init(size, 0, 1)
    try:
        for start in range(0, N_TOKENS, size):
            part = tokens[start : start + size]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
                batch.logits[i] = i == len(part) - 1
            if llama_cpp.llama_decode(ctx, batch) != 0:
                return False
    finally:
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_synchronize(ctx)
    return True


def _logits(llm: Any) -> npt.NDArray[np.single] | None:
    """The logits of the last token, in llama.cpp's own memory; None where it has none."""
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)) if pointer else None


def pointer_to(data: Bytes) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def sequence_state(ctx: Any, seq_id: int) -> Bytes:
    """The state of one sequence, as llama.cpp writes it. shape (n_bytes,), uint8."""
    size = int(llama_cpp.llama_state_seq_get_size(ctx, seq_id))
    state = np.empty(size, np.uint8)
    n = int(llama_cpp.llama_state_seq_get_data(ctx, pointer_to(state), size, seq_id))
    if not 0 < n <= size:
        raise LlamaCppError(f"llama.cpp gave no state of sequence {seq_id}")
    return state[:n]


def set_sequence_state(ctx: Any, state: Bytes, seq_id: int) -> int:
    """The number of bytes of the state that llama.cpp accepted."""
    return int(llama_cpp.llama_state_seq_set_data(ctx, pointer_to(state), state.size, seq_id))


def _context_state(ctx: Any) -> Bytes:
    state = np.empty(int(llama_cpp.llama_state_get_size(ctx)), np.uint8)
    n = int(llama_cpp.llama_state_get_data(ctx, pointer_to(state), state.size))
    if not 0 < n <= state.size:
        raise LlamaCppError("llama.cpp gave no state of its context")
    return state[:n]


def _set_context_state(ctx: Any, state: Bytes, seq_id: int) -> int:
    return int(llama_cpp.llama_state_set_data(ctx, pointer_to(state), state.size))
