"""How much memory the states on their way between the proxy and llama-server may take, and which of them take it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..exchange import Mapping

_CGROUP = Path("/sys/fs/cgroup")
_MARGIN = 1.25  # of an estimate: checkpoints and the tokens of an answer come on top
MIB = 1 << 20


def default_budget() -> int:
    """A quarter of the RAM that this process may use; 0 where the system does not say how much that is."""
    try:
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2 and 1
        with suppress(OSError, ValueError):  # "max": no limit
            ram = min(ram, int((_CGROUP / name).read_text()))
    return max(0, ram) // 4


def _available() -> int | None:
    """The bytes that can be allocated without swapping; None where the system does not say."""
    with suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    return None


class SlotMemory:
    """A budget in bytes; 0 turns the use of memory off.

    `off` says why states take the disk, "" while they may take memory. Nothing limits what a server writes into a memfd,
    so a save reserves what its state is estimated to have. A state that turns out larger is kept all the same: it counts
    as long as it is referred to, and the next estimate knows its size.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = default_budget() if budget is None else budget
        self.off = "it was not tried yet"
        if sys.platform != "linux":
            self.budget, self.off = 0, "only Linux has files in memory that a server can open"
        elif not self.budget:
            self.off = "--slot-memory is 0"
        self._reserved = 0
        self._mappings: WeakSet[Mapping] = WeakSet()
        # Tokens and bytes of states of this server: the shortest, and the latest of at least twice as many tokens.
        self._small = self._latest = (0, 0)

    @property
    def used(self) -> int:
        """Bytes of all states in memory, and of the reservations."""
        return self._reserved + sum(len(mapping) for mapping in tuple(self._mappings))

    def turn_on(self) -> None:
        self.off = ""

    def turn_off(self, why: str) -> None:
        if self.budget:
            self.off = why

    def reserve(self, n_bytes: int) -> bool:
        """Whether a state of so many bytes may take memory. If so, `release` gives the bytes back."""
        if self.off or n_bytes > self.budget - self.used:
            return False
        available = _available()
        if available is not None and 2 * n_bytes > available:
            return False
        self._reserved += n_bytes
        return True

    def release(self, n_bytes: int) -> None:
        self._reserved -= n_bytes

    def hold(self, mapping: Mapping) -> None:
        """The mapping counts until nothing refers to it."""
        self._mappings.add(mapping)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `off` is None while states may take memory."""
        return {"budget_bytes": self.budget, "used_bytes": self.used, "off": self.off or None}

    # -- the sizes of states

    def new_server(self) -> None:
        """Its states may have other sizes, and it may not see our memory."""
        self._small = self._latest = (0, 0)
        self.turn_off("it was not tried yet")

    def seen(self, n_tokens: int, n_bytes: int) -> None:
        """A state of this server has this size."""
        few = self._small[0]
        if n_tokens > 0 and (not few or n_tokens <= few):
            self._small = (n_tokens, n_bytes)
        elif n_tokens >= 2 * few:
            self._latest = (n_tokens, n_bytes)

    def estimate(self, n_tokens: int) -> int:
        """The bytes that a state of n tokens should have at most. Recurrent parts do not grow with the tokens, so two sizes
        give a line; one gives a proportion, which is too much for them."""
        (few, least), (many, most) = self._small, self._latest
        if not few:
            return 0
        if many:
            size = max(least, most, most + (most - least) / (many - few) * (n_tokens - many)) if n_tokens > many else most
        else:
            size = least * max(1.0, n_tokens / few)
        return int(_MARGIN * size)
