"""The proxy before a real llama-server with a tiny model."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import serverkit

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import proxykit
from proxykit import Chat, post, proxied, stats, wait_for, wait_saved

from kvstore import Store
from kvstore.engines.llama_server.process import LlamaServer
from kvstore.engines.proxy.http_client import HttpClient


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, str]]:
    """A server with two slots, and the proxy before it."""
    with proxykit.both(tmp_path_factory.mktemp("proxy"), parallel=2, n_ctx=8192) as found:
        yield found


@pytest.mark.parametrize("slots", [1, 3])
def test_chats_survive_each_other_and_the_server(tmp_path: Path, slots: int) -> None:
    with proxykit.both(tmp_path, parallel=slots, n_ctx=4096 * slots) as (server, url):
        a, b = Chat(url, "Anna"), Chat(url, "Bert")
        for chat in (a, b, a, b, a):
            chat.ask()
            assert chat is b or len(chat.messages) == 3 or chat.reused > 0.85
        wait_saved(url)
        proxykit.restart(server)
        for chat in (a, b):
            chat.ask()
            assert chat.reused > 0.85
        told = stats(url)
        assert told["upstream_changes"] == 1
        assert told["restores"] >= 2
        assert (told["failures"], told["token_mismatches"], told["restores_useless"]) == (0, 0, 0)
        assert told["recent"][0]["source"] == "store"
        assert told["saved_seconds"] > 0
    assert os.listdir(server.slot_dir) == []
    with Store(tmp_path / "states.kvstore", fingerprint=told["fingerprint"]) as store:
        assert store.verify() == []
        assert {entry.excerpt[:9] for entry in store.entries(entry_class="normal")} == {"I am Anna", "I am Bert"}


def test_chats_survive_the_proxy(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        with proxied(server, tmp_path / "store") as url:
            chat = Chat(url, "Carla")
            chat.ask()
        # Closing saves what was not saved yet.
        server.slot_erase(0)
        with proxied(server, tmp_path / "store") as url:
            chat.url = url
            chat.ask()
            assert chat.reused > 0.85


def test_system_prompt_is_learned(tmp_path: Path) -> None:
    with proxykit.both(tmp_path) as (server, url):
        for name in ("Dora", "Emil", "Fritz"):
            Chat(url, name).ask()
            wait_saved(url)
        told = wait_for(lambda: len((s := stats(url))["prefixes"]) == 1 and s)
        (root,) = told["prefixes"]
        assert root["class"] == "learned"
        assert len(root["children"]) == 3
        assert len(told["store"]["families"]) == 1
        # A new conversation has all of the system prompt from the store.
        proxykit.restart(server)
        chat = Chat(url, "Gerda")
        chat.ask()
        assert chat.timings["cache_n"] >= root["n_tokens"] - 1


def test_openai_client_streams_a_chat(pair: tuple[LlamaServer, str]) -> None:
    openai = pytest.importorskip("openai")
    _, url = pair
    messages: list[Any] = [{"role": "system", "content": proxykit.SYSTEM}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        for question in proxykit.QUESTIONS[:3]:
            messages.append({"role": "user", "content": question})
            stream = client.chat.completions.create(
                model="any", messages=messages, stream=True, max_tokens=8, temperature=0, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            messages.append({"role": "assistant", "content": text})
            usage = chunks[-1].usage
            assert usage.completion_tokens <= 8
        assert usage.prompt_tokens_details.cached_tokens > 0.8 * usage.prompt_tokens
        whole = client.chat.completions.create(model="any", messages=messages[:-1], max_tokens=8, temperature=0)
        assert whole.choices[0].message.content == text


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completions"])
@pytest.mark.parametrize("form", ["text", "tokens", "stream"])
def test_completions(pair: tuple[LlamaServer, str], path: str, form: str) -> None:
    server, url = pair
    text = f"{path} and {form}: " + serverkit.PROMPT
    body: dict[str, Any] = {"prompt": text, "n_predict": 4, "max_tokens": 4, "temperature": 0}
    if form == "tokens":
        body["prompt"] = server.tokenize(text)
    post(url + path, body)
    wait_saved(url)
    for slot in range(2):
        server.slot_erase(slot)
    if form == "stream":
        response = httpx.post(url + path, json={**body, "stream": True}, timeout=240)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        timings = events[-1]["timings"]
    else:
        timings = post(url + path, body)["timings"]
    # All but the last token of the prompt, although the slots were empty.
    assert timings["cache_n"] >= len(server.tokenize(text)) - 1


def test_requests_at_the_same_time(pair: tuple[LlamaServer, str]) -> None:
    _, url = pair
    chats = [Chat(url, f"Number {i}") for i in range(5)]

    def talk(chat: Chat) -> float:
        for _ in range(3):
            chat.ask()
        return chat.reused

    with ThreadPoolExecutor(5) as pool:
        shares = list(pool.map(talk, chats))
    assert min(shares) > 0.5
    wait_saved(url)
    assert stats(url)["failures"] == 0


def test_a_slot_that_was_asked_for_is_used(pair: tuple[LlamaServer, str]) -> None:
    _, url = pair
    for slot in (1, 0, 1):
        post(url + "/completion", {"prompt": f"For {slot}. " + serverkit.PROMPT, "n_predict": 2, "id_slot": slot})
        assert stats(url)["recent"][0]["slot"] == slot
        wait_saved(url)  # a slot that is being saved is not free
        post(url + "/completion", {"prompt": f"For {slot}. " + serverkit.PROMPT, "n_predict": 2, "id_slot": -1})
        assert stats(url)["recent"][0]["slot"] == slot  # the one that has it


def test_everything_else_passes(pair: tuple[LlamaServer, str]) -> None:
    server, url = pair
    key = {"Authorization": f"Bearer {server.api_key}"}
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/props", None),
        ("GET", "/nowhere?a=%2F", None),
        ("POST", "/tokenize", {"content": "Hello"}),
        ("POST", "/v1/embeddings", {"input": "Hello"}),
        ("POST", "/v1/chat/completions", {"messages": "no list"}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("POST", "/completion", {"prompt": ["two", "prompts"], "n_predict": 1, "temperature": 0, "seed": 1}),
    ):
        through = httpx.request(method, url + path, json=body)
        direct = httpx.request(method, server.url + path, json=body, headers=key)
        assert through.status_code == direct.status_code, path
        assert through.headers.get("content-type") == direct.headers.get("content-type")
        if "completion" not in path and "models" not in path:
            assert through.content == direct.content


def test_server_used_by_others_is_noticed(pair: tuple[LlamaServer, str]) -> None:
    server, url = pair
    chat = Chat(url, "Hans")
    chat.ask()
    wait_saved(url)
    for slot in range(2):
        server.completion("Something else that has nothing to do with it", n_predict=1, id_slot=slot)
    chat.ask()
    assert chat.reused > 0.85
    assert stats(url)["recent"][0]["source"] == "store"


def test_client_that_goes_away_stops_the_server(pair: tuple[LlamaServer, str]) -> None:
    server, url = pair
    wait_saved(url)

    def working() -> bool:
        return any(slot["is_processing"] for slot in server.slots())

    body = {"prompt": "Once upon a time " * 30, "n_predict": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/completion", json=body) as response:
        chunks = response.iter_bytes()
        next(chunks)
        assert working()
    wait_for(lambda: not working(), 5)
    told = wait_saved(url)
    assert not any(slot["busy"] for slot in told["slots"])
    # What was computed is kept.
    for slot in range(2):
        server.slot_erase(slot)
    assert post(url + "/completion", {**body, "stream": False, "n_predict": 1})["timings"]["cache_n"] > 300


def test_a_store_that_fails_costs_nothing_but_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("injected")

    with proxykit.both(tmp_path) as (server, url):
        chat = Chat(url, "Ida")
        chat.ask()
        wait_saved(url)
        for name in ("match", "get", "put"):
            with monkeypatch.context() as patch:
                patch.setattr(Store, name, broken)
                server.slot_erase(0)
                before = stats(url)["failures"]
                chat.ask()
                wait_for(lambda before=before: stats(url)["failures"] > before)
        server.slot_erase(0)
        wait_saved(url)
        chat.ask()
        assert chat.timings["prompt_n"] > 0
    assert os.listdir(server.slot_dir) == []


def test_files_are_private_and_stale_ones_go(tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    done = threading.Event()
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o700)

    def watch() -> None:
        while not done.is_set():
            for entry in os.scandir(folder):
                try:
                    seen[entry.name] = stat.S_IMODE(entry.stat().st_mode)
                except FileNotFoundError:
                    continue

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = [f"kvstore-{dead.pid}-{'0' * 16}.bin", f".kvstore-{dead.pid}-{'1' * 16}.tmp"]
    kept = [f"kvstore-{os.getppid()}-{'2' * 16}.bin", "mine.bin"]
    for name in (*stale, *kept):
        (folder / name).write_bytes(b"old")
    thread = threading.Thread(target=watch)
    old = os.umask(0o022)
    try:
        with proxykit.both(tmp_path, slot_memory=0) as (server, url):
            assert sorted(os.listdir(folder)) == sorted(kept)
            thread.start()
            chat = Chat(url, "Jo")
            for _ in range(2):
                chat.ask()
                wait_saved(url)
                server.slot_erase(0)
    finally:
        os.umask(old)
        done.set()
        thread.join()
    written = {name: mode for name, mode in seen.items() if name not in kept}
    assert written
    if os.name != "nt":
        assert set(written.values()) == {0o600}
    assert sorted(os.listdir(folder)) == sorted(kept)


def test_other_kv_type_and_model_never_meet(tmp_path: Path) -> None:
    prints = []
    for options in ({}, {"cache_type_k": "q8_0"}, {"cache_type_v": "q8_0", "flash_attn": True}, {"flash_attn": False}):
        with proxykit.both(tmp_path, **options) as (_, url):
            chat = Chat(url, "Karl")
            chat.ask()
            assert chat.timings["cache_n"] == 0
            prints.append(wait_saved(url)["fingerprint"])
    assert len(set(prints)) == len(prints)


def test_server_that_dies_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    with proxykit.both(tmp_path, n_ctx=4096) as (server, url):
        chat = Chat(url, "Olga")
        chat.ask()
        wait_saved(url)
        body = {"prompt": "Once upon a time ", "n_predict": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/completion", json=body, timeout=240) as response:
            chunks = response.iter_bytes()
            next(chunks)
            proxykit.restart(server)
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in chunks:
                    pass
        chat.ask()
        assert chat.reused > 0.85
        assert stats(url)["recent"][0]["source"] == "store"


def test_server_without_slot_files_is_served_without_the_cache(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with serverkit.new_server(tmp_path / "slots") as server:
        from kvstore.engines.proxy import runner as proxy

        options = {"slot_dir": tmp_path / "other", "store": tmp_path / "s", "upstream_api_key": server.api_key}
        with proxy.running(upstream=server.url, listen="127.0.0.1:0", **options) as url:
            wait_for(lambda: "one directory" in (stats(url)["off"] or ""))
            Chat(url, "Lena").ask()
            assert stats(url)["passed"] == 1


def test_server_with_a_key_that_the_proxy_lacks(tmp_path: Path) -> None:
    from kvstore.engines.proxy import runner as proxy

    with serverkit.new_server(tmp_path / "slots") as server:
        options = {"slot_dir": server.slot_dir, "store": tmp_path / "s"}
        with proxy.running(upstream=server.url, listen="127.0.0.1:0", **options) as url:
            wait_for(lambda: "--upstream-api-key" in (stats(url)["off"] or ""))
            body = {"prompt": "Hello", "n_predict": 1}
            assert httpx.post(url + "/completion", json=body).status_code == 401
            assert post(url + "/completion", body, Authorization=f"Bearer {server.api_key}")["timings"]


def test_upstream_that_is_not_there(tmp_path: Path) -> None:
    from kvstore.engines.proxy import runner as proxy

    server = serverkit.new_server(tmp_path / "slots", api_key="")
    server.slot_dir.mkdir()
    with serverkit.new_server(tmp_path / "port", api_key="") as other:
        port = other.port
    server.port, server._fixed_port = port, True
    options = {"upstream": f"http://127.0.0.1:{port}", "slot_dir": server.slot_dir, "store": tmp_path / "s"}
    with proxy.running(listen="127.0.0.1:0", **options) as url:
        chat = Chat(url, "Max")
        answer = httpx.post(url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert answer.status_code == 502
        assert "error" in answer.json()
        with server:
            chat.ask()
            assert stats(url)["requests"] == 1


def test_a_prompt_seen_before_takes_few_requests(pair: tuple[LlamaServer, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proxy asks the server before an answer, which is most of what it costs; docs/proxy.md has times."""
    _, url = pair
    asked: list[str] = []
    request = HttpClient.request

    async def counted(self: HttpClient, method: str, path: str, *rest: Any, **more: Any) -> tuple[int, bytes]:
        asked.append(path)
        return await request(self, method, path, *rest, **more)

    chat = Chat(url, "Nina")
    chat.ask()
    wait_saved(url)
    body = {"messages": chat.messages[:2], "max_tokens": 1, "temperature": 0}
    post(url + "/v1/chat/completions", body)
    monkeypatch.setattr(HttpClient, "request", counted)
    for _ in range(9):
        post(url + "/v1/chat/completions", body)
    assert asked
    assert len(asked) <= 9 * 4, asked
    assert "/tokenize" not in asked
