"""Checks of arguments. Every function raises InvalidInputError, which names the argument and says what to give."""

from __future__ import annotations

import operator
import re
import reprlib
from datetime import timedelta
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..types import Bytes, Entry, Tokens
from . import units
from .buffers import as_u8

I64 = (1 << 63) - 1
U64 = (1 << 64) - 1
MAX_SECONDS = 1 << 40


def as_tokens(tokens: Any) -> Tokens:
    """Token ids as a new int32 array of shape (n,). Raises InvalidInputError."""
    hint = "give a non-empty flat sequence of token ids"
    wanted = "tokens must be integers, shape (n,)"
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidInputError(f"{wanted}; got {type(tokens).__name__}", hint="are tokens and state swapped?")
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInputError(f"{wanted}; got a {type(tokens).__name__} of other values", hint=hint) from None
    if array.ndim == 0:
        raise InvalidInputError(f"{wanted}; got {type(tokens).__name__}", hint=hint)
    if array.ndim != 1 or array.size == 0:
        raise InvalidInputError(f"{wanted}; got the shape {array.shape}", hint=hint)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{wanted}; got {array.dtype}", hint=hint)
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


def check_int(value: Any, what: str, low: int, high: int = I64, *, hint: str | None = None, why: str = "") -> int:
    """`value` as an int, if it is an integer in [low, high]. A bool is not an integer here.

    `why` says where the upper bound comes from.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        given = reprlib.repr(value) if number is None else str(number) if abs(number) <= U64 else "out of range"
        bounds = f"[{_bound(low)}, {_bound(high)}]{why and ', ' + why}"
        raise InvalidInputError(f"{what} must be an integer in {bounds}; it is {given}", hint=hint)
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


def lifetime(value: Any, what: str = "ttl", low: int = 1) -> int:
    """Whole seconds of a number, a timedelta, or a duration as people write it ("7d"), from `low` on."""
    if isinstance(value, str):
        try:
            value = units.seconds(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"{what} is in seconds; {error.message}", hint=error.hint) from None
    elif isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, int | np.integer):
        hint = 'give seconds, a timedelta, or text such as "7d"'
        raise InvalidInputError(f"{what} is {value!r}, not whole seconds", hint=hint)
    if not low <= value <= MAX_SECONDS:
        least = f"at least {low} second" if value < low else f"at most {MAX_SECONDS} seconds"
        never = "None means never" if low else "0 means never"
        raise InvalidInputError(f"{what} must be {least}; {never}", hint=f"it was {value:g} s")
    return int(value)


def check_id(value: Any) -> int:
    """The id of an entry: the entry itself, a nonzero u64, or the 16 hex digits of one."""
    if isinstance(value, Entry):
        value = value.id
    elif isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{16}", value):
        value = int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 < value < 1 << 64:
        raise InvalidInputError(
            f"{reprlib.repr(value)} is not the id of an entry",
            hint="give an entry, an integer from 1 to 2^64 - 1, or 16 hex digits",
        )
    return int(value)


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
