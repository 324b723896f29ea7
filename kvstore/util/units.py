"""Durations and sizes with units: 90s, 15min, 12h, 7d; 512M, 8G, 1.5GiB."""

from __future__ import annotations

import math
import re

from ..errors import InvalidInputError

DURATIONS = "90s, 15min, 12h, 7d or 2w"
SIZES = "512M, 8G or 1.5GiB"
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = re.compile(r"(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e-?[0-9]+)?)[ ]?([a-z]*)", re.IGNORECASE)


def _parsed(text: str) -> tuple[float, str] | None:
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not math.isfinite(float(found[1])):
        return None
    return float(found[1]), found[2].lower()


def seconds(text: str, *, bare: float | None = None) -> float:
    """A duration in seconds. `bare` is the unit, in seconds, of a number without a unit; None: such a number is refused.

    Raises InvalidInputError.
    """
    found = _parsed(text)
    if found is None or (found[1] and found[1] not in _SECONDS):
        raise InvalidInputError(f"{text!r} is not a duration", hint=f"give {DURATIONS} (units: s, min, h, d, w)")
    number, unit = found
    if not unit and bare is None:
        raise InvalidInputError(
            f"{text!r} has no unit", hint=f"give {text.strip()}s, {text.strip()}d, ... (units: s, min, h, d, w)"
        )
    return number * (_SECONDS[unit] if unit else bare or 0)


def mib(text: str, *, bare: bool = True) -> float:
    """A size in MiB. K, M, G, T and KiB ... are powers of 1024, KB ... powers of 1000.

    bare: a number without a unit is MiB; False: such a number is refused. Raises InvalidInputError.
    """
    found = _parsed(text)
    match = re.fullmatch(r"(?:([kmgt])(ib|b)?|b)?", found[1]) if found else None
    if found is None or match is None:
        raise InvalidInputError(f"{text!r} is not a size", hint=f"give {SIZES}" + "; a number without a unit is MiB" * bare)
    number, unit = found
    if not unit and not bare:
        hint = f"give {text.strip()}M, {text.strip()}G, ... (units: B, K, M, G, T)"
        raise InvalidInputError(f"{text!r} has no unit", hint=hint)
    if number < 0 and unit:
        raise InvalidInputError(f"{text!r} is negative", hint=f"give {SIZES}, or -1 for no limit")
    if not unit:
        return number
    power = _POWERS.get(unit[0], 0)
    return number * float((1000 if match[2] == "b" else 1024) ** power) / (1 << 20)
