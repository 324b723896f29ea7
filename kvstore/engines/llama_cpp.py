"""llama-cpp-python: a cache for `Llama.set_cache`, and states saved and restored sequence by sequence.

    with KVStoreCache.open("cache.db", llm) as cache:
        llm.set_cache(cache)
        llm.create_chat_completion(messages)

Needs llama-cpp-python (the extra `llama-cpp`: `pip install ".[llama-cpp]"` in a checkout). It is not patched. Like
`Llama`, the cache is not safe to use from several threads.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias, cast

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

from kvstore import Entry, InvalidInputError, KVStoreError, LayoutError, Match, SavedState, Store, layout

from ..util.buffers import common_prefix_length
from . import probe
from .llama_cpp_fingerprint import fingerprint_of
from .llama_cpp_probe import LlamaCppError, compute, sequence_state, set_sequence_state

__all__ = ["KVStoreCache", "LlamaCppError", "fingerprint_of", "open_store", "restore", "save"]

log = logging.getLogger("kvstore")
Bytes: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = npt.NDArray[np.int32]
# A sequence state in memory starts with the engine's magic number and the sequence's id.
_SEQUENCE_HEAD = np.array([0xAF143CD8, 0], "<u4").view(np.uint8)
_ATTEMPTS = 4
_CHANGED = "the model computes other numbers than when its cache was opened (an adapter?): nothing is stored or restored"


def open_store(path: str | os.PathLike[str], llm: Any, **kwargs: Any) -> Store:
    """A `Store` for the states of this `Llama`: opened with its fingerprint, and with `auto_learn`
    unless another value is given. Takes the keyword arguments of `Store`."""
    return Store(path, **{"auto_learn": not kwargs.get("readonly", False), **kwargs, "fingerprint": fingerprint_of(llm)})


def save(store: Store, llm: Any, seq_id: int = 0, *, tokens: Any = None, **put: Any) -> Entry:
    """Puts the state of one sequence of the context, through llama.cpp's sequence API.

    tokens: the tokens that the sequence was computed from. `Llama` keeps those of sequence 0, where they may be left out.
    The other keyword arguments are those of `Store.put`. Raises InvalidInputError where the tokens cannot be the
    sequence's, or the store belongs to another model; LlamaCppError.
    """
    _check_fingerprint(store, llm)
    _check_sequence(llm, seq_id)
    if tokens is None:
        if seq_id != 0:
            raise InvalidInputError(f"the tokens of sequence {seq_id} are not known", hint="give tokens=")
        if _has_media(llm):
            raise InvalidInputError("the tokens of a multimodal prompt are not known", hint="give tokens=")
        tokens = llm.input_ids[: llm.n_tokens]
    ids = np.asarray(tokens)
    if len(ids) == 0:
        raise InvalidInputError("the sequence has no tokens", hint="evaluate a prompt first")
    held = int(llama_cpp.llama_memory_seq_pos_max(_memory(llm), seq_id)) + 1
    if held < len(ids):
        raise InvalidInputError(f"sequence {seq_id} holds {held} positions, {len(ids)} tokens were given")
    state = _sequence_state(llm, seq_id)
    if held != len(ids):
        # `Llama` drops tokens without removing their cells.
        state = layout.crop(state, len(ids))
    if not _has_media(llm) and not probe.is_plain(state, len(ids)):
        raise InvalidInputError(f"sequence {seq_id} does not hold the positions 0 to {len(ids) - 1}, each once")
    return store.put(ids, state, **put)


def restore(store: Store, llm: Any, tokens: Any, seq_id: int = 0) -> int:
    """Replaces the contents of a sequence by the stored state that serves the most leading tokens.

    Returns n_past, the number of tokens that need not be computed again. It is 0 where the store has no such state; the
    sequence is unchanged then. There are no logits until a token is computed: where n_past is the number of all tokens,
    compute the last one again, or continue with the next. For sequence 0, `n_tokens` and `input_ids` of `Llama` are
    updated.
    """
    _check_fingerprint(store, llm)
    _check_sequence(llm, seq_id)
    ids = np.asarray(tokens)
    for _ in range(_ATTEMPTS):
        match = store.match(ids)
        if match is None:
            return 0
        saved = store.get(match.entry.id, n_tokens=match.n_common)
        if saved is None:  # the entry was damaged and is deleted now; another one may serve
            continue
        if _set_sequence(llm, saved, seq_id):
            return len(saved.tokens)
        raise LlamaCppError(
            f"llama.cpp did not take the state of entry {match.entry.hex_id}; sequence {seq_id} is empty",
            id=match.entry.hex_id,
        )
    return 0


class KVStoreCache(BaseLlamaCache):  # type: ignore[misc, unused-ignore]
    """A cache for `Llama.set_cache`, with the protocol of llama-cpp-python's own.

    `cache[tokens]` finds the state that serves the most leading tokens, cut to them where the model's states can be cut,
    and puts it into the model's memory at once where that memory holds fewer of the tokens (`Llama.load_state` would write
    all of its scores, hundreds of MB, and restores a sliding window less exactly). It raises KeyError where there is no
    such state. Reading removes nothing. `cache[tokens] = state` puts the state under the tokens that it was computed
    from. Errors of the store are logged and count as a miss: generation continues.

    min_tokens: a state that serves fewer tokens is a miss, unless it serves half of the prompt: reading it would cost more
    than computing. ttl: seconds until an entry expires, None = never.
    Raises InvalidInputError where the store was not opened with `fingerprint_of(llm)` (`open` and `open_store` do that).
    """

    def __init__(self, store: Store, llm: Any, *, min_tokens: int = 32, ttl: int | None = None) -> None:
        super().__init__(capacity_bytes=-1)  # the store's own budgets apply
        _check_fingerprint(store, llm)
        self.store = store
        self.llm = llm
        self.min_tokens = min_tokens
        self.ttl = ttl
        self._told: set[str] = set()
        self._rows = compute(llm)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], llm: Any, *, min_tokens: int = 32, ttl: int | None = None, **kwargs: Any
    ) -> KVStoreCache:
        """A cache that opens its own store (see `open_store`). Use it as a context manager, or call `close`."""
        store = open_store(path, llm, **kwargs)
        try:
            return cls(store, llm, min_tokens=min_tokens, ttl=ttl)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Closes the store."""
        self.store.close()

    def __enter__(self) -> KVStoreCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def cache_size(self) -> int:
        """Bytes of the stored states."""
        return self.store.stats().stored

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(_ids(key)) is not None

    def __getitem__(self, key: Sequence[int]) -> Any:
        ids = _ids(key)
        usable = _usable(self.llm, ids)
        for _ in range(_ATTEMPTS):
            match = self._find(ids)
            if match is None:
                break
            gain = match.n_common - usable
            if 0 < gain < self._least(ids):
                break
            if gain <= 0 or self._restore(match, usable):
                return _StoredState(self, ids, match.n_common)
        raise KeyError("no stored state serves these tokens")

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        ids = np.asarray(value.input_ids[: value.n_tokens], np.int32)
        if len(ids) == 0:
            return
        if _has_media(self.llm):
            self._tell_once("states of a model with a multimodal chat handler are not stored")
            return
        try:
            match = self.store.match(ids)
            if match is None or match.n_common < len(ids):
                state = _fit(_to_sequence(value.llama_state), len(ids))
                if not probe.is_plain(state, len(ids)):
                    self._tell_once("a state whose positions are not those of its tokens is not stored")
                elif self._is_as_opened():
                    self.store.put(ids, state, ttl=self.ttl)
        except KVStoreError as error:
            log.warning("the state of %d tokens was not stored: %s", len(ids), error)

    def _find(self, ids: Tokens) -> Match | None:
        """The match that pays, or None."""
        if len(ids) == 0:
            return None
        try:
            match = self.store.match(ids)
            if match is not None and match.n_common == len(ids) > 1 and _cannot_step_back(self.llm):
                # `Llama` computes the last token of a prompt again; for that, this model would start from the first token.
                match = self.store.match(ids[:-1]) or match
        except KVStoreError as error:
            log.warning("the store could not be asked: %s", error)
            return None
        return None if match is None or match.n_common < self._least(ids) else match

    def _least(self, ids: Tokens) -> int:
        """The smallest number of tokens that is worth a restore."""
        return min(self.min_tokens, (len(ids) + 1) // 2)

    def _read(self, match: Match) -> SavedState | None:
        """The state of a match; None where it cannot be read, and another match may serve."""
        try:
            return self.store.get(match.entry.id, n_tokens=match.n_common)
        except KVStoreError as error:
            log.warning("entry %s could not be read: %s", match.entry.hex_id, error)
            return None

    def _restore(self, match: Match, usable: int) -> bool:
        """Puts a stored state into the model, which then continues from it. False where the state could not be read:
        another match may serve. Raises KeyError where llama.cpp refuses the state."""
        saved = self._read(match)
        if saved is None:
            return False
        llm = self.llm
        if compute(llm, keep=False) != self._rows:
            _note_tokens(llm, saved.tokens[:0])
            self._tell_once(_CHANGED)
            raise KeyError(match.entry.hex_id)
        if not _set_sequence(llm, saved, 0):
            log.warning("llama.cpp did not take the state of entry %s", match.entry.hex_id)
            raise KeyError(match.entry.hex_id)
        if llm._logits_all:
            # These are read only as log probabilities of the prompt itself: NaN is better there than another prompt's numbers.
            llm.scores[usable : len(saved.tokens)] = np.nan
        return True

    def _is_as_opened(self) -> bool:
        """Whether the model still computes the same numbers as when the cache was opened."""
        if compute(self.llm, window=True) == self._rows:
            return True
        self._tell_once(_CHANGED)
        return False

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(what)


class _StoredState(LlamaState):  # type: ignore[misc, unused-ignore]
    """The argument of `Llama.load_state`. The state is read at the first access to a field other than `input_ids`."""

    def __init__(self, cache: KVStoreCache, ids: Tokens, n_common: int) -> None:
        self._cache = cache
        self._ids = ids
        self.input_ids = _padded(cache.llm, ids[:n_common])

    def load(self) -> None:
        """Reads the state. Raises KeyError."""
        cache, llm = self._cache, self._cache.llm
        for _ in range(_ATTEMPTS):
            match = cache._find(self._ids)
            saved = None if match is None else cache._read(match)
            if saved is not None:
                try:
                    state = _to_context(saved.main, llm)
                except LayoutError as error:
                    raise KeyError(str(error)) from error
                super().__init__(
                    input_ids=_padded(llm, saved.tokens),
                    # `Llama` takes its logits from the last token, which it computes again.
                    scores=np.full((1, 1), np.nan, np.single),
                    n_tokens=len(saved.tokens),
                    llama_state=cast(Any, state),
                    llama_state_size=len(state),
                    # Sampling after a restored prompt is the same as after a computed one.
                    seed=llm._seed,
                )
                return
        raise KeyError("no stored state serves these tokens")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.load()
        return object.__getattribute__(self, name)


# -- states in and out of llama.cpp


def _memory(llm: Any) -> Any:
    memory = llama_cpp.llama_get_memory(llm.ctx)
    if memory is None:
        raise LlamaCppError("this context has no memory", hint="an embedding model keeps no states")
    return memory


def _check_sequence(llm: Any, seq_id: int) -> None:
    """llama.cpp aborts the process on a sequence that does not exist."""
    n_seq = int(llama_cpp.llama_n_seq_max(llm.ctx))
    if not 0 <= seq_id < n_seq:
        raise InvalidInputError(f"sequence {seq_id} of a context with {n_seq}")


def _sequence_state(llm: Any, seq_id: int) -> Bytes:
    return sequence_state(llm.ctx, seq_id)


def _set_sequence(llm: Any, saved: SavedState, seq_id: int) -> bool:
    """Whether llama.cpp accepted the state for its tokens; if not, the sequence is empty."""
    memory, state, n_tokens = _memory(llm), saved.main, len(saved.tokens)
    taken = set_sequence_state(llm.ctx, state, seq_id)
    if taken != state.size or int(llama_cpp.llama_memory_seq_pos_max(memory, seq_id)) != n_tokens - 1:
        llama_cpp.llama_memory_seq_rm(memory, seq_id, -1, -1)
        n_tokens = 0
    if seq_id == 0:
        _note_tokens(llm, saved.tokens[:n_tokens])
    return n_tokens > 0


def _note_tokens(llm: Any, tokens: Tokens) -> None:
    """Sets the tokens that `Llama` has in its sequence, and marks its logits as outdated."""
    llm.input_ids[: len(tokens)] = tokens
    llm.n_tokens = len(tokens)
    llm._requires_eval = True


def _to_sequence(context: Any) -> Bytes:
    """Converts the state of a whole context with one sequence into the state of that sequence. Raises LayoutError."""
    data = np.frombuffer(context, np.uint8)
    found = layout.parse(data)
    if found.envelope != "context":
        raise LayoutError(f"the state has the envelope {found.envelope!r}, that of a context expected")
    return _rewrap(data, found, _SEQUENCE_HEAD, 1)


def _to_context(sequence: Bytes, llm: Any) -> Bytes:
    """Converts the state of a sequence into that of a whole context, for `Llama.load_state`. Raises LayoutError."""
    found = layout.parse(sequence)
    if found.envelope != "sequence, with header":
        raise LayoutError(f"the state has the envelope {found.envelope!r}, that of a sequence expected")
    name = str(llm.metadata["general.architecture"]).encode()
    return _rewrap(sequence, found, np.frombuffer(len(name).to_bytes(4, "little") + name, np.uint8), 0)


def _rewrap(data: Bytes, found: Any, head: Bytes, n_seq: int) -> Bytes:
    """The state with another header. `n_seq` is the number of sequence ids in its recurrent cell: one in the state of a
    context, none in that of a sequence, and the reverse in the result. Attention cells are the same in both."""
    pieces = [head]
    at = found.state_at
    for part in found.parts:
        if part.kind != "recurrent":
            continue
        n_cells, _, listed = struct.unpack_from("<IiI", data.data, part.start)
        if n_cells != 1 or listed != n_seq:
            raise LayoutError(f"a recurrent state of {n_cells} cells in {listed} sequences, one cell expected")
        ids = part.start + 8
        pieces += [data[at:ids], np.frombuffer(struct.pack("<I", 0) if n_seq else struct.pack("<Ii", 1, 0), np.uint8)]
        at = ids + 4 + 4 * listed
    pieces.append(data[at:])
    return np.concatenate(pieces)


def _fit(state: Bytes, n_tokens: int) -> Bytes:
    """The state cut to the tokens that it is put under. Raises LayoutError where it has fewer, or cannot be cut."""
    return state if layout.parse(state).n_positions == n_tokens else layout.crop(state, n_tokens)


# -- what `Llama` does with a prompt


def _ids(key: Sequence[int]) -> Tokens:
    return np.asarray(key, np.int32)


def _padded(llm: Any, tokens: Tokens) -> npt.NDArray[np.intc]:
    """The tokens in an array of the length that `Llama` uses. The rest is -1, which is not a token and matches none."""
    padded = np.full(llm.input_ids.shape, -1, np.intc)
    padded[: len(tokens)] = tokens
    return padded


def _has_media(llm: Any) -> bool:
    """Whether the context may contain images: the token ids in their places do not identify them."""
    return hasattr(llm.chat_handler, "clip_model_path")


def _cannot_step_back(llm: Any) -> bool:
    return bool(llama_cpp.llama_model_is_recurrent(llm.model) or llama_cpp.llama_model_is_hybrid(llm.model))


def _usable(llm: Any, prompt: Tokens) -> int:
    """The number of tokens of the prompt that `Llama` will reuse from its own memory.

    `Llama` goes back to the first token that differs. If its memory no longer has the sliding window before that token,
    llama.cpp does not object and computes with holes; in that case `Llama` is reset here.
    """
    held = int(llm.n_tokens)
    common = common_prefix_length(llm.input_ids[:held], prompt)
    back_to = min(common, len(prompt) - 1)
    if back_to >= held or (common == held == len(prompt) and not llm._requires_eval):
        return common
    if _cannot_step_back(llm):
        return 0
    n_swa = int(llama_cpp.llama_model_n_swa(llm.model))
    if n_swa > 0 and int(llama_cpp.llama_memory_seq_pos_min(_memory(llm), 0)) > max(0, back_to - n_swa + 1):
        llm.reset()
        return 0
    return common


def _check_fingerprint(store: Store, llm: Any) -> None:
    """Raises InvalidInputError unless the store was opened for this model and context."""
    if not isinstance(store, Store):
        raise InvalidInputError(f"store is {type(store).__name__}, not kvstore.Store")
    wanted = fingerprint_of(llm)
    # The repr of a store contains its fingerprint; newer stores also have an attribute.
    known = getattr(store, "fingerprint", None)
    if known != wanted if known is not None else not repr(store).endswith(f", fingerprint={wanted!r})"):
        raise InvalidInputError(
            "the store was opened with another fingerprint than this model and context have",
            hint="use open_store(path, llm), or Store(path, fingerprint=fingerprint_of(llm))",
        )
