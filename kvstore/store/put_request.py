"""`PutRequest`: the checked arguments of one put, with the parsed layouts of its states."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from .. import layout
from ..storage import policy
from ..storage import prefix_index as prefixes
from ..storage.policy import Cuts
from ..types import Bytes, Entry, EntryClass, Source, Tokens
from ..util.hashing import Digests


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


@dataclass(frozen=True, slots=True, eq=False)
class PutRequest:
    """A put whose arguments have been checked. The arrays are the caller's, or private copies (`owned`).

    `promised` (write-behind): the entry that the caller already has. The put stores its id, times and class.
    """

    id: int
    tokens: Tokens
    key: bytes
    states: ParsedStates
    digests: Digests
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
) -> PutRequest:
    """The request of checked arguments; `id` is None for a new one."""
    return PutRequest(
        id=new_id() if id is None else id,
        tokens=tokens,
        key=prefixes.key_of(tokens),
        states=ParsedStates(main, draft),
        digests=Digests(main=main, draft=draft),
        entry_class=entry_class,
        source=source,
        ttl=ttl,
        family=family,
        excerpt=excerpt,
        n_input=n_input,
        n_images=n_images,
        share=share,
        head=head,
    )
