"""The proxy's counters, as JSON and as Prometheus text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...fleet.counters import help_of
from ...meta import clean_excerpt
from ...types import Stats
from ...util.printable import printable
from .slot_memory import SlotMemory

RECENT = 50
_HELP = {
    "requests": "Requests that the cache looked at.",
    "passed": "Requests that passed through without the cache.",
    "passed_by_shape": "Of these, requests whose tokens were found wrongly before, or others of their shape.",
    "placed_elsewhere": "Requests that the server answered in another slot than the one made ready for them.",
    "restores": "States restored into a slot.",
    "restores_skipped": "Restores left out because computing was faster.",
    "restores_failed": "Restores that the server refused.",
    "restores_useless": "Restores after which the server reused little or nothing.",
    "warm_restores": "Of the restores, those of a warm start: before any request asked for the state.",
    "warm_hits": "States of a warm start that a request used.",
    "warm_wasted": "States of a warm start that were lost or overwritten before a request used them.",
    "warm_bytes": "Bytes of the states of warm starts.",
    "saves": "Slots saved and put into the store.",
    "saves_skipped": "Saves that would have added little.",
    "saves_before_overwrite": "Saves done while a request for another conversation waited.",
    "saves_unfit": "Slots not saved: they may hold more than the plain computation of their tokens, or another client's.",
    "memory_transfers": "States that passed between the proxy and the server through memory.",
    "disk_transfers": "States that passed between them through a file on the disk.",
    "failures": "Failures of the cache; the requests were served without it.",
    "token_mismatches": "Prompts whose tokens differed from those that the server computed.",
    "upstream_changes": "Server processes seen after the first.",
    "prompt_tokens": "Prompt tokens of requests that the cache looked at.",
    "cached_tokens": "Of these, tokens that the server did not compute again.",
    "restored_tokens": "Of these, tokens that only the store had.",
}
_HELP_SECONDS = {
    "saved_seconds": "Seconds of computing that restored tokens saved, as estimated, without the time of the restores.",
    "restore_seconds": "Seconds spent on restores.",
    "warm_seconds": "Of these, seconds of warm starts, while no request waited.",
    "overhead_seconds": "Seconds from a request's arrival until it was sent on, without restores and waiting for a slot.",
}


@dataclass
class Recent:
    """One of the last requests, for the page."""

    at: float
    path: str
    slot: int
    excerpt: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    source: str = "computed"  # or "slot", "store"
    entry: str | None = None
    overhead_ms: float = 0.0
    restore_ms: float = 0.0


@dataclass
class Metrics:
    started: float = field(default_factory=time.time)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_HELP, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_HELP_SECONDS, 0.0))
    hits: dict[str, int] = field(default_factory=lambda: {"store": 0, "slot": 0, "computed": 0})
    recent: deque[Recent] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] += by

    def done(self, recent: Recent) -> None:
        self.recent.appendleft(recent)
        self.hits[recent.source] += 1
        self.count("prompt_tokens", recent.prompt_tokens)
        self.count("cached_tokens", recent.cached_tokens)
        self.count("restored_tokens", recent.restored_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed again."""
        return self.counts["cached_tokens"] / max(1, self.counts["prompt_tokens"])

    def as_dict(self, *, private: bool) -> dict[str, Any]:
        """JSON-ready; with excerpts only if `private`."""
        recent = [asdict(r) for r in self.recent]
        for r in recent:
            r["excerpt"] = printable(clean_excerpt(r["excerpt"])) if private else None
            r["path"] = printable(r["path"])
        return {
            "uptime_seconds": round(time.time() - self.started, 1),
            "hit_rate": round(self.hit_rate, 4),
            **self.counts,
            **{name: round(value, 4) for name, value in self.seconds.items()},
            "requests_by_source": dict(self.hits),
            "recent": recent,
        }

    def prometheus(
        self,
        store: Stats | None,
        memory: SlotMemory,
        n_agreeing: int = 0,
        n_distrusted: int = 0,
        remote: Mapping[str, float] | None = None,
    ) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, text: str, samples: dict[str, float]) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{labels} {value:g}" if isinstance(value, float) else f"{name}{labels} {value}"
                         for labels, value in samples.items())  # fmt: skip

        for key, text in _HELP.items():
            add(f"kvstore_{key}_total", "counter", text, {"": self.counts[key]})
        for key, text in _HELP_SECONDS.items():
            add(f"kvstore_{key}_total", "counter", text, {"": float(self.seconds[key])})
        sources = {f'{{source="{name}"}}': n for name, n in self.hits.items()}
        add(
            "kvstore_requests_by_source_total",
            "counter",
            "Requests by where the reused part of the prompt came from.",
            {**sources},
        )
        add("kvstore_slot_memory_bytes", "gauge", "Memory of the states on their way.", {"": memory.used})
        budget = 0 if memory.off else memory.budget
        add("kvstore_slot_memory_budget_bytes", "gauge", "Memory that these may take; 0: they take the disk.", {"": budget})
        shapes = {'{trusted="yes"}': n_agreeing, '{trusted="no"}': n_distrusted}
        add("kvstore_request_shapes", "gauge", "Shapes of requests, by whether their tokens are known.", {**shapes})
        if store is not None:
            classes = {f'{{class="{name}"}}': n for name, n in store.entries.items()}
            add("kvstore_store_entries", "gauge", "Entries of the store.", {**classes})
            add("kvstore_store_state_bytes", "gauge", "Bytes of all states as put.", {"": store.size})
            add("kvstore_store_stored_bytes", "gauge", "Bytes of all states as stored.", {"": store.stored})
            add("kvstore_store_file_bytes", "gauge", "Bytes of the store's file.", {"": store.file_bytes})
            add("kvstore_store_ram_bytes", "gauge", "Bytes that the RAM layer holds.", {"": store.ram_bytes})
        for name, value in (remote or {}).items():
            add(f"kvstore_{name}", *help_of(name), {"": value})
        return "\n".join(lines) + "\n"
