"""Counts work and waits for conditions, so that no test depends on how fast the machine is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from kvstore import Store

PATIENCE = 240.0  # seconds; only something that hangs takes as long


def wait_for(what: Callable[[], Any], why: str = "waited in vain") -> Any:
    """What `what` gives, as soon as that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.01)
    return found


def calls(function: Callable[[], Any]) -> int:
    """How many functions a call calls, those of C among them."""
    n = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return n


@contextmanager
def counted_steps() -> Iterator[Callable[[], int]]:
    """Counts the steps of SQLite's virtual machine in connections opened meanwhile; gives those since the last look."""
    n = 0

    def step() -> bool:
        nonlocal n
        n += 1
        return False

    def since() -> int:
        nonlocal n
        now, n = n, 0
        return now

    def hook(connection: apsw.Connection) -> None:
        connection.set_progress_handler(step, 1)

    apsw.connection_hooks.append(hook)
    try:
        yield since
    finally:
        apsw.connection_hooks.remove(hook)


def wait_for_upkeep(store: Store, times: int = 2) -> None:
    """Until the store's background thread has done all of its work a few times more."""
    upkeep, done = store._upkeep, []
    assert upkeep is not None
    tick = upkeep._tick

    def counted(engine: Any) -> None:
        tick(engine)
        done.append(1)

    upkeep._tick = counted  # type: ignore[method-assign]
    try:
        wait_for(lambda: upkeep.wake() or len(done) >= times)
    finally:
        upkeep._tick = tick  # type: ignore[method-assign]
