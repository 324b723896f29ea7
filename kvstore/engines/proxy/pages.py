"""What the proxy shows of itself: the page for a person, its figures as JSON, and Prometheus text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import islice
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ... import operate
from ...errors import KVStoreError
from ...meta import clean_excerpt
from ...store import Store
from ...types import Entry, Stats
from ...util.printable import printable
from .backend_link import BackendLink
from .metrics import Metrics
from .shapes import ShapeBook
from .slots import SlotTable
from .upstream import UpstreamError

PAGE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
SHOWN = 2000
LEVELS = 16
log = logging.getLogger("kvstore.proxy")
# A page of another origin must not read these pages through a name that resolves to this host.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def tree(entries: Iterable[Entry], *, private: bool, parents: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
    """Entries below the prefix that they are stored against, largest family first; excerpts only if `private`.

    parents: what each stands below, by id; without it, the entry that it is stored against.
    """
    nodes: dict[int, dict[str, Any]] = {}
    entries = list(islice(entries, SHOWN))
    above = {e.id: e.parent for e in entries if e.parent is not None} if parents is None else parents
    for entry in entries:
        node = entry.as_dict()
        node["excerpt"] = printable(clean_excerpt(entry.excerpt)) if private else None
        nodes[entry.id] = {**node, "children": []}
    roots: list[dict[str, Any]] = []
    levels: dict[int, int] = {}
    under: dict[int, int] = {}
    for id, node in sorted(nodes.items(), key=lambda item: int(item[1]["n_tokens"])):  # parents first
        parent = above.get(id)
        if parent is None or parent not in levels:
            levels[id] = 0
            roots.append(node)
            continue
        # A long conversation of states that cannot be cut is a list, not a stair: JSON has no room for 1,000 levels.
        deep = levels[parent] >= LEVELS
        under[id] = under[parent] if deep else parent
        levels[id] = levels[parent] + (not deep)
        nodes[under[id]]["children"].append(node)
    for node in nodes.values():
        node["children"].sort(key=lambda n: n["last_used"], reverse=True)
    roots.sort(key=lambda n: (-len(n["children"]), n["family"], -n["last_used"]))
    return roots


_Shown: TypeAlias = tuple[Stats | None, list[dict[str, Any]]]


class Pages:
    """The handlers of the proxy's own paths."""

    def __init__(
        self, link: BackendLink, slots: SlotTable, shapes: ShapeBook, metrics: Metrics, *, private: bool
    ) -> None:
        self.link = link
        self.slots = slots
        self.shapes = shapes
        self.metrics = metrics
        self.private = private
        self._reading: asyncio.Task[_Shown] | None = None

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=_HEADERS)

    async def _stats(self) -> _Shown:
        """Figures of the store: None where it is not open, or busy for long. Requests at the same time share one reading."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> _Shown:
        store = self.link.store
        if store is None:
            return None, []

        def read(store: Store) -> _Shown:
            entries = list(operate.listing(store, order="used", limit=SHOWN))
            return store.stats(), tree(entries, private=self.private, parents=operate.listed_parents(store, entries))

        try:
            return await self.link.run_page(read, store)
        except KVStoreError as error:
            log.warning("the page shows nothing of the store: %s", error.message)
            return None, []

    def _remote(self) -> dict[str, float] | None:
        """The figures of the shared tier, where there is one."""
        store = self.link.store
        return None if store is None or store.remote is None else store.remote.metrics()

    async def stats(self, request: Request) -> Response:
        self.link.look_again()
        store, prefixes = await self._stats()
        identity = self.link.identity
        rates = self.slots.rates
        body = {
            "upstream": self.link.backend.url,
            "caching": not self.link.off,
            "private": self.private,
            "off": self.link.off or None,
            "model": None if identity is None else identity.model,
            "fingerprint": None if identity is None else identity.fingerprint,
            "probed": None if identity is None else identity.probed,
            **self.metrics.as_dict(private=self.private),
            "shapes": self.shapes.as_list(),
            "slots": [
                {"id": s.id, "busy": s.busy, "tokens": s.n_total, "stored_tokens": s.stored, "saving": s.putting > 0}
                for s in self.slots.all
            ],
            "rates": {
                "prefill_tokens_per_second": None if rates.prefill is None else round(1 / rates.prefill, 1),
                "restore_bytes_per_second": round(1 / max(rates.restore_byte, 1e-12)),
                "save_bytes_per_second": round(1 / max(rates.save_byte, 1e-12)),
            },
            "slot_memory": self.link.backend.memory.as_dict(),
            "store": None if store is None else store.as_dict(),
            "remote": self._remote(),
            "prefixes": prefixes,
        }
        return JSONResponse(body, headers=_HEADERS)

    async def metrics_text(self, request: Request) -> Response:
        """The proxy's metrics, followed by the server's own where it has them."""
        shapes, memory = self.shapes, self.link.backend.memory
        text = self.metrics.prometheus(
            (await self._stats())[0], memory, shapes.n_agreeing, shapes.n_distrusted, self._remote()
        )
        with contextlib.suppress(UpstreamError):
            own = {} if self.private else {n: v for n, v in request.headers.items() if n == "authorization"}
            text += await self.link.backend.metrics(own)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4", headers=_HEADERS)
