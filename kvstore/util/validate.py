"""Checks of arguments. Every function raises InvalidInputError, which names the argument and says what to give."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..types import Bytes, Tokens
from .buffers import as_u8

I64 = (1 << 63) - 1
U64 = (1 << 64) - 1


def as_tokens(tokens: Any) -> Tokens:
    """Token ids as a new int32 array of shape (n,). Raises InvalidInputError."""
    hint = "give a non-empty flat sequence of token ids"
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"tokens must be integers: {error}", hint=hint) from None
    if array.ndim != 1 or array.size == 0:
        raise InvalidInputError(f"tokens must be a flat list of integers, and have the shape {array.shape}", hint=hint)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"tokens must be integers that fit int32, and are {array.dtype}", hint=hint)
    if array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < -(1 << 31) or high >= 1 << 31:
            raise InvalidInputError(f"token {low if low < -(1 << 31) else high} does not fit int32", hint=hint)
    return array.astype(np.int32)


def choice(value: str, allowed: tuple[str, ...], what: str) -> str:
    """`value`, if it is one of `allowed`."""
    if value not in allowed:
        raise InvalidInputError(f"unknown {what} {reprlib.repr(value)}", hint=f"give one of {', '.join(allowed)}")
    return value


def check_int(value: Any, what: str, low: int, high: int = I64, *, hint: str | None = None) -> int:
    """`value` as an int, if it is an integer in [low, high]. A bool is not an integer here."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        given = reprlib.repr(value) if number is None else str(number) if abs(number) <= U64 else "out of range"
        raise InvalidInputError(f"{what} must be an integer in [{_bound(low)}, {_bound(high)}]; it is {given}", hint=hint)
    return number


def _bound(number: int) -> str:
    """A bound as people write it: 2^63 - 1, not 9223372036854775807."""
    if number > 1 << 31:
        power = number.bit_length()
        if number == (1 << power) - 1:
            return f"2^{power} - 1"
        if number == 1 << power - 1:
            return f"2^{power - 1}"
    return f"-2^{(-number).bit_length() - 1}" if number == -(1 << 63) else str(number)


def check_id(value: Any) -> int:
    """`value` as the id of an entry: a nonzero u64."""
    return check_int(value, "an entry id", 1, U64, hint="give the id of an Entry")


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8 (a lone surrogate cannot)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_state(data: Any, what: str) -> Bytes:
    """A state, which is not empty, as `as_u8` gives it."""
    array = as_u8(data, what)
    if array.size == 0:
        raise InvalidInputError(f"{what} is empty", hint="the engine could not save this state; do not put it")
    return array
