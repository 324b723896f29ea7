"""Small states for the tests of the store, and a few helpers around a store's file."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apsw
import layout_states
import numpy as np
import numpy.typing as npt

from kvstore import Store, slotfile

STATES = Path(__file__).parent / "data" / "states"
MIB = 1 << 20
HEADER = struct.pack("<Ii", 0xAF143CD8, 0)


def mixed(n: Any) -> Any:
    """splitmix64 of uint64, element by element."""
    with np.errstate(over="ignore"):
        z = np.asarray(n, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def noise(seed: int, n_bytes: int) -> bytes:
    """The same bytes for the same seed. No layout is found in them."""
    words = mixed(np.arange(-(-n_bytes // 8), dtype=np.uint64) + (mixed(seed) >> np.uint64(1)))
    return bytes(words.tobytes()[:n_bytes])


def state(tokens: Iterable[int], *, row: int = 64, layers: int = 2, model: int = 0) -> bytes:
    """A state of one attention cache, as an engine would compute it: a cell's rows depend on the tokens up to it."""
    tokens = list(tokens)
    n = len(tokens)
    chain = np.empty(n, np.uint64)
    h = model
    for i, token in enumerate(tokens):
        h = (h * 6364136223846793005 + (token & 0xFFFFFFFF) + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        chain[i] = h
    cells = np.zeros((n, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    out = [HEADER, struct.pack("<II", 1, n), cells.tobytes(), struct.pack("<IIII", 0, layers, 0, 0)]
    with np.errstate(over="ignore"):
        for tensor in range(2 * layers):
            lanes = np.arange(row // 8, dtype=np.uint64) + np.uint64(1000 * tensor)
            out.append(struct.pack("<iQ", 1, row))
            out.append(mixed(chain[:, None] + mixed(lanes)[None, :]).tobytes())
    return b"".join(out)


def recurrent_state(n_tokens: int, counts: Sequence[int] = ()) -> bytes:
    """A state that cannot be cut, but for its checkpoints at `counts` tokens."""
    out = HEADER + layout_states.recurrent((n_tokens - 1,), layers=1, n=1, r=32, s=32)
    if counts:
        out += layout_states.checkpoints(
            *((n, n - 1, n - 1, layout_states.recurrent((n - 1,), layers=1, n=1, r=32, s=32)) for n in counts)
        )
    return out


def real(name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Tokens and state of a slot file that a llama-server wrote."""
    slot = slotfile.read(STATES / f"{name}.bin")
    return slot.tokens, slot.state


def dump(store: Store) -> dict[int, tuple[bytes, bytes, bytes | None, str, int | None]]:
    """All that a store gives back, by id: tokens, states, class and parent."""
    out = {}
    for entry in store.entries():
        saved = store.get(entry.id)
        assert saved is not None, entry.hex_id
        draft = None if saved.draft is None else saved.draft.tobytes()
        out[entry.id] = (saved.tokens.tobytes(), saved.main.tobytes(), draft, entry.entry_class, entry.parent)
    return out


def connect(path: Path) -> apsw.Connection:
    """A connection of another program, in this process; by the same SQLite, so that its locks are seen."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    return connection


def file_bytes(path: Path) -> int:
    """Bytes of a store's file and its write-ahead log now."""
    total = 0
    for name in (str(path), f"{path}-wal"):
        with contextlib.suppress(FileNotFoundError):
            total += Path(name).stat().st_size
    return total
