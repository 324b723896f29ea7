"""The options of a remote, checked before anything is asked of the object store."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError
from ..util.validate import choice
from .keys import load_keys

PUBLISH = ("learned", "all", "none")
DAY = 86400.0
# What remote_options may hold beside the options of the object store: name -> (least, most).
OURS: dict[str, tuple[float, float]] = {
    "poll_seconds": (0.0, DAY),
    "lifetime_days": (1 / 24, 36500.0),
    "prefetch_gib": (0.0, 1e6),
    "min_tokens": (1.0, 1e9),
    "close_seconds": (0.0, 3600.0),
}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """url, keys: the root in the object store, and the fleet's keys, the current one first. publish: which entries.

    poll_seconds: between two listings, at least. lifetime_days: of an object; the lifecycle rule of the bucket says the same.
    prefetch_gib: bytes of new learned objects that are fetched before anyone asks for them. min_tokens: a fetch must save as
    many. close_seconds: a close waits so long for uploads of an object store that answers.
    """

    url: str
    keys: tuple[bytes, ...] = field(repr=False)
    publish: str = "learned"
    poll_seconds: float = 30.0
    lifetime_days: float = 30.0
    prefetch_gib: float = 0.0
    min_tokens: int = 512
    close_seconds: float = 5.0
    store_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def lifetime(self) -> float:
        return self.lifetime_days * DAY

    @property
    def prefetch_bytes(self) -> int:
        return int(self.prefetch_gib * GIB)


def remote_options(url: object, key: object, publish: str = "learned", options: object = None) -> RemoteOptions:
    """Raises InvalidInputError, RemoteKeyError."""
    if isinstance(url, os.PathLike):
        raise InvalidInputError(f"remote is the path {os.fspath(url)}", hint="give an address: file:///FOLDER")
    if not isinstance(url, str) or not url:
        raise InvalidInputError(f"remote is {url!r}", hint="give an address, such as s3://BUCKET/PREFIX")
    choice(publish, PUBLISH, "value of publish")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidInputError(f"remote_options is {type(options).__name__}, not a dict")
    given: dict[str, Any] = dict(options or {})
    numbers: dict[str, float] = {}
    for name, (least, most) in OURS.items():
        if name in given:
            numbers[name] = _number(name, given.pop(name), least, most)
    if not all(isinstance(name, str) for name in given):
        raise InvalidInputError("the names in remote_options must be text")
    tokens = {"min_tokens": int(numbers.pop("min_tokens"))} if "min_tokens" in numbers else {}
    return RemoteOptions(url, tuple(load_keys(key)), publish, store_options=given, **numbers, **tokens)  # type: ignore[arg-type]


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise InvalidInputError(f"{name} in remote_options is {value!r}", hint=f"give a number from {least:g} to {most:g}")
    return float(value)
