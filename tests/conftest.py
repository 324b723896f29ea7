"""Fixtures that several test modules share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's store goes."""
    return tmp_path / "kv.store"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., Store]]:
    """Opens stores (at `path`, unless told) that share small states; closes them after the test."""
    opened: list[Store] = []

    def opener(at: Any = None, **options: Any) -> Store:
        store = Store(path if at is None else at, **{"min_saved_mib": 0.001, "timeout": 60.0, **options})
        opened.append(store)
        return store

    yield opener
    for store in reversed(opened):
        store.close()


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 face of SeaweedFS; skips the test where there is none."""
    fleetkit = pytest.importorskip("fleetkit")
    with fleetkit.seaweed(tmp_path_factory.mktemp("weed")) as address:
        yield address


@pytest.fixture
def harm(weed: str) -> Iterator[Any]:
    """A proxy before it that does harm; the environment leads there."""
    import fleetkit

    with fleetkit.Harm(weed) as proxy, fleetkit.credentials(proxy.address):
        yield proxy


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """A root of its own in the bucket."""
    return "s3://kvstore/" + "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    return open_store()


@pytest.fixture
def crash_free() -> Iterator[Callable[[Callable[[], None]], threading.Thread]]:
    """Starts threads whose exceptions fail the test, and joins them at its end."""
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def start(target: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except BaseException as error:  # noqa: BLE001  reported below
                failures.append(error)

        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
