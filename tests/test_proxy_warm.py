"""The warm start: what is likely to be wanted is in the slots of a new server before it is asked for, and nobody waits."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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

from kvstore import Entry, Store
from kvstore.engines.proxy.llama_backend import LlamaServerBackend
from kvstore.engines.proxy.server_process import ProcessWatch, listener
from kvstore.engines.proxy.warm_start import ranked

CHAT_SYSTEMS = {"Anna": "All of this is for Anna. " * 30, "Bert": "But that for Bert, not for her. " * 30}


def talk(url: str, *names: str, turns: int = 2) -> list[Chat]:
    chats = [Chat(url, name, system=CHAT_SYSTEMS[name]) for name in names]
    for _ in range(turns):
        for chat in chats:
            chat.ask()
            wait_saved(url)
    return chats


def wait_warm(url: str, n: int) -> dict[str, Any]:
    return dict(wait_for(lambda: (s := stats(url))["warm_restores"] >= n and not any(x["busy"] for x in s["slots"]) and s))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("again", ["server", "proxy", "both"])
@pytest.mark.slow
def test_first_chat_after_a_restart_computes_only_its_new_tokens(tmp_path: Path, slots: int, again: str) -> None:
    with serverkit.new_server(tmp_path / "slots", parallel=slots, n_ctx=4096 * slots) as server:
        with proxied(server, tmp_path / "s") as url:
            chats = talk(url, "Anna", "Bert")
            if again == "server":
                proxykit.restart(server)
                check_first_chats(url, chats, slots)
        if again == "both":
            proxykit.restart(server)
        elif again == "proxy":
            for slot in range(slots):
                server.slot_erase(slot)
        if again != "server":
            with proxied(server, tmp_path / "s") as url:
                check_first_chats(url, chats, slots)


def check_first_chats(url: str, chats: list[Chat], slots: int) -> None:
    told = wait_warm(url, slots)
    assert told["warm_restores"] == slots
    assert told["warm_bytes"] > 100_000
    held = sorted(slot["tokens"] for slot in told["slots"])
    for chat in reversed(chats[-slots:]):  # with one slot, the last one
        chat.url = url
        before = chat.timings["cache_n"] + chat.timings["prompt_n"] + chat.timings["predicted_n"] - 1
        assert before in held
        chat.ask()
        assert chat.timings["cache_n"] >= before - 1
        recent = stats(url)["recent"][0]
        assert (recent["source"], recent["restore_ms"]) == ("store", 0)  # it did not wait for a restore
        assert recent["restored_tokens"] >= before - 1
    told = stats(url)
    assert (told["warm_hits"], told["warm_wasted"]) == (slots, 0)
    assert told["restores"] >= slots
    assert (told["failures"], told["restores_useless"], told["restores_failed"]) == (0, 0, 0)
    metrics = httpx.get(url + "/metrics").text
    assert f"kvstore_warm_restores_total {slots}\n" in metrics
    assert f"kvstore_warm_hits_total {slots}\n" in metrics
    # What the answers left is saved as ever.
    assert wait_saved(url)["failures"] == 0


@pytest.mark.slow
def test_warm_and_cold_give_the_same_text(tmp_path: Path) -> None:
    texts = []
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "s") as url:
            (chat,) = talk(url, "Anna")
        question = {"max_tokens": 12, "temperature": 0, "messages": [*chat.messages, {"role": "user", "content": "So?"}]}
        for warm in (True, False):
            proxykit.restart(server)
            with proxied(server, tmp_path / f"copy-{warm}" if not warm else tmp_path / "s", warm_start=warm) as url:
                if warm:
                    wait_warm(url, 1)
                answer = proxykit.post(url + "/v1/chat/completions", question)
                texts.append((answer["choices"][0]["message"]["content"], answer["timings"]["cache_n"] > 0))
    assert texts[0][0] == texts[1][0]
    assert [reused for _, reused in texts] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which process ended")
@pytest.mark.slow
def test_a_server_that_restarts_is_filled_before_anybody_asks(tmp_path: Path) -> None:
    """Nothing is asked of the proxy between the restart and the first chat."""
    with serverkit.new_server(tmp_path / "slots") as server, proxied(server, tmp_path / "s") as url:
        (chat,) = talk(url, "Anna")
        for _ in range(2):
            proxykit.restart(server)
            before = chat.timings["cache_n"] + chat.timings["prompt_n"] + chat.timings["predicted_n"] - 1
            wait_for(lambda before=before: (server.slots()[0].get("n_prompt_tokens") or 0) >= before)
            chat.ask()
            assert chat.timings["cache_n"] >= before - 1
            told = wait_saved(url)
        assert (told["warm_hits"], told["recent"][0]["restore_ms"], told["failures"]) == (2, 0, 0)


def test_the_process_at_an_address_is_found_and_its_end_is_told(tmp_path: Path) -> None:
    code = """if True:
        import socket, time
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        time.sleep(999)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        ended: list[bool] = []

        async def run() -> None:
            watch = ProcessWatch(url, lambda: ended.append(True))
            await watch.begin()
            await asyncio.sleep(0.05)
            assert ended == []
            process.kill()
            while not ended:
                await asyncio.sleep(0.01)
            await watch.begin()  # nobody listens there any more
            watch.close()

        if sys.platform == "linux":
            assert listener(url) == process.pid
            asyncio.run(run())
        process.kill()
        process.wait()
    assert listener(url) is None
    assert listener("http://192.0.2.1:80") is None


def test_without_a_warm_start_the_slots_stay_empty(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "s") as url:
            talk(url, "Anna")
        proxykit.restart(server)
        with proxied(server, tmp_path / "s", warm_start=False) as url:
            time.sleep(1)
            told = stats(url)
            assert (told["warm_restores"], [slot["tokens"] for slot in told["slots"]]) == (0, [0])


@pytest.mark.slow
def test_slots_with_contents_are_left_alone(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots", parallel=2, n_ctx=8192) as server:
        with proxied(server, tmp_path / "s") as url:
            talk(url, "Anna", "Bert")
        server.slot_erase(0)
        server.slot_erase(1)
        tokens = server.tokenize("Somebody's own words, past the proxy. " * 20)
        server.completion(tokens, n_predict=0, id_slot=1)
        with proxied(server, tmp_path / "s") as url:
            told = wait_warm(url, 1)
            time.sleep(0.5)
            assert stats(url)["warm_restores"] == 1
            assert [slot["tokens"] > 0 for slot in told["slots"]] == [True, False]
        assert server.completion(tokens, n_predict=0, id_slot=1)["timings"]["cache_n"] >= len(tokens) - 1


def test_states_of_another_model_are_not_restored(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server, proxied(server, tmp_path / "s") as url:
        talk(url, "Anna")
    with (
        serverkit.new_server(tmp_path / "slots", cache_type_k="q8_0") as server,
        proxied(server, tmp_path / "s") as url,
    ):
        time.sleep(1)
        told = stats(url)
        assert (told["warm_restores"], told["restores_failed"], told["failures"]) == (0, 0, 0)


def test_a_warm_state_that_nobody_wants_is_wasted_and_costs_no_answer(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "s") as url:
            anna, _ = talk(url, "Anna", "Bert")
        proxykit.restart(server)
        with proxied(server, tmp_path / "s") as url:
            wait_warm(url, 1)
            anna.url = url  # Bert came last, so he has the slot
            anna.ask()
            assert anna.reused > 0.85
            told = stats(url)
            assert (told["warm_hits"], told["warm_wasted"], told["failures"]) == (0, 1, 0)
            assert told["recent"][0]["source"] == "store"


def test_a_request_goes_first_while_a_warm_start_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is being read when the request comes: the request takes the slot, and the state stays away."""
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "s") as url:
            anna, _ = talk(url, "Anna", "Bert")
        proxykit.restart(server)
        reading, go = threading.Event(), threading.Event()
        get = Store.get

        def slow(self: Store, id: int, **options: Any) -> Any:
            if options.get("count") is False:
                reading.set()
                assert go.wait(240)
            return get(self, id, **options)

        monkeypatch.setattr(Store, "get", slow)
        with proxied(server, tmp_path / "s") as url:
            assert reading.wait(240)
            anna.url = url
            anna.ask()  # returns, although the read does not
            assert anna.reused > 0.85
            go.set()
            told = wait_saved(url)
            time.sleep(0.5)
            told = stats(url)
            assert (told["warm_restores"], told["failures"]) == (0, 0)
            anna.ask()
            assert anna.reused > 0.85


def test_a_request_during_the_servers_restore_gets_another_slot_or_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serverkit.new_server(tmp_path / "slots", parallel=2, n_ctx=8192) as server:
        with proxied(server, tmp_path / "s") as url:
            chats = talk(url, "Anna", "Bert")
        proxykit.restart(server)
        begun, restore = threading.Event(), LlamaServerBackend.restore_slot

        async def told(self: Any, slot: int, file: Any, timeout: float, *, begin: Any = None) -> int:
            def begins() -> bool:
                if not begin():
                    return False
                begun.set()
                return True

            return await restore(self, slot, file, timeout, begin=begin and begins)

        monkeypatch.setattr(LlamaServerBackend, "restore_slot", told)
        with proxied(server, tmp_path / "s") as url:
            assert begun.wait(240)
            for chat in chats:
                chat.url = url
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(Chat.ask, chats))
            assert [chat.reused > 0.85 for chat in chats] == [True, True]
            assert wait_saved(url)["failures"] == 0


@pytest.mark.slow
def test_requests_from_the_first_moment_are_right(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots", parallel=2, n_ctx=8192) as server:
        with proxied(server, tmp_path / "s") as url:
            chats = talk(url, "Anna", "Bert")
            for _ in range(3):
                proxykit.restart(server)
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(Chat.ask, chats))
                assert [chat.reused > 0.85 for chat in chats] == [True, True]
                told = wait_saved(url)  # a server that is killed takes what was not saved with it
            assert (told["failures"], told["restores_useless"]) == (0, 0)
            assert told["warm_restores"] >= told["warm_hits"] + told["warm_wasted"]
        with Store(tmp_path / "s", fingerprint=told["fingerprint"]) as store:
            assert store.verify() == []


@pytest.mark.parametrize("model", serverkit.WINDOW_OR_RECURRENT)
@pytest.mark.slow
def test_windows_and_recurrent_states_are_restored_whole(tmp_path: Path, model: str) -> None:
    with serverkit.new_server(tmp_path / "slots", model) as server:
        with proxied(server, tmp_path / "s") as url:
            (chat,) = talk(url, "Anna")
        proxykit.restart(server)
        with proxied(server, tmp_path / "s") as url:
            wait_warm(url, 1)
            chat.url = url
            chat.ask()
            assert chat.reused > 0.8
            assert stats(url)["warm_hits"] == 1


def test_a_warm_start_counts_no_use(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "s") as url:
            talk(url, "Anna")
            fingerprint = stats(url)["fingerprint"]
        with Store(tmp_path / "s", fingerprint=fingerprint) as store:
            before = [(e.id, e.hits, e.last_used) for e in store.entries()]
            hits = store.stats().hits
        time.sleep(1.1)
        proxykit.restart(server)
        with proxied(server, tmp_path / "s") as url:
            wait_warm(url, 1)
        with Store(tmp_path / "s", fingerprint=fingerprint) as store:
            assert [(e.id, e.hits, e.last_used) for e in store.entries()] == before
            assert store.stats().hits == hits


# -- the order


def entry(id: int, **facts: Any) -> Entry:
    blank = Entry(
        id=id, n_tokens=100, n_images=0, entry_class="normal", source="default", created_at=0, last_used=0, expires_at=None,
        ttl=None, hits=0, family=0, n_input=0, excerpt="", parent=None, size=1, stored=1,
    )  # fmt: skip
    return dataclasses.replace(blank, **facts)


def ids(entries: list[Entry], *, crops: bool = True) -> list[int]:
    return [e.id for e in ranked(entries, crops=crops)]


def test_what_was_used_last_comes_first_and_reuse_makes_up_for_hours() -> None:
    assert ids([entry(1, last_used=1000), entry(2, last_used=2000)]) == [2, 1]
    assert ids([entry(1, last_used=1000, hits=3), entry(2, last_used=2000)]) == [1, 2]
    assert ids([entry(1, last_used=1000, hits=3), entry(2, last_used=100_000)]) == [2, 1]
    assert ids([entry(1, last_used=1000, entry_class="pinned"), entry(2, last_used=2000)]) == [1, 2]


def test_a_conversation_stands_for_the_prefix_that_it_begins_with() -> None:
    prefix = entry(1, last_used=5000, hits=50, entry_class="learned")
    old, new = entry(2, last_used=1000, parent=1), entry(3, last_used=3000, parent=1)
    other = entry(4, last_used=6000)
    assert ids([prefix, old, new, other]) == [3, 4, 2]
    # A state that cannot be cropped serves nothing but its own continuations.
    assert ids([prefix, old, new, other], crops=False) == [1, 4, 3, 2]
    assert ids([entry(1, parent=2), entry(2, parent=1), entry(3, parent=9)])  # ends, whatever the parents are


def test_get_can_leave_the_counts_alone(tmp_path: Path) -> None:
    for write_behind in (False, True):
        with Store(tmp_path / f"{write_behind}", write_behind=write_behind) as store:
            put = store.put(np.arange(10, dtype=np.int32), b"x" * 1000)
            saved = store.get(put.id, count=False)
            assert saved is not None
            assert bytes(saved.main) == b"x" * 1000
            assert store.get(put.id + 1, count=False) is None
            found = store.entry(put.id)
            assert found is not None
            assert (found.hits, store.stats().hits, store.stats().misses) == (0, 0, 0)
            store.get(put.id)
            assert store.stats().hits == 1
