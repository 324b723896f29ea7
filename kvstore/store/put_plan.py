"""`PutPlan`: what a put will do. One read transaction makes it; the transaction that publishes the put checks it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..storage import policy, queries, queries_blobs, queries_chains
from ..storage import prefix_index as prefixes
from ..storage.db import Connection
from ..storage.prefix_index import StoredPrefixes
from ..types import Entry
from . import entry_codec, fold
from .core import StoreCore
from .entry_codec import Base, Encoded
from .put_request import PutRequest


class StalePlan(Exception):
    """Another thread or process changed what the plan relies on (the base, the staged blobs): plan again."""


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """The stored entries that matter to a put.

    same: (id, entry) of those with the very same tokens, which the put replaces; the entry is None where its meta is lost, or
    where it became a base after the caller had got its id.
    prefixes: the stored prefixes, None where nothing depends on them. bases: (id, n_tokens) of the longest entries and bases
    that the put may be stored against.
    """

    same: tuple[tuple[int, Entry | None], ...] = ()
    prefixes: StoredPrefixes | None = None
    bases: tuple[tuple[int, int], ...] = ()

    def contained(self, core: StoreCore, c: Connection, request: PutRequest) -> list[int]:
        """The normal entries that the new one serves, since their tokens begin its own: they leave the list."""
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
        return now.bases[:1] == self.found.bases[:1]

    def encode(self, core: StoreCore) -> tuple[PutPlan, Encoded]:
        """Encodes the request. Gives the plan that holds then, without a base if none saves enough, and what to store."""
        request = self.request
        plan, left = self, [found for found in self.found.bases if found[0] != self.base_id]
        while True:
            encoded = entry_codec.encode_entry(
                core.reader, request.states, request.digests, request.samples, plan.base, core.min_saved
            )
            if encoded.shared and plan.base is not None:
                return fold.folded(core, plan, plan.base, encoded)
            if plan.base is None:
                return plan, encoded
            plan = replace(plan, base=_load(core, left), why_whole=encoded.why_whole)
            if plan.base is None:
                return plan, encoded


def _load(core: StoreCore, candidates: list[tuple[int, int]]) -> Base | None:
    """The next candidate that can be read, taken off the list with those before it."""
    with core.db.read() as c:
        while candidates:
            base = entry_codec.load_base(core.reader, c, *candidates.pop(0))
            if base is not None:
                return base
    return None


def make_plan(core: StoreCore, request: PutRequest, *, owned: bool) -> PutPlan:
    """Plans a request. `owned`: the caller already has the id, so an identical entry with another id is replaced."""
    with core.db.read() as c:
        fingerprint = core.fingerprint_id(c)
        found = Findings()
        identical = None
        if fingerprint is not None:
            found = look(core, c, fingerprint, request)
            identical = find_identical(core, c, fingerprint, request, found.same)
            if owned and identical is not None and identical.id != request.id:
                identical = None
    base = None
    if identical is None and found.bases and request.states.layout("main") is not None:
        base = _load(core, list(found.bases))
    return PutPlan(request, found, identical, base, _why_whole(request, found))


def look(core: StoreCore, c: Connection, fingerprint: int, request: PutRequest, *, publishing: bool = False) -> Findings:
    """What the file has of a request's tokens.

    publishing: called in the transaction that publishes the put, which also needs the entries that the put contains.
    """
    same = tuple((id, queries.entry(c, id, None)) for id in queries.same_tokens(c, fingerprint, request.key))
    if request.promised is not None and queries_chains.is_base(c, request.id):
        same += ((request.id, None),)
    now = core.now()
    key = request.key[:-4]  # the last token is left out: a proper prefix
    bases: list[tuple[int, int]] = []
    if request.share and key:
        bases = prefixes.find_bases(
            c, core.filters, fingerprint, key, now, policy.BASES_TRIED, committed=not publishing
        )
    walked = None
    if publishing and key and _may_contain(request):
        walked = prefixes.stored_prefixes(c, core.filters, fingerprint, key, now, committed=False)
    return Findings(same, walked, tuple(bases))


def find_identical(
    core: StoreCore,
    c: Connection,
    fingerprint: int,
    request: PutRequest,
    same: tuple[tuple[int, Entry | None], ...] | None = None,
) -> Entry | None:
    """The live entry that holds these tokens and these very bytes already; one that a queued put renewed is live.

    `same`: the entries of these tokens, where they are known.
    """
    if same is None:
        same = tuple((id, queries.entry(c, id, None)) for id in queries.same_tokens(c, fingerprint, request.key))
    for id, entry in same:
        if entry is not None and (id == request.id or not core.is_expired(entry)) and _holds(c, id, request):
            return entry
    return None


def _holds(c: Connection, id: int, request: PutRequest) -> bool:
    """Whether an entry has the very bytes that a put has."""
    rows = queries_blobs.blobs(c, id)
    if {row.part: row.size for row in rows} != request.digests.sizes:
        return False
    return {row.part: row.digest for row in rows} == request.digests


def _may_contain(request: PutRequest) -> bool:
    return not request.n_images and not request.base and bool(request.cuts.any or request.cuts.counts)


def _why_whole(request: PutRequest, found: Findings) -> str:
    """Why a put without a base is stored whole."""
    if not request.share:
        return "not_asked"
    if found.bases and request.states.layout("main") is None:
        return "unknown_layout"
    if found.bases:
        return "damaged_prefix"
    return "learned" if request.entry_class == "learned" else "no_prefix"
