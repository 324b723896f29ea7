"""Only the plain computation of its tokens is stored: what other requests, settings and servers leave in a slot is not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serverkit

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import ggufkit
import proxykit
from proxykit import Chat, post, stats, wait_for, wait_saved

from kvstore import Store, layout
from kvstore.engines.llama_server.process import LlamaServer

TEXT = "A text that is long enough to be kept, and that says nothing of interest to anyone who reads it. " * 2
ROUNDING = 0.03
WAIT = 2.0  # seconds until a slot is saved, where something has to happen before


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    return str(ggufkit.write_lora(tmp_path / "adapter.gguf", 1))


def rows(state: Any, n: int) -> Any:
    """The f16 rows of the first n positions of a state of pure attention, flattened."""
    cropped = layout.crop(state, n)
    (part,) = layout.parse(cropped).attention
    (stream,) = [s for s in part.streams if s.n_cells]
    order = np.argsort(stream.pos)
    found = []
    for s in stream.sections:
        size = s.rows * stream.n_cells * s.width
        found.append(cropped[s.start : s.start + size].reshape(s.rows, stream.n_cells, s.width)[:, order].ravel())
    return np.concatenate(found).view("<f2").astype(np.float32)


def assert_all_plain(folder: Path, fingerprint: str, **options: Any) -> int:
    """Every entry holds what a fresh server computes of its tokens; how many there are."""
    n = 0
    with (
        Store(folder / "states.kvstore", fingerprint=fingerprint) as store,
        serverkit.new_server(folder / "fresh", **options) as server,
    ):
        for entry in store.entries():
            state = store.get(entry.id)
            assert state is not None
            server.slot_erase(0)
            server.completion(state.tokens.tolist(), n_predict=0)
            fresh = serverkit.save_slot(server)
            # Tokens computed one by one differ from those of a batch in their last bits.
            off = np.abs(rows(state.main, entry.n_tokens) - rows(fresh.state, entry.n_tokens)).max()
            assert off < ROUNDING, f"{entry.n_tokens} tokens: {entry.excerpt[:40]}"
            n += 1
    return n


@contextmanager
def watched(folder: Path, **options: Any) -> Iterator[tuple[LlamaServer, str]]:
    """A server and its proxy. In the end, all that was stored must be plain."""
    extra = options.get("extra", {})
    with proxykit.both(folder, **options) as (server, url):
        yield server, url
        fingerprint = stats(url)["fingerprint"]
    plain = {name: value for name, value in extra.items() if name == "lora"}
    assert_all_plain(folder, fingerprint, n_ctx=options.get("n_ctx", 2048), extra=plain)


@pytest.mark.parametrize("way", ["through the proxy", "past the proxy"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow
def test_a_request_with_its_own_adapters(tmp_path: Path, adapter: str, way: str, when: str) -> None:
    with watched(tmp_path, extra={"lora": adapter}, idle_seconds=WAIT) as (server, url):
        own = {"prompt": TEXT, "n_predict": 2, "temperature": 0, "lora": [{"id": 0, "scale": 0.0}]}

        def other() -> None:
            if way == "through the proxy":
                post(url + "/completion", own)
            else:
                server.request("POST", "/completion", own)

        if when == "before":
            other()
        answer = post(url + "/completion", {"prompt": TEXT, "n_predict": 2, "temperature": 0})
        if when == "after":
            wait_for(lambda: stats(url)["slots"][0]["tokens"] > 0)
            other()
        told = wait_saved(url)
        if when == "before":
            # The prefix that was computed with other adapters is not gone on from.
            assert answer["timings"]["cache_n"] == 0
            assert (told["saves"], told["saves_unfit"]) == (1, 0)
        else:
            assert told["saves"] == 0


def test_a_state_from_the_cache_of_the_server_itself(tmp_path: Path, adapter: str) -> None:
    extra = {"lora": adapter, "cache_ram_mib": 256}
    with watched(tmp_path, extra=extra) as (_, url):
        own = {"prompt": TEXT, "n_predict": 2, "temperature": 0, "lora": [{"id": 0, "scale": 0.0}]}
        post(url + "/completion", own)
        # The server keeps the state that this one overwrites.
        post(url + "/completion", {**own, "prompt": "Something else that is long enough. " * 8})
        for end in ("", " And more."):
            post(url + "/completion", {"prompt": TEXT + end, "n_predict": 2, "temperature": 0})
            wait_saved(url)


def test_a_state_of_ours_from_the_cache_of_the_server_is_stored(tmp_path: Path) -> None:
    with watched(tmp_path, extra={"cache_ram_mib": 256}) as (_, url):
        for text in (TEXT, "Something else that is long enough. " * 8, TEXT + "And more, which is a reason to save it."):
            post(url + "/completion", {"prompt": text, "n_predict": 2, "temperature": 0})
            told = wait_saved(url)
        assert (told["saves"], told["saves_unfit"]) == (3, 0)


def test_adapters_changed_by_a_request(tmp_path: Path, adapter: str) -> None:
    with proxykit.both(tmp_path, extra={"lora": adapter}) as (server, url):
        body = {"prompt": TEXT, "n_predict": 2, "temperature": 0}
        post(url + "/completion", body)
        first = wait_saved(url)["fingerprint"]
        for change, way in ((0.0, url), (0.5, server.url)):
            headers = {"Authorization": f"Bearer {server.api_key}"}
            httpx.post(way + "/lora-adapters", json=[{"id": 0, "scale": change}], headers=headers).raise_for_status()
            wait_for(lambda: post(url + "/completion", body) and stats(url)["fingerprint"] != first)
            other = wait_saved(url)["fingerprint"]
        httpx.post(url + "/lora-adapters", json=[{"id": 0, "scale": 1.0}]).raise_for_status()
        answer = post(url + "/completion", body)
        assert stats(url)["fingerprint"] == first
        assert answer["timings"]["cache_n"] > 0  # of the first one's state
        assert stats(url)["recent"][0]["source"] == "store"
    assert_all_plain(tmp_path, first, extra={"lora": adapter})
    assert other != first


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_was_shifted_is_not_stored(tmp_path: Path, stream: bool) -> None:
    with watched(tmp_path, n_ctx=256, extra={"context_shift": True}) as (_, url):
        body = {"prompt": TEXT[:100], "n_predict": 300, "ignore_eos": True, "temperature": 0, "stream": stream}
        httpx.post(url + "/completion", json=body, timeout=60).raise_for_status()
        # At once: what the slot holds is about to be overwritten.
        post(url + "/completion", {"prompt": "Something else. " * 8, "n_predict": 2, "temperature": 0})
        told = wait_saved(url)
        assert told["saves_before_overwrite"] == 0
        assert told["saves"] == 1


@pytest.mark.parametrize("keep", [{}, {"n_keep": -1}])
def test_a_shifted_context_of_a_client_that_left(tmp_path: Path, keep: dict[str, int]) -> None:
    with watched(tmp_path, n_ctx=256, extra={"context_shift": True}) as (server, url):
        body = {"prompt": TEXT[:100], "n_predict": 5000, "ignore_eos": True, "temperature": 0, "stream": True, **keep}
        with httpx.stream("POST", url + "/completion", json=body, timeout=60) as response:
            for n, _ in enumerate(response.iter_lines()):
                if n > 1000:
                    break
        wait_for(lambda: not any(slot["is_processing"] for slot in server.slots()))
        wait_for(lambda: not any(slot["busy"] for slot in stats(url)["slots"]))
        wait_saved(url)
        assert stats(url)["saves"] == 0


@pytest.mark.parametrize("asked", ["by the server", "by the request", "before"])
@pytest.mark.slow
def test_moved_chunks_are_not_stored(tmp_path: Path, asked: str) -> None:
    extra = {} if asked == "by the request" else {"cache_reuse": 8}
    with watched(tmp_path, extra=extra) as (server, url):
        a, b = list(range(10, 60)), [100 + i % 70 for i in range(80)]
        body = {"n_predict": 2, "temperature": 0}
        post(url + "/completion", {**body, "prompt": a + b})
        wait_saved(url)
        more = {"n_cache_reuse": 8} if asked == "by the request" else {}
        moved = {**body, "prompt": a[:30] + b, **more}
        if asked == "before":
            assert server.request("POST", "/completion", moved)["timings"]["cache_n"] > 30
            moved["prompt"] = [*moved["prompt"], 9, 9]
        answer = post(url + "/completion", moved)
        if asked == "by the server":
            assert answer["timings"]["cache_n"] <= 30
        if asked == "by the request":
            assert answer["timings"]["cache_n"] > 30
            post(url + "/completion", {**body, "prompt": a[:30] + b + [9, 9]})
        wait_saved(url)


@pytest.mark.parametrize("action", ["restore", "erase", "save"])
@pytest.mark.parametrize("way", ["through the proxy", "past the proxy"])
@pytest.mark.slow
def test_slot_actions_of_others(tmp_path: Path, adapter: str, action: str, way: str) -> None:
    with watched(tmp_path, extra={"lora": adapter}, idle_seconds=WAIT) as (server, url):
        # Past the proxy, only another number of tokens tells.
        text = TEXT + "!" if way == "through the proxy" else TEXT[:-40]
        own = {"prompt": text, "n_predict": 0, "lora": [{"id": 0, "scale": 0.0}]}
        server.request("POST", "/completion", own)
        server.slot_save(0, "other.bin")
        server.slot_erase(0)
        post(url + "/completion", {"prompt": TEXT, "n_predict": 2, "temperature": 0})
        wait_for(lambda: stats(url)["slots"][0]["tokens"] > 0)
        target = url if way == "through the proxy" else server.url
        headers = {"Authorization": f"Bearer {server.api_key}"}
        name = "kept.bin" if action == "save" else "other.bin"
        httpx.post(f"{target}/slots/0?action={action}", json={"filename": name}, headers=headers).raise_for_status()
        if action == "restore":
            post(url + "/completion", {"prompt": TEXT + "!!", "n_predict": 2, "temperature": 0})
        wait_saved(url)


def test_a_plain_chat_is_stored_after_all_of_it(tmp_path: Path, adapter: str) -> None:
    """A slot is fit again once it is erased, restored or computed from its first token on."""
    with watched(tmp_path, extra={"lora": adapter}) as (_, url):
        chat = Chat(url, "Anna")
        chat.ask()
        wait_saved(url)
        for _ in range(2):
            post(url + "/completion", {"prompt": TEXT, "n_predict": 2, "lora": [{"id": 0, "scale": 0.0}]})
            chat.ask()
            assert chat.reused > 0.85
            assert stats(url)["recent"][0]["source"] == "store"
            saves = stats(url)["saves"]
            wait_saved(url)
        assert saves >= 1
        assert stats(url)["saves"] == 3


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("llama", {}, {"rope_freq_base": 20000.0}),
        ("llama", {}, {"rope_freq_scale": 0.5}),
        ("llama", {"rope_freq_scale": 0.5}, {"rope_freq_scale": 0.5, "rope_scaling": "yarn"}),
        ("gemma3", {}, {"swa_full": True}),
        ("llama", {"lora": 1}, {"lora": 2}),
        ("llama", {"lora": 1}, {"lora": 1}),
        ("jamba", {}, {}),
    ],
)
@pytest.mark.slow
def test_a_restart_with_other_settings_is_noticed(
    tmp_path: Path, name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    path = tmp_path / "adapter.gguf"

    def extra(given: dict[str, Any]) -> dict[str, Any]:
        if "lora" in given:
            ggufkit.write_lora(path, given["lora"])
            given = {**given, "lora": str(path)}
        return {"cache_ram_mib": 0, "threads": 1, **given}

    with proxykit.both(tmp_path, name, extra=extra(before)) as (server, url):
        chat = Chat(url, "Anna")
        chat.ask()
        told = wait_saved(url)
        assert told["probed"]
        server.extra = extra(after)
        proxykit.restart(server)
        chat.ask()
        again = stats(url)
        if before == after:
            assert again["fingerprint"] == told["fingerprint"]
            assert chat.reused > 0.8
        else:
            assert again["fingerprint"] != told["fingerprint"]
            assert chat.timings["cache_n"] == 0


def test_what_other_slots_hold_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    """Sums over a buffer that all slots share depend on where in it a slot's cells are."""
    options = {"parallel": 3, "flash_attn": False, "extra": {"kv_unified": True}}
    prints = []
    with serverkit.new_server(tmp_path / "slots", "gemma3", **options) as server:
        for n in range(3):
            with proxykit.proxied(server, tmp_path / "store") as url:
                prints.append(stats(url)["fingerprint"])
            server.completion(server.tokenize(TEXT) * (n + 1), n_predict=0, id_slot=n)
    assert len(set(prints)) == 1
    assert '"probe": null' not in prints[0]


def test_a_running_request_is_not_disturbed_by_the_probe(tmp_path: Path) -> None:
    body = {"prompt": TEXT, "n_predict": 1500, "ignore_eos": True, "temperature": 0, "return_tokens": True}
    with serverkit.new_server(tmp_path / "slots", n_ctx=4096) as server:
        alone = server.completion(**body)["tokens"]
        server.slot_erase(0)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: server.completion(**body))
            wait_for(lambda: server.slots()[0]["is_processing"] or running.done())
            with proxykit.proxied(server, tmp_path / "store") as url:
                assert stats(url)["probed"]
            assert running.result()["tokens"] == alone
