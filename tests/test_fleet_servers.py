"""Two machines: two processes with folders, stores and llama-servers of their own, and one object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import proxykit
import pytest
import serverkit
from fleetkit import credentials, free_port, listed, wait_for
from proxykit import Chat

from kvstore import Store
from kvstore.engines.llama_server.process import LlamaServer
from kvstore.fleet.names import ObjectName, parse_path

SYSTEM = "You are the assistant of a small house. Be kind to all, and answer in few and short words. " * 12


@contextmanager
def machine(folder: Path, url: str, *, publish: str = "learned") -> Iterator[tuple[LlamaServer, str]]:
    """A server, and a proxy before it in a process of its own; yields the proxy's address."""
    with serverkit.new_server(folder / "slots") as server:
        words = [
            sys.executable, "-m", "kvstore.cli", "serve", "--upstream", server.url, "--slot-dir", server.slot_dir,
            "--store", folder / "states.kvstore", "--listen", "127.0.0.1:0", "--min-saved-mib", "0.05", "--json",
            "--remote", url, "--publish", publish, "--remote-min-tokens", "16", "-o", "poll_seconds=0.2", "-v",
        ]  # fmt: skip
        environment = {**os.environ, "KVSTORE_REMOTE_KEY_FILE": str(folder.parent / "fleet.key")}
        if server.api_key:
            environment["KVSTORE_UPSTREAM_API_KEY"] = server.api_key
        with (folder / "proxy.log").open("wb") as log:
            process = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdout is not None
        try:
            address = str(json.loads(process.stdout.readline())["url"])
            proxykit.wait_for(lambda: proxykit.stats(address)["caching"])
            yield server, address
        finally:
            process.terminate()
            process.wait(120)
            process.stdout.close()


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "fleet.key").write_text(bytes(range(32)).hex())
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    if request.param == "folder":
        return f"file://{tmp_path}/bucket"
    request.getfixturevalue("harm")
    return str(request.getfixturevalue("bucket"))


def names(url: str) -> list[ObjectName]:
    return [name for path in listed(url) if (name := parse_path(path)) is not None]


def learned(url: str) -> ObjectName | None:
    return next((name for name in names(url) if name.entry_class == "learned"), None)


def remote(address: str) -> dict[str, float]:
    return dict(proxykit.stats(address)["remote"])


@pytest.mark.slow
def test_the_first_chat_over_a_published_prefix_computes_only_its_own_tokens(tmp_path: Path, url: str) -> None:
    with machine(tmp_path / "a", url) as (_, a):
        for name in ("Ada", "Bob", "Cem", "Dov"):
            Chat(a, name, SYSTEM).ask()
            proxykit.wait_saved(a)
        prefix = wait_for(lambda: learned(url))
        assert remote(a)["remote_published_total"] >= 1
    with serverkit.new_server(tmp_path / "c" / "slots") as cold:
        headers = {"Authorization": f"Bearer {cold.api_key}"} if cold.api_key else {}
        body = {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "I am Eve. Where is the kettle?"}],
            "max_tokens": 8, "temperature": 0,
        }  # fmt: skip
        want = proxykit.post(cold.url + "/v1/chat/completions", body, **headers)
    assert want["timings"]["cache_n"] == 0
    with machine(tmp_path / "b", url, publish="none") as (_, b):
        wait_for(lambda: remote(b)["remote_polls_total"] > 0)
        got = proxykit.post(b + "/v1/chat/completions", body)
        assert got["timings"]["cache_n"] == prefix.n_tokens
        assert got["timings"]["prompt_n"] == want["timings"]["prompt_n"] - prefix.n_tokens
        assert got["choices"][0]["message"]["content"] == want["choices"][0]["message"]["content"]
        figures = remote(b)
        assert (figures["remote_fetches_total"], figures["remote_up"]) == (1, 1)
        text = httpx.get(b + "/metrics").text
        for name in figures:
            assert f"\nkvstore_{name} " in text
    with Store(tmp_path / "b" / "states.kvstore") as store:  # what was fetched is here now
        assert prefix.n_tokens in {entry.n_tokens for entry in store.entries()}


def test_with_the_object_store_down_the_proxy_serves_as_without(tmp_path: Path) -> None:
    (tmp_path / "fleet.key").write_text(bytes(range(32)).hex())
    (tmp_path / "a").mkdir()
    with credentials(f"http://127.0.0.1:{free_port()}"), machine(tmp_path / "a", "s3://kvstore/nowhere") as (_, a):
        chat = Chat(a, "Ada", SYSTEM)
        chat.ask()
        proxykit.wait_saved(a)
        chat.ask()
        assert chat.reused > 0.5
        assert proxykit.stats(a)["failures"] == 0
        assert remote(a)["remote_polls_total"] == 0
