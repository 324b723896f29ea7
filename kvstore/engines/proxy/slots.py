"""What the proxy knows of the server's slots, what things cost, and which slot a request goes to."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...types import Entry, Match, Tokens
from .prompt import Prompt, common
from .upstream import UpstreamError

NOTHING: Tokens = np.empty(0, np.int32)
_TAINTS = (b'"lora"', b'"n_cache_reuse"')
_SLOT_ACTION = re.compile(r"/slots/(\d+)")


class _Speed:
    """Seconds a byte, of measurements of which the latest count most. Small transfers say little of it, since a busy
    machine delays them by more than they take: the guess that is there at first has the weight of 64 MiB."""

    GUESS, WEIGHT = 0.5e-9, 64 << 20

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def measured(self, n_bytes: int, seconds: float) -> None:
        self._bytes = 0.7 * self._bytes + n_bytes
        self._seconds = 0.7 * self._seconds + max(0.0, seconds)

    def faster(self) -> None:
        self._seconds *= 0.9

    @property
    def byte(self) -> float:
        return (self.GUESS * self.WEIGHT + self._seconds) / (self.WEIGHT + self._bytes)


class Rates:
    """What computing, restoring and saving cost, as measured here; a guess in favour of a restore until then."""

    FIXED = 0.002  # seconds a restore or save takes whatever its size

    def __init__(self) -> None:
        self.prefill: float | None = None  # seconds a token
        self._restores, self._saves = _Speed(), _Speed()
        self.token_bytes = 0.0

    @property
    def restore_byte(self) -> float:
        return self._restores.byte

    @property
    def save_byte(self) -> float:
        return self._saves.byte

    def computed(self, n: int, seconds: float) -> None:
        if n >= 32 and seconds > 0:
            self.prefill = seconds / n if self.prefill is None else 0.7 * self.prefill + 0.3 * seconds / n

    def restored(self, n_bytes: int, seconds: float) -> None:
        self._restores.measured(n_bytes, seconds - self.FIXED)

    def saved(self, n_tokens: int, n_bytes: int, seconds: float) -> None:
        self._saves.measured(n_bytes, seconds - self.FIXED)
        self.token_bytes = n_bytes / max(1, n_tokens)

    def skipped(self) -> None:
        """A restore was found not to pay. One slow restore must not end all others: without new ones there is no new
        measurement, so the estimate goes down again."""
        self._restores.faster()

    def prefill_seconds(self, n: float) -> float:
        return n * (1e-3 if self.prefill is None else self.prefill)

    def restore_seconds(self, n_bytes: float) -> float:
        return self.FIXED + n_bytes * self.restore_byte

    def save_seconds(self, n_tokens: float) -> float:
        return self.FIXED + n_tokens * self.token_bytes * self.save_byte


@dataclass(eq=False)
class Slot:
    """One slot of the server.

    tokens: the leading tokens it is known to hold; n_total counts those that followed too. stored: how many of them the
    store can give back. origin: the request whose answer is not in the store yet. chat: shape and messages of the last
    chat. seen: what /slots said after the last request, None if that was not asked since. unfit: whether the slot may
    hold anything but the plain computation of its tokens: such a slot is never saved. It is fit again once it is erased,
    restored from the store, or has computed a prompt from its first token on. passes: how many requests had passed
    through when the last one ended. meddled: requests of others for this very slot.
    """

    id: int
    tokens: Tokens = field(default_factory=lambda: NOTHING)
    n_total: int = 0
    stored: int = 0
    entry: int | None = None
    origin: Prompt | None = None
    n_prompt: int = 0
    chat: tuple[dict[str, Any], list[Any]] | None = None
    seen: tuple[Any, Any] | None = None
    unfit: bool = True
    passes: int = 0
    meddled: int = 0
    uses: int = 0
    busy: bool = False
    putting: int = 0
    used: float = 0.0

    def forget(self) -> None:
        """What it holds is not known, or not to be kept."""
        self.tokens, self.n_total, self.stored, self.entry = NOTHING, 0, 0, None
        self.origin = self.chat = self.seen = None
        self.unfit = True

    @property
    def needs_erase(self) -> bool:
        """The server would go on from contents that nothing is known of."""
        return self.unfit and self.tokens.shape[0] == 0

    def holds(self, tokens: Tokens) -> int:
        return common(self.tokens, tokens)

    @property
    def cut(self) -> bool:
        """The last request was cut off."""
        return self.origin is not None and not self.n_prompt

    @property
    def unsaved(self) -> int:
        return 0 if self.origin is None else max(0, self.n_total - self.stored)


@dataclass(frozen=True)
class Choice:
    """The slot for a request, how many of its tokens it holds, and the match to restore first, if one pays."""

    slot: Slot
    held: int
    restore: Match | None
    displaced: int  # tokens of the slot that nobody else has, and that the request overwrites
    skipped: bool = False  # a restore would have given more, and not have paid


def restore_bytes(entry: Entry, n: int) -> float:
    return entry.size * n / max(1, entry.n_tokens)


class Slots:
    """The slots, and who has them. Requests wait here where all are taken."""

    def __init__(self, rates: Rates, min_gain: int) -> None:
        self.rates = rates
        self.min_gain = min_gain
        self.all: list[Slot] = []
        self.events = 0  # how often a slot was taken or given back: what was listed before is old then
        self.foreign = 0  # requests under way that the server finds a slot for by itself
        self.passes = 0  # how many of them have ended
        self.tainting = self.tainted = 0  # of them, those with adapters or moved chunks: under way, and begun in all
        # Whether the server's own cache of prompts may have states that no request of ours computed.
        self.strangers = True
        self.waiting = 0
        self.last_active = time.monotonic()
        self._free = asyncio.Condition()

    async def reset(self, n: int) -> None:
        """New slots, all empty. Who holds an old one gives it back to nobody, who waits for one gets none."""
        async with self._free:
            self.all = [Slot(i) for i in range(n)]
            self.events += 1
            self._free.notify_all()

    def lost(self) -> None:
        """The server unloaded its model, and what the slots held."""
        for slot in self.all:
            if not slot.busy:
                slot.forget()

    @property
    def quiet(self) -> bool:
        """Nothing of ours runs in the server."""
        return not self.foreign and not self.waiting and not any(slot.busy for slot in self.all)

    @contextmanager
    def passing(self, path: str = "", body: bytes = b"") -> Iterator[None]:
        """A request that the server finds a slot for: afterwards any slot may hold something else. `path` tells whether
        it names a slot itself (save, restore, erase), `body` whether it wants other numbers than other requests get."""
        taints = any(name in body for name in _TAINTS)
        self.foreign += 1
        self.events += 1
        self.strangers = True
        self.tainting += taints
        self.tainted += taints
        self._meddle(path)
        try:
            yield
        finally:
            self._meddle(path)
            self.tainting -= taints
            self.foreign -= 1
            self.events += 1
            self.passes += 1
            self.last_active = time.monotonic()

    def _meddle(self, path: str) -> None:
        if (found := _SLOT_ACTION.match(path)) and int(found[1]) < len(self.all):
            slot = self.all[int(found[1])]
            slot.meddled += 1
            slot.forget()

    async def acquire(self, prompt: Prompt, match: Match | None, stuck: frozenset[int] = frozenset()) -> Choice:
        """Waits for a slot. `stuck` are slots that the server says to be working for somebody else.

        Raises UpstreamError where the server went away meanwhile.
        """
        self.waiting += 1
        now = self.all
        try:
            async with self._free:
                while self.all is now and now:
                    free = [s for s in self.all if not s.busy and (prompt.id_slot is None or s.id == prompt.id_slot)]
                    if free:
                        free = [s for s in free if s.id not in stuck] or free
                        choice = min((self._weigh(s, prompt, match) for s in free), key=lambda c: c[0])[1]
                        self.take(choice.slot)
                        return choice
                    await self._free.wait()
            raise UpstreamError("llama-server went away")
        finally:
            self.waiting -= 1

    def take(self, slot: Slot) -> bool:
        """Without waiting: only if it is free now."""
        if slot.busy:
            return False
        slot.busy = True
        self.events += 1
        slot.uses += 1
        return True

    async def release(self, slot: Slot) -> None:
        async with self._free:
            slot.busy = False
            self.events += 1
            self._free.notify_all()
        self.last_active = time.monotonic()

    def choose(self, slot: Slot, prompt: Prompt, match: Match | None) -> Choice:
        """What to do with a slot that the request has already."""
        return self._weigh(slot, prompt, match)[1]

    def _weigh(self, slot: Slot, prompt: Prompt, match: Match | None) -> tuple[tuple[float, float], Choice]:
        """Seconds that the request would cost in this slot, with what it would take from the slot's present owner."""
        rates = self.rates
        n = 0 if prompt.tokens is None else prompt.tokens.shape[0]
        held = 0 if prompt.tokens is None else slot.holds(prompt.tokens)
        rest = slot.n_total - slot.tokens.shape[0] if held == slot.tokens.shape[0] else 0
        restore, skipped = None, False
        cost = rates.prefill_seconds(n - held)
        if match is not None and match.n_common - held >= self.min_gain + rest and match.entry.id != slot.entry:
            other = rates.prefill_seconds(n - match.n_common) + rates.restore_seconds(
                restore_bytes(match.entry, match.n_common)
            )
            if other < cost:
                restore, cost = match, other
            else:
                skipped = True
        # What goes on from most of a slot is taken for the same conversation.
        lost = slot.n_total - held if slot.n_total - held > max(self.min_gain, 0.25 * held) + rest else 0
        displaced = lost if slot.unsaved >= self.min_gain and lost else 0
        if lost:
            back = rates.restore_seconds(slot.n_total * rates.token_bytes)
            age = time.monotonic() - slot.used
            cost += (back + (rates.prefill_seconds(slot.unsaved) if displaced else 0)) / (1 + age / 60)
        return (cost, slot.used), Choice(slot, held, restore, displaced, skipped)
