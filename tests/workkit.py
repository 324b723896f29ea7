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


def wait_for_maintenance(store: Store, times: int = 2) -> None:
    """Until the store's background thread has done all of its work a few times more."""
    maintenance, done = store._maintenance, []
    assert maintenance is not None
    run_once = maintenance._run_once

    def counted(engine: Any) -> None:
        run_once(engine)
        done.append(1)

    maintenance._run_once = counted  # type: ignore[method-assign]
    try:
        wait_for(lambda: maintenance.wake() or len(done) >= times)
    finally:
        maintenance._run_once = run_once  # type: ignore[method-assign]
