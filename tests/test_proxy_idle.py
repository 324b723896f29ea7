"""A proxy with nothing to do, and one that something fails for: the server may sleep, and one slot's trouble is its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serverkit

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import proxykit
from proxykit import Chat, proxied, stats, wait_for, wait_saved

from kvstore import Store, slotfile
from kvstore.engines.llama_server.process import LlamaServer, LlamaServerError
from kvstore.engines.proxy import runner as proxy
from kvstore.engines.proxy.backend import Identity
from kvstore.engines.proxy.backend_link import BackendLink
from kvstore.engines.proxy.fingerprint import marker_of
from kvstore.engines.proxy.llama_backend import LlamaServerBackend
from kvstore.engines.proxy.metrics import Metrics
from kvstore.engines.proxy.options import ProxyOptions
from kvstore.engines.proxy.slots import Rates, SlotTable
from kvstore.engines.proxy.upstream import UpstreamError


@contextmanager
def sleepy(folder: Path) -> Iterator[LlamaServer]:
    """A server that unloads its model after a second without work."""
    server = serverkit.new_server(folder / "slots", parallel=2, n_ctx=4096, extra={"sleep_idle_seconds": 1})
    try:
        server.start()
    except LlamaServerError as error:
        if "sleep_idle_seconds" in str(error):
            pytest.skip("this server does not sleep")
        raise
    with server_of(server):
        yield server


@contextmanager
def server_of(server: LlamaServer) -> Iterator[None]:
    try:
        yield
    finally:
        server.stop()


def sleeps(server: LlamaServer) -> bool:
    return bool(server.props()["is_sleeping"])


@pytest.mark.slow
def test_server_sleeps_behind_the_proxy_and_goes_on_from_the_store(tmp_path: Path) -> None:
    with sleepy(tmp_path) as server, proxied(server, tmp_path / "store") as url:
        a, b = Chat(url, "Anna"), Chat(url, "Bert")
        for _ in range(2):
            for chat in (a, b):
                chat.ask()
            # Saved before it sleeps; a page that is looked at does not keep it awake either.
            wait_saved(url)
            wait_for(lambda: sleeps(server) and stats(url)["caching"])
            time.sleep(3)
            assert sleeps(server)
            httpx.get(url + "/metrics").raise_for_status()
            wait_for(lambda: not any(slot["tokens"] for slot in stats(url)["slots"]))
            assert sleeps(server)
        for chat in (a, b):
            chat.ask()
            assert chat.reused > 0.85
        told = stats(url)
        assert told["recent"][0]["source"] == "store"
        assert (told["failures"], told["restores_useless"], told["restores_failed"]) == (0, 0, 0)
        wait_saved(url)
        wait_for(lambda: sleeps(server))
    # Nothing was left to save at the end.
    assert sorted(path.name for path in server.slot_dir.iterdir()) == []


def test_server_that_slept_unseen_is_not_taken_at_its_old_word(tmp_path: Path) -> None:
    with sleepy(tmp_path) as server, proxied(server, tmp_path / "store") as url:
        chat = Chat(url, "Anna")
        chat.ask()
        wait_saved(url)
        wait_for(lambda: sleeps(server))
        server.completion("Something else", n_predict=1)
        chat.ask()
        assert chat.reused > 0.85
        assert stats(url)["recent"][0]["source"] == "store"


def test_proxy_that_starts_before_a_sleeping_server_lets_it_sleep(tmp_path: Path) -> None:
    with sleepy(tmp_path) as server:
        wait_for(lambda: sleeps(server))
        options = {"upstream_api_key": server.api_key, "listen": "127.0.0.1:0", "min_saved_mib": 0.1}
        with proxy.running(upstream=server.url, slot_dir=server.slot_dir, store=tmp_path / "s", **options) as url:
            wait_for(lambda: "sleeps" in (stats(url)["off"] or ""))
            time.sleep(2)
            assert sleeps(server)
            Chat(url, "Anna").ask()
            assert wait_saved(url)["saves"] == 1


@pytest.mark.slow
def test_proxy_that_ends_lets_the_server_sleep(tmp_path: Path) -> None:
    with sleepy(tmp_path) as server:
        with proxied(server, tmp_path / "store", idle_seconds=1000) as url:
            Chat(url, "Anna").ask()
            wait_for(lambda: sleeps(server))
        assert sleeps(server)


@contextmanager
def counted(server: LlamaServer) -> Iterator[tuple[str, list[bytes]]]:
    """An address that leads to the server, and all that was sent to it that way."""
    sent: list[bytes] = []

    def copy(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.append(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                upstream = socket.create_connection((server.host, server.port))
                threading.Thread(target=copy, args=(client, upstream, sent), daemon=True).start()
                threading.Thread(target=copy, args=(upstream, client, []), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_nothing_is_asked_of_an_idle_server(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots", api_key="") as server, counted(server) as (address, sent):
        options = {"slot_dir": server.slot_dir, "store": tmp_path / "s", "listen": "127.0.0.1:0"}
        with proxy.running(upstream=address, **options) as url:
            wait_for(lambda: stats(url)["caching"])
            Chat(url, "Anna").ask()
            wait_saved(url)
            time.sleep(3)  # the look that the last question about it asked for
            before = len(sent)
            assert before
            time.sleep(5)
            assert len(sent) == before


# -- failures


def fails(n: int, error: Exception, original: Any) -> Any:
    """As `original`, after n calls that fail."""
    left = [n]

    async def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return await original(*args, **kwargs)

    return call


def two_chats(url: str) -> tuple[Chat, Chat]:
    """One in each slot."""
    a, b = Chat(url, "Anna", system="All of this is for Anna. " * 20), Chat(url, "Bert", system="But that for Bert. " * 20)
    a.ask(id_slot=0)
    b.ask(id_slot=1)
    return a, b


@pytest.mark.parametrize(
    "error", [UpstreamError("injected", status=500), UpstreamError("injected", late=True), OSError("injected")]
)
def test_failed_save_is_one_slots_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with proxykit.both(tmp_path, parallel=2, n_ctx=4096, idle_seconds=0.5) as (_, url):
        monkeypatch.setattr(LlamaServerBackend, "save_slot", fails(1, error, LlamaServerBackend.save_slot))
        two_chats(url)
        told = wait_for(lambda: (s := stats(url)) and s["failures"] and s["saves"] and s)
        assert sum(slot["stored_tokens"] > 100 for slot in told["slots"]) == 1
        assert told["upstream_changes"] == 0


def test_server_that_does_not_say_for_a_moment_loses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxykit.both(tmp_path, parallel=2, n_ctx=4096, idle_seconds=0.5) as (_, url):
        error = UpstreamError("injected", late=True)
        monkeypatch.setattr(BackendLink, "busy_elsewhere", fails(1, error, BackendLink.busy_elsewhere))
        two_chats(url)
        told = wait_saved(url)
        assert (told["failures"], told["saves"]) == (1, 2)


def test_put_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Store.put
    left = [1]

    def once(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError("injected")
        return put(*args, **kwargs)

    with proxykit.both(tmp_path) as (_, url):
        monkeypatch.setattr(Store, "put", once)
        Chat(url, "Anna").ask()
        wait_for(lambda: stats(url)["failures"] == 1)
        assert wait_saved(url)["saves"] == 1


def test_failed_restore_leaves_the_other_slots_and_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxykit.both(tmp_path, parallel=2, n_ctx=4096) as (server, url):
        a, b = two_chats(url)
        wait_saved(url)
        server.slot_erase(0)
        for error in (UpstreamError("injected", late=True), OSError("injected")):
            with monkeypatch.context() as patch:
                patch.setattr(LlamaServerBackend, "restore_slot", fails(1, error, LlamaServerBackend.restore_slot))
                a.ask(id_slot=0)
            told = stats(url)
            assert told["slots"][1]["stored_tokens"] > 100
            assert told["upstream_changes"] == 0
            wait_saved(url)
            server.slot_erase(0)
        b.ask()
        assert b.reused > 0.85
        assert stats(url)["recent"][0]["source"] == "slot"
        # Neither failure was the entry's.
        a.ask(id_slot=0)
        assert a.reused > 0.85
        assert stats(url)["recent"][0]["source"] == "store"


class Upstream:
    """Answers the look at a server: what it says is told by the test, before or after something happened."""

    def __init__(self) -> None:
        self.props: Any = {"media_marker": "m", "total_slots": 2}
        self.listed: Any = []
        self.meanwhile: Any = None

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        answer = {"/props": self.props, "/slots": self.listed}[path]
        if path == "/slots" and self.meanwhile is not None:
            await self.meanwhile()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def looked_at(tmp_path: Path, upstream: Any) -> BackendLink:
    options = ProxyOptions("http://127.0.0.1:1", tmp_path, ":memory:")
    table = SlotTable(Rates(), options.min_tokens)
    link = BackendLink(LlamaServerBackend(upstream, tmp_path), table, options, Metrics())
    form = slotfile.SlotFile(tokens=np.zeros(1, np.int32), state=np.zeros(1, np.uint8))
    link.identity = Identity(marker_of(upstream.props), "f", 2, 100, "m", form)
    link.store = Store(":memory:")
    link._unverified = False
    await link.slots.linked(2)
    for slot in link.slots.all:
        link.slots.restored(slot, np.arange(50, dtype=np.int32), 50, 1)
    upstream.listed = [{"id": i, "id_task": 7, "n_prompt_tokens": 50, "is_processing": False} for i in range(2)]
    await link.busy_elsewhere()
    assert [slot.last_listing for slot in link.slots.all] == [(7, 50)] * 2
    return link


def test_list_that_comes_late_says_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        upstream = Upstream()
        link = await looked_at(tmp_path, upstream)
        slot = link.slots.all[0]

        async def restored() -> None:
            """As another request does while the list is under way."""
            assert link.slots.lease_now(slot)
            link.slots.restoring(slot)
            link.slots.restored(slot, np.arange(90, dtype=np.int32), 90, 2)
            await link.slots.released(slot)

        upstream.meanwhile = restored
        assert await link.check()
        assert (slot.n_total, slot.last_listing) == (90, None)
        await link.busy_elsewhere()
        assert slot.n_total == 90
        # A list that is not late is taken at its word.
        upstream.meanwhile, link._verified_at = None, 0.0
        assert await link.check()
        assert [s.n_total for s in link.slots.all] == [0, 50]

    asyncio.run(run())


@pytest.mark.parametrize("status", [None, 500, 503, 501])
def test_list_that_does_not_come_forgets_nothing(tmp_path: Path, status: int | None) -> None:
    async def run() -> None:
        upstream = Upstream()
        link = await looked_at(tmp_path, upstream)
        good = upstream.listed
        upstream.listed = UpstreamError("injected", **({"late": True} if status is None else {"status": status}))
        assert await link.check()
        assert [s.n_total for s in link.slots.all] == [50, 50]
        upstream.listed, link._verified_at = good, 0.0
        good[1]["id_task"] = 9
        assert await link.check()
        # Only a link that has no list is not asked again.
        assert [s.n_total for s in link.slots.all] == [50, 50 if status == 501 else 0]

    asyncio.run(run())


def test_one_late_answer_is_not_another_link(tmp_path: Path) -> None:
    async def run() -> None:
        upstream = Upstream()
        link = await looked_at(tmp_path, upstream)
        props, upstream.props = upstream.props, UpstreamError("injected", late=True)
        assert not await link.check()  # this request passes
        assert [s.n_total for s in link.slots.all] == [50, 50]
        upstream.props = props
        assert await link.check()
        assert [s.n_total for s in link.slots.all] == [50, 50]
        assert link.metrics.counts["upstream_changes"] == 0

    asyncio.run(run())
