"""What callers hand in, checked: every function raises InvalidInputError, which names the argument and what to give."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..types import Bytes, Tokens


def as_tokens(tokens: Any) -> Tokens:
    """Token ids as a new int32 array of shape (n,). Raises InvalidInputError."""
    hint = "give a non-empty flat sequence of token ids"
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"tokens are no integers: {error}", hint=hint) from None
    if array.ndim != 1 or array.size == 0:
        raise InvalidInputError(f"tokens have the shape {array.shape}", hint=hint)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"tokens are {array.dtype}, not int32", hint=hint)
    if array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < -(1 << 31) or high >= 1 << 31:
            raise InvalidInputError(f"token {low if low < -(1 << 31) else high} does not fit int32", hint=hint)
    return array.astype(np.int32)


def choice(value: str, allowed: tuple[str, ...], what: str) -> str:
    """`value`, if it is one of those allowed."""
    if value not in allowed:
        raise InvalidInputError(f"unknown {what} {value!r}", hint=f"one of {', '.join(allowed)}")
    return value


def whole(value: Any, what: str, low: int, high: int = (1 << 63) - 1) -> int:
    """`value` as an int, if it is a whole number in the range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise InvalidInputError(f"{what} is {value!r}", hint=f"give a whole number from {low}")
    return int(value)


def entry_id(value: Any) -> int:
    """`value` as the id of an entry: a nonzero u64."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 < value < 1 << 64:
        raise InvalidInputError(f"id {value!r} is no entry id", hint="ids are whole numbers from 1 to 2^64 - 1")
    return int(value)


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8 (a lone surrogate cannot)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_array(data: Any, what: str) -> Bytes:
    """Anything bytes-like as a uint8 array of shape (n,), not copied. Raises InvalidInputError."""
    try:
        view = memoryview(data)
    except TypeError:
        raise InvalidInputError(
            f"{what} is {type(data).__name__}, not bytes", hint="give bytes, a memoryview, an array or an mmap"
        ) from None
    if not view.c_contiguous:
        raise InvalidInputError(f"{what} is not contiguous", hint="give a contiguous copy of it")
    if view.nbytes == 0:
        raise InvalidInputError(f"{what} is empty", hint="a state that the engine could not save is not worth keeping")
    return np.frombuffer(view, np.uint8)
