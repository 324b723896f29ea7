"""The figures of a store: what the file holds, and what this process has counted."""

from __future__ import annotations

from ..storage import queries, queries_blobs, queries_maintenance
from ..types import CLASSES, WHOLE, Stats
from .core import StoreCore
from .maintenance import Maintenance

FAMILIES_SHOWN = 100


def collect(core: StoreCore, maintenance: Maintenance | None) -> Stats:
    # No transaction of this process may be under way: counters taken by a writer but not yet committed would be missed.
    with core.db.exclusive(), core.db.read() as c:
        totals = queries.totals(c)
        counts = queries.counters(c)
        families = queries_maintenance.top_families(c, FAMILIES_SHOWN)
        n_families = queries_maintenance.family_count(c)
        page_size, _, free = queries_blobs.pages(c)
        for name, by in core.counters.counts().items():
            counts[name] = counts.get(name, 0) + by
    prefix = "evicted_"
    return Stats(
        entries={name: totals[name].entries for name in CLASSES},
        size=sum(totals[name].size for name in CLASSES),
        stored=sum(t.stored for t in totals.values()),
        size_by_class={name: totals[name].size for name in CLASSES},
        stored_by_class={name: totals[name].stored for name in CLASSES},
        file_bytes=core.db.file_bytes(),
        free_bytes=free * page_size,
        ram_bytes=core.ram.n_bytes,
        ram_entries=len(core.ram),
        hits=counts.get("hits", 0),
        misses=counts.get("misses", 0),
        unmatched=counts.get("unmatched", 0),
        tokens_served=counts.get("tokens_served", 0),
        puts=counts.get("puts", 0),
        shared_puts=counts.get("shared_puts", 0),
        whole_puts={name: counts[f"whole_{name}"] for name in WHOLE if counts.get(f"whole_{name}")},
        evictions={k[len(prefix) :]: v for k, v in sorted(counts.items()) if k.startswith(prefix)}
        | ({"ram_budget": core.ram.evictions} if core.ram.evictions else {}),
        encode_seconds=counts.get("encode_us", 0) / 1e6,
        decode_seconds=counts.get("decode_us", 0) / 1e6,
        upkeep_alive=None if maintenance is None else maintenance.alive,
        upkeep_failures=0 if maintenance is None else maintenance.failures,
        n_families=n_families,
        families=tuple(families),
        bases=totals[queries.BASE].entries,
        base_bytes=totals[queries.BASE].stored,
    )
