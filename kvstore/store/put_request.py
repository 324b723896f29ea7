"""`PutRequest`: the checked arguments of one put, with the parsed layouts of its states."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .. import bkvd, layout
from ..storage import policy
from ..storage import prefix_index as prefixes
from ..storage.policy import Cuts
from ..types import Bytes, Entry, EntryClass, Source, Tokens
from ..util.hashing import PARALLEL_BYTES, Digests
from ..util.workers import Task, Workers


def new_id() -> int:
    """A random nonzero u64."""
    return secrets.randbelow((1 << 64) - 1) + 1


class ParsedStates:
    """The states of one entry, main and draft, each with its layout. A layout is parsed once, at first use."""

    __slots__ = ("_cuts", "_layouts", "draft", "main")

    def __init__(self, main: Bytes, draft: Bytes | None) -> None:
        self.main = main
        self.draft = draft
        self._layouts: dict[str, layout.Layout | None] = {}
        self._cuts: Cuts | None = None

    def __getitem__(self, part: str) -> Bytes | None:
        return self.main if part == "main" else self.draft

    def layout(self, part: str) -> layout.Layout | None:
        """The layout of the state of a part that is there; None where it is not understood."""
        if part not in self._layouts:
            state = self[part]
            assert state is not None
            self._layouts[part] = policy.layout_of(state)
        return self._layouts[part]

    def cuts(self, n_tokens: int) -> Cuts:
        if self._cuts is None:
            self._cuts = policy.cuts_in(self.layout("main"), n_tokens)
        return self._cuts


class Samples(Mapping[str, int]):
    """The sample hashes of states, by part: what a delta against each records. Computed on access, or by a worker."""

    def __init__(self, states: ParsedStates) -> None:
        self._states = states
        self._begun: dict[str, Task[int]] = {}
        self._known: dict[str, int] = {}

    def begin(self, workers: Workers) -> None:
        """Starts computing. The states must not change until the hashes were read, or `cancel` has returned."""
        for name in self:
            state = self._states[name]
            if state is not None and state.size >= PARALLEL_BYTES and name not in self._known:
                self._begun[name] = workers.begin(functools.partial(bkvd.sample_hash, state))

    def cancel(self) -> None:
        begun, self._begun = self._begun, {}
        for task in begun.values():
            task.cancel()

    def __getitem__(self, name: str) -> int:
        if name not in self._known:
            task = self._begun.pop(name, None)
            self._known[name] = bkvd.sample_hash(self._states[name]) if task is None else task.result()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in ("main", "draft") if self._states[name] is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True, slots=True, eq=False)
class PutRequest:
    """A put whose arguments have been checked. The arrays are the caller's, or private copies (`owned`).

    `promised` is the entry that the caller was given already: it is stored with those times and that class. `base`: it is
    stored as a base, for entries that come later, and takes nothing out of the list.
    """

    id: int
    tokens: Tokens
    key: bytes
    states: ParsedStates
    digests: Digests
    samples: Samples
    entry_class: EntryClass
    source: Source
    ttl: int | None
    family: int
    excerpt: str
    n_input: int
    n_images: int
    share: bool
    head: bytes | None = None
    promised: Entry | None = None
    base: bool = False

    @property
    def main(self) -> Bytes:
        return self.states.main

    @property
    def draft(self) -> Bytes | None:
        return self.states.draft

    @property
    def size(self) -> int:
        return self.main.size + (0 if self.draft is None else self.draft.size)

    @property
    def cuts(self) -> Cuts:
        return self.states.cuts(len(self.tokens))

    def contains(self, old: Entry, has_draft: bool) -> bool:
        """Whether the put can serve every request that an entry can whose tokens begin its own: that leaves the list then."""
        if old.entry_class != "normal" or not self.cuts.serves(old.n_tokens):
            return False
        return old.n_images == self.n_images == 0 and (self.draft is not None or not has_draft)

    def entry(self, now: int, stored: int, parent: int | None) -> Entry:
        if self.promised is not None:
            return replace(self.promised, stored=stored, parent=parent)
        return Entry(
            id=self.id,
            n_tokens=len(self.tokens),
            n_images=self.n_images,
            entry_class=self.entry_class,
            source=self.source,
            created_at=now,
            last_used=now,
            expires_at=policy.expires_at(now, self.ttl),
            ttl=self.ttl,
            hits=0,
            family=self.family,
            n_input=self.n_input,
            excerpt=self.excerpt,
            parent=parent,
            size=self.size,
            stored=stored,
        )


def new_request(
    tokens: Tokens,
    main: Bytes,
    draft: Bytes | None,
    *,
    entry_class: EntryClass,
    source: Source,
    ttl: int | None,
    family: int,
    excerpt: str,
    n_input: int,
    n_images: int,
    share: bool,
    head: bytes | None,
    id: int | None = None,
    base: bool = False,
) -> PutRequest:
    """The request of checked arguments; `id` is None for a new one."""
    states = ParsedStates(main, draft)
    return PutRequest(
        id=new_id() if id is None else id,
        tokens=tokens,
        key=prefixes.key_of(tokens),
        states=states,
        digests=Digests(main=main, draft=draft),
        samples=Samples(states),
        entry_class=entry_class,
        source=source,
        ttl=ttl,
        family=family,
        excerpt=excerpt,
        n_input=n_input,
        n_images=n_images,
        share=share,
        head=head,
        base=base,
    )
