"""What the shared tier did, for metrics: counters since the store was opened, and what holds now."""

from __future__ import annotations

import threading

HELP = {
    "polls": "Listings taken in.",
    "hits": "Lookups that found an object which serves more than the local store.",
    "fetches": "Objects fetched and served.",
    "fetch_bytes": "Bytes fetched.",
    "gave_up": "Fetches that were given up since computing is faster.",
    "refused": "Objects that were not what their names say.",
    "published": "Objects published.",
    "publish_bytes": "Bytes published.",
    "renewed": "Objects copied into the folder of the day.",
    "ignored": "Names in the object store that are not of the fleet.",
    "skipped_slow": "Fetches that were left out since computing is faster.",
}
GAUGES = {
    "up": "Whether the object store answers.",
    "bandwidth_bytes": "Bytes a second of fetches, as estimated.",
    "latency_seconds": "Seconds until a fetch begins, as estimated.",
    "index_age_seconds": "Seconds since the last listing.",
}
SAVED = "saved_seconds"
SAVED_HELP = "Seconds of computing that fetched tokens saved, as estimated, without the time of the fetches."


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(HELP, 0)
        self._saved = 0.0

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def saved(self, seconds: float) -> None:
        with self._lock:
            self._saved += max(0.0, seconds)

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def as_dict(self) -> dict[str, float]:
        """By the names of the metrics."""
        with self._lock:
            counts: dict[str, float] = {f"remote_{name}_total": n for name, n in self._counts.items()}
            counts[f"remote_{SAVED}_total"] = self._saved
        return counts


def help_of(name: str) -> tuple[str, str]:
    """Kind and help of a metric."""
    short = name.removeprefix("remote_").removesuffix("_total")
    if short in HELP:
        return "counter", HELP[short]
    return ("counter", SAVED_HELP) if short == SAVED else ("gauge", GAUGES[short])
