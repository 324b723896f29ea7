"""The store as its remote sees it: whole entries to publish, and fetched states to keep."""

from __future__ import annotations

from .. import layout
from ..errors import LayoutError
from ..fleet.contents import FULL, PartFacts, PublishedState, StateFacts
from ..fleet.sealing import RefusedError
from ..storage import policy, queries, queries_chains, queries_lists
from ..types import Entry, SavedState, Tokens
from ..util.hashing import Digests
from . import get, put
from .core import StoreCore
from .put_request import PutRequest, new_request
from .write_behind import WriteBehind

PAGE = 256


class FleetLink:
    """Reads and puts of a remote. Nothing that is read to be published counts as a use."""

    def __init__(self, core: StoreCore, behind: WriteBehind, write_behind: bool) -> None:
        self._core = core
        self._behind = behind
        self._write_behind = write_behind

    def _settle(self, id: int) -> None:
        """An entry that is still queued is on disk afterwards."""
        known, entry = self._behind.lookup(id)
        if known and entry is not None:
            self._behind.drain()

    def read(self, id: int) -> PublishedState | None:
        self._settle(id)
        saved = get.read(self._core, id)
        if saved is None:
            return None
        with self._core.db.read() as c:
            head = queries.head(c, id)
            fingerprint = queries.fingerprint_of(c, id)
        return None if fingerprint is None else published(saved, fingerprint, head)

    def exists(self, id: int) -> bool:
        return self._core.entry(id) is not None

    def tokens(self, id: int) -> Tokens | None:
        self._settle(id)
        with self._core.db.read() as c:
            return None if self._core.find(c, id) is None else queries.tokens(c, id)

    def cuttable(self, state: PublishedState) -> bool:
        layouts = [policy.layout_of(part) for part in (state.main, state.draft) if part is not None]
        return all(found is not None and found.can_crop for found in layouts)

    def cut(self, state: PublishedState, n_tokens: int) -> PublishedState:
        """The state of the first n_tokens. Raises RefusedError: its name said that it can be cut."""
        try:
            main = layout.crop(state.main, n_tokens)
            draft = None if state.draft is None else layout.crop(state.draft, n_tokens)
        except LayoutError as error:
            raise RefusedError(f"its state cannot be cut: {error.message}") from error
        return PublishedState(state.facts, state.tokens[:n_tokens], main, draft)

    def base(self, id: int) -> int | None:
        with self._core.db.read() as c:
            for ancestor in queries_chains.listed_ancestors(c, id):
                entry = queries.entry(c, ancestor, None)
                if entry is not None and entry.entry_class == "learned":
                    return ancestor
        return None

    def keep(self, state: PublishedState) -> int | None:
        request = _request(state)
        entry = self._behind.put(request) if self._write_behind else put.put(self._core, request)
        return entry.id

    def kept_classes(self) -> list[Entry]:
        found: list[Entry] = []
        for entry_class in ("learned", "pinned"):
            after: int | None = queries_lists.FIRST
            while after is not None:
                with self._core.db.read() as c:
                    wanted = queries_lists.Filter(
                        fingerprint=self._core.fingerprint_id(c) or -1, family=None, entry_class=entry_class
                    )
                    page, after = queries_lists.page(c, wanted, after, PAGE, self._core.now())
                found += page
        return found


def _request(state: PublishedState, id: int | None = None) -> PutRequest:
    facts = state.facts
    return new_request(
        state.tokens, state.main, state.draft, entry_class=facts.entry_class, source=facts.source, ttl=None,
        family=facts.family, excerpt=facts.excerpt, n_input=facts.n_input, n_images=facts.n_images, share=True,
        head=facts.head, id=id,
    )  # fmt: skip


def published(saved: SavedState, fingerprint: str, head: bytes | None) -> PublishedState:
    """An entry as it travels."""
    entry = saved.entry
    digests = Digests(main=saved.main, draft=saved.draft)
    parts = tuple(PartFacts(name, FULL, digests.sizes[name], digests.sizes[name], digests[name]) for name in digests)
    facts = StateFacts(
        fingerprint=fingerprint, entry_class=entry.entry_class, source=entry.source, excerpt=entry.excerpt, family=entry.family,
        n_input=entry.n_input, n_images=entry.n_images, head=head, n_tokens=entry.n_tokens, parts=parts,
    )  # fmt: skip
    return PublishedState(facts, saved.tokens, saved.main, saved.draft)


def saved_state(state: PublishedState, now: int) -> SavedState:
    """A fetched state as `get` gives one. Its entry gets an id when it is put, behind: 0 until then."""
    request = _request(state, id=0)
    entry = request.entry(now, request.size, None)
    for array in (state.tokens, state.main, state.draft):
        if array is not None:
            array.flags.writeable = False
    return SavedState(entry, state.tokens, state.main, state.draft)


