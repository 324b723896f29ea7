"""A computed probe: the state of a few fixed tokens shows every setting that changes the numbers.

With the tiny models and SmolLM2 (CPU), the rows are bit-identical for all numbers of threads, batch sizes, context sizes
and numbers of slots. They differ between flash attention on and off, as all states do. Without flash attention, the sums
over V also depend on the place of the cells in a shared buffer (`depends_on_others`).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from .. import layout

# Every vocabulary has the tokens 0, 1 and 2. The sequence has no period.
TOKENS = [(i * i + i // 3 + i // 7) % 3 for i in range(40)]


def tokens(n_ctx: int) -> list[int]:
    """The probe for a context of n_ctx tokens; it leaves room for one more token."""
    return TOKENS[: max(1, min(len(TOKENS), n_ctx - 2))] if n_ctx > 0 else TOKENS


def rows_digest(state: npt.NDArray[np.uint8]) -> str:
    """Digest of the positions and rows of a state, independent of the order of its cells. Raises LayoutError.

    Of checkpoints, only their presence counts: their number depends on the batch size.
    """
    found = layout.parse(state)
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(b"checkpoints" if found.checkpoints else b"")
    for part in found.parts:
        if not isinstance(part, layout.AttentionPart):
            hashed.update(state[part.start : part.stop].tobytes())
            continue
        for stream in part.streams:
            order = np.argsort(stream.pos, kind="stable")
            hashed.update(b"stream" + stream.pos[order].tobytes() + stream.ext[order].tobytes() if stream.n_cells else b"")
            for section in stream.sections:
                size = section.rows * stream.n_cells * section.width
                rows = state[section.start : section.start + size].reshape(section.rows, stream.n_cells, section.width)
                hashed.update(f"{section.is_v} {section.type} {section.rows} {section.width}".encode())
                hashed.update(rows[:, order].tobytes())
    return hashed.hexdigest()


def depends_on_others(state: npt.NDArray[np.uint8], n_slots: int) -> bool:
    """Whether the contents of other slots may change the last bits of this state: a sum over a transposed V covers the
    whole buffer, and its order of addition depends on the place of the cells. Raises LayoutError."""
    parts = layout.parse(state).attention
    return n_slots > 1 and any(part.v_transposed and part.n_stream in (None, 1) for part in parts)


def is_plain(state: npt.NDArray[np.uint8], n_tokens: int) -> bool:
    """Whether a state has the cells of the tokens 0 to n_tokens - 1, each once: the first cache has all of them, a window
    the last ones, and a recurrent state ends with the last. Raises LayoutError."""
    found = layout.parse(state)
    for i, part in enumerate(found.attention):
        stream = part.data_stream
        if stream is None:
            return False
        n = n_tokens if i == 0 else stream.n_cells
        if stream.n_cells != n or not 0 < n <= n_tokens:
            return False
        if not np.array_equal(np.sort(stream.pos), np.arange(n_tokens - n, n_tokens)):
            return False
    return all(part.max_pos == n_tokens - 1 for part in found.parts)
