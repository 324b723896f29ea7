"""Bytes and token lists as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..types import Bytes, Tokens

_FIRST_STEP = 256  # tokens compared at first: most pairs of prompts differ early, or not at all


class NotBytesError(InvalidInputError, TypeError):
    """An argument without a C-contiguous buffer."""


def as_u8(data: Any, what: str = "the blob") -> Bytes:
    """Anything bytes-like as a uint8 array of shape (n,), not copied. Raises NotBytesError, which names `what`."""
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous:
        return data
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError):
        raise NotBytesError(
            f"{what} is {type(data).__name__}, not bytes", hint="give bytes, a memoryview, an array or an mmap"
        ) from None
    if not view.c_contiguous:
        raise NotBytesError(f"{what} is not contiguous", hint="give a contiguous copy of it")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def common_prefix_length(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that are equal in both lists."""
    n = int(min(a.shape[0], b.shape[0]))
    at, step = 0, _FIRST_STEP
    while at < n:
        differs = a[at : min(at + step, n)] != b[at : min(at + step, n)]
        if differs.any():
            return at + int(differs.argmax())
        at += step
        step *= 4
    return n
