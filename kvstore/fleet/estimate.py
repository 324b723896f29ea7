"""The rules of a fetch: what it will take, whether it pays, when it is given up, and when an object store is left alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

START_BANDWIDTH = 50e6  # bytes a second, until something was fetched
START_LATENCY = 0.1
LOCAL_BANDWIDTH = 1e9  # bytes a second that are opened, decoded and checked
PAYS_FROM = 2.0  # a fetch is begun where computing takes this many times its estimate
GIVEN_UP_AT = 0.75  # of the computing time: a wrong estimate costs at most 1.75 times computing
SMALL = 1 << 20  # a smaller fetch measures the latency, a larger one the bandwidth
KEPT = 0.7  # of a moving mean at each new value
MIN_BANDWIDTH = 1e3
BAD_GUESSES = 3
FORGIVEN = 1.02  # the estimate after a fetch was left out: without one there would be no new measurement
FAILURES = 3
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A fetch that pays, and the seconds after which it does not."""

    deadline: float
    seconds: float  # estimated


class LinkEstimate:
    """What fetches from this object store take: moving means of real ones."""

    def __init__(self, bandwidth: float = START_BANDWIDTH, latency: float = START_LATENCY) -> None:
        self._lock = threading.Lock()
        self.bandwidth = bandwidth
        self.latency = latency
        self.local = LOCAL_BANDWIDTH
        self._bad_guesses = 0

    def seconds(self, n_bytes: int) -> float:
        return self.latency + n_bytes / self.bandwidth + n_bytes / self.local

    def decide(self, n_bytes: int, computing: float) -> Decision | None:
        """Whether a fetch of these bytes pays, where computing takes so many seconds; None where it does not."""
        seconds = self.seconds(n_bytes)
        if PAYS_FROM * seconds >= computing:
            with self._lock:
                self.bandwidth *= FORGIVEN
                self.latency /= FORGIVEN
            return None
        return Decision(GIVEN_UP_AT * computing, seconds)

    def fetched(self, n_bytes: int, transfer: float, local: float) -> None:
        """A fetch that ended: the seconds of its requests, and those of opening and decoding behind them."""
        with self._lock:
            self._bad_guesses = 0
            if n_bytes < SMALL:
                self.latency = KEPT * self.latency + (1 - KEPT) * transfer
            else:
                rate = n_bytes / max(1e-6, transfer - min(self.latency, transfer / 2))
                self.bandwidth = max(MIN_BANDWIDTH, KEPT * self.bandwidth + (1 - KEPT) * rate)
                self.local = KEPT * self.local + (1 - KEPT) * n_bytes / max(1e-6, local)

    def given_up(self, wanted: int, came: int, seconds: float) -> None:
        """A fetch of so many bytes that was cancelled after so many seconds, in which some of them came."""
        with self._lock:
            self._bad_guesses += 1
            if wanted >= SMALL:
                if came:
                    rate = came / max(1e-6, seconds)
                    self.bandwidth = max(MIN_BANDWIDTH, KEPT * self.bandwidth + (1 - KEPT) * min(rate, self.bandwidth))
            else:
                self.latency = KEPT * self.latency + (1 - KEPT) * max(seconds, self.latency)
            if self._bad_guesses >= BAD_GUESSES:
                self._bad_guesses = 0
                self.bandwidth = max(MIN_BANDWIDTH, self.bandwidth / 2)


class Breaker:
    """Leaves an object store alone that failed three times in a row: 30 seconds, doubling to 10 minutes."""

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock, self._jitter = clock, jitter
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether requests must wait. After the pause one may try again."""
        with self._lock:
            return self._failures >= FAILURES and self._clock() < self._until

    @property
    def failing(self) -> bool:
        with self._lock:
            return self._failures > 0

    @property
    def up(self) -> bool:
        with self._lock:
            return self._failures < FAILURES

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause, self._until = 0, 0.0, 0.0

    def failed(self) -> bool:
        """Counts a failure; whether it opened the breaker for the first time."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES or self._clock() < self._until:
                return False
            first = not self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
            self._until = self._clock() + self._pause * (0.75 + 0.5 * self._jitter())
            return first


def renewal_chance(age: float, lifetime: float) -> float:
    """The chance that a use renews an object: 1/16 at half its lifetime, 1 from three quarters on, 0 before."""
    share = age / lifetime
    if share < 0.5:
        return 0.0
    return min(1.0, 1 / 16 + (15 / 16) * (share - 0.5) / 0.25)
