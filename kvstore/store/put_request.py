"""A put on its way: what the caller gave, checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from ..storage import policy
from ..storage.policy import Cuts
from ..types import Bytes, Entry, EntryClass, Source, Tokens
from ..util.hashing import Digests


def new_id() -> int:
    """A random nonzero u64."""
    return secrets.randbelow((1 << 64) - 1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A put whose arguments have been checked. The arrays are the caller's, or private copies (`owned`).

    `promised` is the entry that the caller was given already: it is stored with those times and that class.
    """

    id: int
    tokens: Tokens
    key: bytes
    main: Bytes
    draft: Bytes | None
    digests: Digests
    cuts: Cuts
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
    def size(self) -> int:
        return self.main.size + (0 if self.draft is None else self.draft.size)

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
