"""States that pass between the proxy and llama-server through memory: the same states, nothing left behind, the disk where
memory does not work."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from kvstore import InvalidInputError, SlotFileError, Store
from kvstore.engines import exchange
from kvstore.engines.exchange import Exchange, MemoryExchange
from kvstore.engines.llama_server.process import LlamaServer
from kvstore.engines.proxy import runner as proxy
from kvstore.engines.proxy.llama_backend import LlamaServerBackend
from kvstore.engines.proxy.slot_files import SlotFiles
from kvstore.engines.proxy.slot_memory import SlotMemory
from kvstore.engines.proxy.upstream import Upstream, UpstreamError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files in memory")
MIB = 1 << 20


class Watched(LlamaServerBackend):
    """Notes for each transfer whether the name that the server was given was a link."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.links: list[bool] = []

    async def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 60) -> Any:
        if isinstance(body, dict) and "filename" in body:
            self.links.append((self.files.folder / body["filename"]).is_symlink())
        return await super().ask(method, path, body, timeout=timeout)


@contextmanager
def backend(server: LlamaServer, memory: SlotMemory) -> Iterator[tuple[Watched, Callable[[Any], Any]]]:
    """With it, a function that runs a coroutine to its end."""
    loop = asyncio.new_event_loop()
    upstream = Upstream(server.url, api_key=server.api_key)
    found = Watched(upstream, server.slot_dir, memory=memory)
    try:
        yield found, loop.run_until_complete
    finally:
        loop.run_until_complete(found.close())
        loop.run_until_complete(upstream.close())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.parametrize("model", serverkit.ARCHITECTURES)
def test_memory_and_disk_give_the_same_bytes_and_text(tmp_path: Path, model: str) -> None:
    with serverkit.new_server(tmp_path / "slots", model) as server:
        memory = SlotMemory(256 * MIB)
        with backend(server, memory) as (found, run):
            assert run(found.probe()).probed
            assert memory.off == ""
            tokens = server.tokenize(serverkit.PROMPT)
            before = server.completion(tokens, n_predict=8, return_tokens=True)
            found.links.clear()
            through_memory = run(found.save_slot(0, 60, n_tokens=400))
            memory.turn_off("for the test")
            through_disk = run(found.save_slot(0, 60, n_tokens=400))
            assert found.links == [True, False]
            assert through_memory.tokens.tolist() == through_disk.tokens.tolist()
            assert through_memory.state.tobytes() == through_disk.state.tobytes()
            texts = []
            for on in (True, False):
                memory.turn_on() if on else memory.turn_off("for the test")
                server.slot_erase(0)
                assert run(found.restore_slot(0, through_memory, 60)) == through_memory.tokens.shape[0]
                assert found.links[-1] is on
                again = server.completion([*tokens, *before["tokens"], 5], n_predict=8, return_tokens=True)
                texts.append((again["content"], again["tokens"], again["timings"]["cache_n"]))
            assert texts[0] == texts[1]
            del through_memory
        assert memory.used == 0
    assert os.listdir(server.slot_dir) == []


def test_chats_go_through_memory_and_the_figures_say_so(tmp_path: Path) -> None:
    with proxykit.both(tmp_path) as (server, url):
        a, b = Chat(url, "Anna", system="One. " * 90), Chat(url, "Bert", system="Two. " * 90)
        for chat in (a, b, a, b):
            chat.ask()
            wait_saved(url)
        assert b.reused > 0.85
        told = wait_for(lambda: (s := stats(url)) and not s["slot_memory"]["used_bytes"] and s)
        assert told["memory_transfers"] >= 6
        assert (told["disk_transfers"], told["failures"], told["slot_memory"]["off"]) == (0, 0, None)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < told["slot_memory"]["budget_bytes"] <= total // 4
        metrics = httpx.get(url + "/metrics").text
        assert f"kvstore_memory_transfers_total {told['memory_transfers']}\n" in metrics
        assert f"kvstore_slot_memory_budget_bytes {told['slot_memory']['budget_bytes']}\n" in metrics
    assert os.listdir(server.slot_dir) == []
    with Store(tmp_path / "states.kvstore", fingerprint=told["fingerprint"]) as store:
        assert store.verify() == []


@pytest.mark.parametrize("slot_memory", [0, 0.0001])
def test_no_room_in_memory_means_the_disk(tmp_path: Path, slot_memory: float) -> None:
    with (
        serverkit.new_server(tmp_path / "slots") as server,
        proxied(server, tmp_path / "store", slot_memory=slot_memory) as url,
    ):
        chat = Chat(url, "Anna")
        for _ in range(2):
            chat.ask()
            wait_saved(url)
            server.slot_erase(0)
        assert chat.reused > 0.85
        told = stats(url)
        assert (told["memory_transfers"], told["failures"]) == (0, 0)
        assert told["disk_transfers"] >= 3
        assert (told["slot_memory"]["off"] is None) is (slot_memory > 0)


@pytest.mark.parametrize("wrong", [-1, float("inf"), float("nan")])
def test_a_wrong_budget_is_named(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(InvalidInputError, match="slot_memory"):
        proxy.serve(upstream="http://127.0.0.1:1", slot_dir=tmp_path, store=tmp_path / "s", slot_memory=wrong)


# -- a server that does not see our memory


def test_a_server_that_cannot_open_the_link_gets_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, or for another user: the link leads nowhere."""
    link = os.symlink
    monkeypatch.setattr(os, "symlink", lambda target, path: link(target.replace("/proc/", "/proc/0"), path))
    with proxykit.both(tmp_path) as (server, url):
        chat = Chat(url, "Anna")
        for _ in range(2):
            chat.ask()
            wait_saved(url)
            server.slot_erase(0)
        assert chat.reused > 0.85
        told = stats(url)
        assert "cannot open" in told["slot_memory"]["off"]
        assert (told["memory_transfers"], told["failures"], told["probed"]) == (0, 0, True)
    assert os.listdir(server.slot_dir) == []


def test_a_server_in_another_pid_namespace_gets_files(tmp_path: Path) -> None:
    """A real one: its /proc is not ours."""
    command = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    server = serverkit.new_server(tmp_path / "slots")
    server.command = type(server.command)((*command, *server.command.argv), server.command.xllamacpp, server.command.version)
    with server, proxied(server, tmp_path / "store") as url:
        chat = Chat(url, "Anna")
        for _ in range(2):
            chat.ask()
            wait_saved(url)
            server.slot_erase(0)
        assert chat.reused > 0.85
        told = stats(url)
        assert "cannot open" in told["slot_memory"]["off"]
        assert (told["memory_transfers"], told["failures"]) == (0, 0)
    assert os.listdir(server.slot_dir) == []


def test_a_link_that_stops_working_costs_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxykit.both(tmp_path) as (server, url):
        chat = Chat(url, "Anna")
        chat.ask()
        wait_saved(url)
        assert stats(url)["memory_transfers"]
        link = os.symlink
        monkeypatch.setattr(os, "symlink", lambda target, path: link(target.replace("/proc/", "/proc/0"), path))
        server.slot_erase(0)
        chat.ask()
        assert chat.reused > 0.85
        told = wait_saved(url)
        assert "does not see" in told["slot_memory"]["off"]
        assert (told["failures"], told["restores_failed"], told["saves"]) == (0, 0, 2)


def test_a_restore_that_the_server_refuses_everywhere_is_not_the_memorys_fault(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        memory = SlotMemory(256 * MIB)
        with backend(server, memory) as (found, run):
            form = run(found.probe()).form
            found.links.clear()
            state = form.state.copy()
            state[:4] = 255  # the number of streams
            broken = type(form)(form.tokens, state, form.version, form.packed)
            with pytest.raises(UpstreamError):
                run(found.restore_slot(0, broken, 60))
            assert found.links == [True, False]
            assert memory.off == ""


# -- nothing is left behind


_SERVE = """
import sys
from kvstore.engines.proxy import runner
runner.serve(upstream=sys.argv[1], slot_dir=sys.argv[2], store=sys.argv[3], upstream_api_key=sys.argv[4],
             listen="127.0.0.1:0", min_saved_mib=0.1, started=lambda url: print(url, flush=True))
"""


def test_a_killed_proxy_leaves_a_dangling_link_at_most(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        arguments = [sys.executable, "-c", _SERVE, server.url, str(server.slot_dir), str(tmp_path / "s"), server.api_key]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as killed:
            assert killed.stdout is not None
            url = killed.stdout.readline().strip()
            wait_for(lambda: stats(url)["caching"])
            chat = Chat(url, "Anna")
            chat.ask()
            assert wait_saved(url)["memory_transfers"]
            # The server stops in the middle of a save: the link is there, and the process is killed.
            os.kill(server.pid, signal.SIGSTOP)
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + "/v1/chat/completions", json=body, timeout=httpx.Timeout(240, read=0.3))
            killed.kill()
            killed.wait()
        name = f"kvstore-{killed.pid}-{'0' * 16}.bin"
        os.symlink(f"/proc/{killed.pid}/fd/900", server.slot_dir / name)  # as one in the middle of a transfer leaves it
        os.kill(server.pid, signal.SIGCONT)
        assert all(path.is_symlink() for path in server.slot_dir.iterdir())
        server.slot_erase(0)
        with proxied(server, tmp_path / "s") as url:
            assert not os.path.lexists(server.slot_dir / name)
            wait_for(lambda: os.listdir(server.slot_dir) == [])  # a warm start has a link of its own for a moment
            chat.url = url
            chat.ask()
            assert chat.reused > 0.85
            assert stats(url)["failures"] == 0


def test_stale_links_go_and_other_links_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = tmp_path / "mine"
    mine.write_bytes(b"keep")
    folder = tmp_path / "slots"
    folder.mkdir()
    files = SlotFiles(folder)
    stale, alive = f"kvstore-{dead.pid}-{'0' * 16}.bin", f"kvstore-{os.getppid()}-{'1' * 16}.bin"
    planted = f"kvstore-{dead.pid}-{'2' * 16}.bin"
    os.symlink(f"/proc/{dead.pid}/fd/900", folder / stale)
    os.symlink(f"/proc/{os.getppid()}/fd/900", folder / alive)
    os.symlink(mine, folder / planted)
    own = files.for_save(in_memory=True)
    assert files.remove_stale() == [stale]
    assert {path.name for path in folder.iterdir()} == {alive, planted, own.path.name}
    own.close()
    assert mine.read_bytes() == b"keep"


# -- the files themselves


@pytest.mark.parametrize("kind", [Exchange, MemoryExchange])
def test_what_is_read_is_what_was_written_whatever_the_name_leads_to(tmp_path: Path, kind: type[Exchange]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 100)
    made = kind.for_save(tmp_path / "a.bin")
    made.path.write_bytes(b"x" * 100)
    made.path.unlink()
    os.symlink(secret, made.path)  # planted by somebody who can write into the folder
    assert bytes(made.read()) == b"x" * 100
    made.close()
    assert secret.read_bytes() == b"s" * 100
    assert not os.path.lexists(made.path)


@pytest.mark.parametrize("kind", [Exchange, MemoryExchange])
def test_an_existing_name_is_never_written_to(tmp_path: Path, kind: type[Exchange]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"keep")
    os.symlink(secret, tmp_path / "a.bin")
    with pytest.raises(FileExistsError):
        kind.for_save(tmp_path / "a.bin")
    assert secret.read_bytes() == b"keep"


@pytest.mark.parametrize("kind", [Exchange, MemoryExchange])
def test_a_file_for_a_restore_is_complete_private_and_open_to_readers(tmp_path: Path, kind: type[Exchange]) -> None:
    made = kind.for_restore(tmp_path / "a.bin", [b"ab", memoryview(b"cd")])
    assert os.listdir(tmp_path) == ["a.bin"]
    assert made.path.read_bytes() == b"abcd"
    assert made.path.stat().st_mode & 0o777 == 0o600
    made.close()
    assert os.listdir(tmp_path) == []


def test_bytes_in_memory_cannot_change_under_a_reader(tmp_path: Path) -> None:
    made = MemoryExchange.for_save(tmp_path / "a.bin")
    made.path.write_bytes(b"x" * 5000)
    data = made.read()
    for change in (lambda: made.path.write_bytes(b""), lambda: os.truncate(made.path, 0)):
        with pytest.raises(PermissionError):
            change()
    made.close()
    assert bytes(data) == b"x" * 5000
    assert not data.flags.writeable


def test_descriptors_and_names_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for kind in (Exchange, MemoryExchange):
        for _ in range(3):
            made = kind.for_save(tmp_path / "a.bin")
            made.path.write_bytes(b"x" * 10)
            made.read()
            made.close()
            kind.for_restore(tmp_path / "a.bin", [b"x"]).close()
            with pytest.raises(TypeError):
                kind.for_restore(tmp_path / "a.bin", [b"x", None])  # type: ignore[list-item]
    assert (len(os.listdir("/proc/self/fd")), os.listdir(tmp_path)) == (before, [])


def test_no_other_process_inherits_the_memory(tmp_path: Path) -> None:
    made = MemoryExchange.for_save(tmp_path / "a.bin")
    number = int(os.readlink(made.path).rpartition("/")[2])
    assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert number >= 64
    made.close()


def test_a_file_shorter_than_the_server_says_is_an_error(tmp_path: Path) -> None:
    files = SlotFiles(tmp_path)
    for in_memory in (True, False):
        made = files.for_save(in_memory=in_memory)
        with pytest.raises(SlotFileError, match="has 0 bytes, the server wrote 7"):
            files.read(made, 7)
        made.close()


def test_the_budget_holds_for_all_that_is_referred_to(tmp_path: Path) -> None:
    memory = SlotMemory(10_000)
    assert not memory.reserve(1)  # it was not tried yet
    memory.turn_on()
    assert memory.reserve(6_000)
    assert not memory.reserve(6_000)
    made = MemoryExchange.for_save(tmp_path / "a.bin")
    made.path.write_bytes(bytes(9_000))  # more than was reserved
    data = made.read()
    assert made.mapping is not None
    memory.hold(made.mapping)
    memory.release(6_000)
    made.close()
    view = data[100:200]
    del data
    assert memory.used == 9_000
    assert not memory.reserve(2_000)
    del view
    assert memory.used == 0
    assert memory.reserve(10_000)
    assert not SlotMemory(0).reserve(1)


def test_sizes_are_estimated_from_what_was_seen() -> None:
    memory = SlotMemory(1)
    assert memory.estimate(100) == 0  # nothing is known
    memory.seen(40, 40_000)
    assert 1_000_000 <= memory.estimate(1000) <= 1_300_000
    # A recurrent part does not grow with the tokens.
    memory.seen(40, 20_000_000)
    memory.seen(1040, 21_000_000)
    assert 22_000_000 <= memory.estimate(2040) <= 28_000_000
    assert memory.estimate(10) >= 20_000_000
    memory.new_server()
    assert memory.estimate(100) == 0


def test_a_state_larger_than_its_estimate_is_stored_and_the_next_takes_the_disk(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        memory = SlotMemory(256 * MIB)
        with backend(server, memory) as (found, run):
            run(found.probe())
            tokens = np.arange(3, 603) % 250 + 3
            server.completion(tokens.tolist(), n_predict=0)
            found.links.clear()
            memory.budget = memory.estimate(100)
            file = run(found.save_slot(0, 60, n_tokens=100))
            assert file.tokens.tolist() == tokens.tolist()
            assert file.state.nbytes > memory.budget
            again = run(found.save_slot(0, 60, n_tokens=600))
            assert again.state.tobytes() == file.state.tobytes()
            assert found.links == [True, False]


def test_the_default_budget_is_at_most_a_quarter_of_the_ram() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < SlotMemory().budget <= total // 4


def test_a_number_that_is_taken_is_not_reused_at_once() -> None:
    numbers = set()
    for _ in range(50):
        fd = exchange._memfd()
        numbers.add(fd)
        os.close(fd)
    assert len(numbers) > 10


def test_the_command_takes_a_size(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    places = ["--upstream", f"http://127.0.0.1:{port}", "--slot-dir", str(tmp_path), "--store", str(tmp_path / "s")]
    options = ["--listen", "127.0.0.1:0", "--json", "--slot-memory", "512M"]
    words = [sys.executable, "-m", "kvstore.cli", "serve", *places, *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            assert stats(url)["slot_memory"]["budget_bytes"] == 512 * MIB
        finally:
            process.terminate()
