"""What the proxy knows of one slot, and what is said of slots: a choice among them, a listing of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...types import Match, Tokens
from ...util.buffers import common_prefix_length
from .backend import SlotReport
from .prompt import Prompt

NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(eq=False)
class Slot:
    """One slot of the server. Only `SlotTable` assigns to its fields.

    tokens: the leading tokens that the slot is known to hold; n_total also counts the tokens after them. stored: how many
    of the tokens the store can give back. entry: the entry that has them. origin: the request whose answer is not in the
    store yet; n_prompt: the number of its prompt tokens, 0 where it was cut off. chat: shape and messages of the last
    chat. last_listing: task and number of tokens in the server's list of slots after the last request, None if there was
    no list since. unfit: whether the slot may hold anything but the plain computation of its tokens; such a slot is never
    saved. It is fit again once it is erased, restored from the store, or has computed a prompt from its first token on.
    passes: `SlotTable.passes` when the last request in the slot ended. meddled: requests of others for this very slot.
    uses: how often the slot was leased. putting: its saves on their way into the store. warm: whether its state was restored
    before any request asked for it, and no request used it since.
    """

    id: int
    tokens: Tokens = field(default_factory=lambda: NOTHING)
    n_total: int = 0
    stored: int = 0
    entry: int | None = None
    origin: Prompt | None = None
    n_prompt: int = 0
    chat: tuple[dict[str, Any], list[Any]] | None = None
    last_listing: tuple[int | None, int | None] | None = None
    unfit: bool = True
    passes: int = 0
    meddled: int = 0
    uses: int = 0
    busy: bool = False
    putting: int = 0
    used: float = 0.0
    warm: bool = False

    @property
    def needs_erase(self) -> bool:
        """The server would continue from contents that are unknown here."""
        return self.unfit and self.tokens.shape[0] == 0

    def holds(self, tokens: Tokens) -> int:
        return common_prefix_length(self.tokens, tokens)

    @property
    def cut(self) -> bool:
        """The last request was cut off."""
        return self.origin is not None and not self.n_prompt

    @property
    def unsaved(self) -> int:
        return 0 if self.origin is None else max(0, self.n_total - self.stored)


@dataclass(frozen=True)
class Choice:
    """The slot for a request, how many of its tokens the slot holds, and the match to restore first, if one pays."""

    slot: Slot
    held: int
    restore: Match | None
    displaced: int  # tokens that only this slot has, and that the request overwrites
    skipped: bool = False  # a restore would have given more tokens, but not have paid


@dataclass(frozen=True)
class Generation:
    """The state of the table when a look at the server began: what the look shows is old for all that changed since."""

    events: int
    passes: tuple[int, int]
    uses: Mapping[int, int]


@dataclass(frozen=True)
class Listing:
    """The server's list of slots, asked for in a generation of the table."""

    reports: list[SlotReport]
    generation: Generation
