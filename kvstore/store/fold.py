"""Folds the last links of a chain into what is put: their deltas are composed, so no state is read or built."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from .. import bkvd
from ..errors import CorruptStoreError, DeltaError
from ..storage import policy, queries, queries_chains
from ..storage.db import Connection
from .core import StoreCore
from .entry_codec import Base, Encoded, Part
from .put_request import PutRequest


class Plan(Protocol):
    """What is looked at of a `PutPlan`."""

    @property
    def request(self) -> PutRequest: ...


P = TypeVar("P", bound=Plan)


def folded(core: StoreCore, plan: P, base: Base, encoded: Encoded) -> tuple[P, Encoded]:
    """Shortens a chain that is too long: composes into the delta the small links that only this put needs.

    Gives the plan with its new base, and what to store, which is larger by the bytes of those links. The links themselves go
    when the put is published.
    """
    most = encoded.stored + policy.FOLDED_BYTES
    size = plan.request.size
    child: int | None = None  # the entry that is stored against the base now, if that is a base already
    with core.db.read() as c:
        while len(base.links) > 1 and policy.too_long(1 + len(base.links), size):
            if not _goes(c, base, plan.request, child):
                break
            shorter = _composed(core, c, base, encoded, most)
            if shorter is None:
                break
            child, encoded = base.id, shorter
            above = base.links[1]
            base = Base(above.id, above.n_tokens, base.links[1:], {}, {}, queries_chains.is_base(c, above.id))
    # The states are not needed any more: writing goes on without them.
    return replace(plan, base=replace(base, states={})), encoded  # type: ignore[type-var]


def _goes(c: Connection, base: Base, request: PutRequest, child: int | None) -> bool:
    """Whether nothing but the put, and `child` that goes with it, needs the base: an entry that it contains, or a base."""
    if queries_chains.children(c, base.id) != ([] if child is None else [child]):
        return False
    entry = queries.entry(c, base.id, None, bases=True)
    return entry is not None and (
        queries_chains.is_base(c, base.id) or request.contains(entry, "draft" in base.links[0].rows)
    )


def _composed(core: StoreCore, c: Connection, base: Base, encoded: Encoded, most: int) -> Encoded | None:
    """What to store against the parent of the base, in at most so many bytes; None where that cannot be."""
    parts: list[Part] = []
    link = base.links[0]
    if link.stored > policy.FOLDED_BYTES:
        return None
    try:
        for part in encoded.parts:
            row = link.rows.get(part.name)
            if part.kind == "full":
                parts.append(part)
                continue
            if row is None or row.kind != "bkvd":
                return None
            delta = bkvd.compose(part.data, core.reader.stored(c, link, row), limit=most)
            if delta is None:
                return None
            parts.append(replace(part, kind="bkvd", data=delta.data))
    except (CorruptStoreError, DeltaError):
        return None  # what is damaged is found when it is read
    found = Encoded(parts, encoded.shared, encoded.why_whole)
    return found if found.stored <= most else None
