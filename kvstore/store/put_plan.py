"""`PutPlan`: what a put will do. One read transaction makes it; the transaction that publishes the put checks it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..storage import policy, queries, queries_blobs
from ..storage import prefix_index as prefixes
from ..storage.db import Connection
from ..storage.prefix_index import StoredPrefixes
from ..types import Entry
from . import entry_codec
from .core import StoreCore
from .entry_codec import Base, Encoded
from .put_request import PutRequest


class StalePlan(Exception):
    """Another thread or process changed what the plan relies on (the base, the staged blobs): plan again."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """The stored entries that matter to a put.

    same: (id, entry) of the entries with exactly these tokens, which the put replaces; entry is None if its meta row is lost.
    prefixes: the stored prefixes, None where nothing depends on them. learned: (id, n_tokens) of the longest learned one
    that the put may be stored against.
    """

    same: tuple[tuple[int, Entry | None], ...] = ()
    prefixes: StoredPrefixes | None = None
    learned: tuple[int, int] | None = None
    may_share: bool = False

    def contained(self, core: StoreCore, c: Connection, request: PutRequest) -> list[int]:
        """The normal entries that the new one serves, since their tokens begin its own: `c` drops them."""
        if self.prefixes is None or not _may_contain(request):
            return []
        cuts, has_draft = request.cuts, request.draft is not None
        return [
            id
            for id, n in self.prefixes.chosen(c, core.now(), "removable")
            if cuts.serves(n) and (has_draft or len(queries_blobs.blobs(c, id)) == 1)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PutPlan:
    """The decisions of one put.

    identical: the entry that already holds these tokens and bytes. Then only its meta changes, and the other fields are unused.
    base: what the state is encoded against, in the version that was read; None: it is stored whole, for the reason
    `why_whole`, which is the name of a counter.
    """

    request: PutRequest
    found: Findings
    identical: Entry | None
    base: Base | None
    why_whole: str

    @property
    def base_id(self) -> int | None:
        return None if self.base is None else self.base.id

    def still_valid(self, c: Connection, now: Findings) -> bool:
        """Whether what is built can be published, given what the file has `now`."""
        if self.base is not None and queries_blobs.version(c, self.base.id) != self.base.version:
            return False
        return now.learned == self.found.learned

    def encode(self, core: StoreCore) -> tuple[PutPlan, Encoded]:
        """The encoded parts, and the plan to publish them by: without a base if the delta saves too little."""
        request = self.request
        encoded = entry_codec.encode_entry(core.reader, request.states, request.digests, self.base, core.min_saved)
        if encoded.shared or self.base is None:
            return self, encoded
        return replace(self, base=None, why_whole=encoded.why_whole), encoded


def make_plan(core: StoreCore, request: PutRequest, *, owned: bool) -> PutPlan:
    """Plans a request. `owned`: the caller already has the id, so an identical entry with another id is replaced."""
    with core.db.read() as c:
        fingerprint = core.fingerprint_id(c)
        found = Findings(may_share=_asks_to_share(request))
        identical = None
        if fingerprint is not None:
            found = look(core, c, fingerprint, request)
            identical = _identical(core, c, found, request)
            if owned and identical is not None and identical.id != request.id:
                identical = None
        base = None
        if identical is None and found.learned is not None:
            base = entry_codec.load_base(core.reader, c, *found.learned)
    return PutPlan(request, found, identical, base, _why_whole(request, found))


def look(core: StoreCore, c: Connection, fingerprint: int, request: PutRequest, *, publishing: bool = False) -> Findings:
    """Finds the entries that matter to a request: one look-up of the same tokens, at most one walk over the prefixes.

    publishing: called in the transaction that publishes the put, which also needs the entries that the put contains.
    """
    same = tuple((id, queries.entry(c, id, None)) for id in queries.same_tokens(c, fingerprint, request.key))
    may_share = _asks_to_share(request) and _stays_unlearned(core, same, request)
    wants_base = may_share and queries.has_class(c, "learned")
    if not wants_base and not (publishing and _may_contain(request)):
        return Findings(same, None, None, may_share)
    now = core.now()
    # The last token is left out: a proper prefix.
    walked = prefixes.stored_prefixes(c, core.filters, fingerprint, request.key[:-4], now, committed=not publishing)
    return Findings(same, walked, prefixes.find_base(c, walked, now) if wants_base else None, may_share)


def find_identical(core: StoreCore, c: Connection, fingerprint: int, request: PutRequest) -> Entry | None:
    """The live entry that already holds exactly these tokens and bytes. An entry that a queued put renewed counts as live."""
    same = tuple((id, queries.entry(c, id, None)) for id in queries.same_tokens(c, fingerprint, request.key))
    return _identical(core, c, Findings(same), request)


def _identical(core: StoreCore, c: Connection, found: Findings, request: PutRequest) -> Entry | None:
    for id, entry in found.same:
        rows = queries_blobs.blobs(c, id)
        if entry is None or (core.is_expired(entry) and id != request.id):
            continue
        if {row.part: row.size for row in rows} != request.digests.sizes:
            continue
        if {row.part: row.digest for row in rows} == request.digests:
            return entry
    return None


def _asks_to_share(request: PutRequest) -> bool:
    return request.share and request.entry_class != "learned"


def _stays_unlearned(core: StoreCore, same: tuple[tuple[int, Entry | None], ...], request: PutRequest) -> bool:
    """Whether the put stays what it is: one that replaces a learned entry may become learned, and is then whole."""
    new = request.entry_class, request.source
    old = [(e.entry_class, e.source) for _, e in same if e is not None and not core.is_expired(e)]
    return all(policy.merged_class(one, new)[0] != "learned" for one in old)


def _may_contain(request: PutRequest) -> bool:
    return not request.n_images and bool(request.cuts.any or request.cuts.counts)


def _why_whole(request: PutRequest, found: Findings) -> str:
    """Why a put without a base is stored whole."""
    if request.entry_class == "learned":
        return "learned"
    if not request.share:
        return "not_asked"
    if not found.may_share:
        return "learned"
    return "no_prefix" if found.learned is None else "damaged_prefix"
