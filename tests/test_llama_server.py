"""The launcher and client, and the round trip that everything is for: save, put, kill, reopen, restore, go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serverkit

from kvstore.engines.llama_server import process as llama_server
from kvstore.engines.llama_server.process import LlamaServer, LlamaServerError, find_server
from kvstore.errors import InvalidInputError
from kvstore.store.store import Store

MESSAGES = [{"role": "system", "content": "Be brief. </s>"}, {"role": "user", "content": "Hello <s>"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with serverkit.new_server(tmp_path_factory.mktemp("slots"), parallel=1) as server:
        yield server


def test_find_server_takes_the_named_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    command = find_server()
    assert command.argv == (sys.executable,)
    assert not command.xllamacpp


def test_find_server_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LlamaServerError, match="has no xllamacpp"):
        find_server(tmp_path / "python")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(llama_server, "_xllamacpp_version", lambda python: None)
    with pytest.raises(LlamaServerError, match=r"no llama-server.*pip install xllamacpp"):
        find_server()


def test_program_gets_its_settings_and_no_secret_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    extra = {"kv_unified": True, "swa_full": False, "cache_ram_mib": 0}
    server = LlamaServer(tmp_path / "m.gguf", slot_dir=tmp_path, parallel=2, cache_type_k="q8_0", extra=extra)
    argv, env, first_line = server._command_line()
    text = " ".join(argv)
    for part in ("--parallel 2", "--cache-type-k q8_0", "--kv-unified", "--cache-ram 0", "--flash-attn auto"):
        assert part in text
    assert "--swa-full" not in text
    assert server.api_key not in text
    assert env["LLAMA_API_KEY"] == server.api_key
    assert first_line == b""


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="n_bach"):
        LlamaServer(tmp_path / "m.gguf", slot_dir=tmp_path, extra={"n_bach": 1})


def test_fingerprint_changes_with_what_a_state_depends_on(tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        return serverkit.new_server(tmp_path, **options).fingerprint()

    same = fingerprint()
    assert fingerprint(n_ctx=4096, extra={"threads": 2}) == same
    assert fingerprint(parallel=2, extra={"kv_unified": True}) == same
    others = [fingerprint(parallel=2), fingerprint(cache_type_v="q8_0"), fingerprint(flash_attn=False)]
    assert len({same, *others}) == 4


def test_missing_model(tmp_path: Path) -> None:
    serverkit.need_server()
    with pytest.raises(LlamaServerError, match="does not exist"):
        LlamaServer(tmp_path / "m.gguf", slot_dir=tmp_path).start()


def test_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    serverkit.need_server()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(serverkit.model().read_bytes()[:5000])
    server = LlamaServer(broken, slot_dir=tmp_path)
    with pytest.raises(LlamaServerError, match="did not start") as caught:
        server.start()
    assert "broken.gguf" in str(caught.value)
    assert not server.running
    server.stop()
    assert server.log_tail() == ""


def test_settings_arrive(server: LlamaServer) -> None:
    props = server.props()
    assert Path(props["model_path"]) == server.model
    assert props["default_generation_settings"]["n_ctx"] == server.n_ctx
    assert [slot["id"] for slot in server.slots()] == [0]


def test_requests_need_the_key(server: LlamaServer) -> None:
    key, server.api_key = server.api_key, "not it"
    try:
        with pytest.raises(LlamaServerError) as caught:
            server.props()
    finally:
        server.api_key = key
    assert caught.value.status == 401


def test_foreign_server_on_the_port_is_noticed(server: LlamaServer, tmp_path: Path) -> None:
    with pytest.raises(LlamaServerError, match=r"another server answers|did not start"):
        serverkit.new_server(tmp_path, port=server.port).start()
    assert server.running


def test_chat_tokens_are_those_of_a_chat_request(server: LlamaServer) -> None:
    tokens = server.chat_tokens(MESSAGES)
    server.slot_erase(0)
    server.completion(tokens, n_predict=0)
    answer = server.chat(MESSAGES, max_tokens=2, id_slot=0)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    # All but the last, which is computed again to have logits.
    assert answer["timings"]["cache_n"] == len(tokens) - 1


def test_a_slot_keeps_the_prompt_and_all_but_the_last_generated_token(server: LlamaServer) -> None:
    tokens = server.tokenize(serverkit.PROMPT)
    server.slot_erase(0)
    server.completion(tokens, n_predict=0)
    assert serverkit.save_slot(server).tokens.tolist() == tokens
    answer = server.completion(tokens, n_predict=4)
    assert serverkit.save_slot(server).tokens.tolist() == [*tokens, *answer["tokens"]][:-1]


def test_refused_restore_is_an_error_and_empties_the_slot(server: LlamaServer) -> None:
    tokens = server.tokenize(serverkit.PROMPT)
    server.completion(tokens, n_predict=0)
    (server.slot_dir / "junk.bin").write_bytes(b"junk" * 100)
    for name in ("missing.bin", "junk.bin"):
        with pytest.raises(LlamaServerError) as caught:
            server.slot_restore(0, name)
        assert caught.value.status == 400
    assert server.completion(tokens, n_predict=0)["timings"]["cache_n"] == 0


def test_killed_server_says_so_and_starts_again(tmp_path: Path) -> None:
    with serverkit.new_server(tmp_path) as server:
        pid = server.pid
        server.kill()
        assert not server.running
        with pytest.raises(LlamaServerError, match="died at GET /props"):
            server.props()
        server.start()
        assert server.pid != pid
        assert server.props()["total_slots"] == 1


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_server_does_not_outlive_its_starter(tmp_path: Path) -> None:
    if not serverkit.new_server(tmp_path).command.xllamacpp:
        pytest.skip("a llama-server program does not watch its standard input")
    code = (
        "import os, sys; from kvstore.engines.llama_server import LlamaServer\n"
        "server = LlamaServer(sys.argv[1], slot_dir=sys.argv[2], log=os.path.join(sys.argv[2], 'log'))\n"
        "server.start(); print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    argv = [sys.executable, "-c", code, str(serverkit.model()), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and _serves(pid):
        time.sleep(0.05)
    assert not _serves(pid)


def _serves(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may be there to collect the dead child of a dead parent.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "nofa"])
@pytest.mark.parametrize("architecture", serverkit.ARCHITECTURES)
@pytest.mark.slow
def test_restored_state_goes_on_as_if_the_server_had_never_stopped(
    tmp_path: Path, architecture: str, flash_attn: bool
) -> None:
    path = tmp_path / "states.kvstore"
    with serverkit.new_server(tmp_path / "slots", architecture, flash_attn=flash_attn) as server:
        fingerprint = server.fingerprint()
        prefix = server.tokenize(serverkit.PROMPT)
        with Store(path, fingerprint=fingerprint, min_saved_mib=0.01) as store:
            server.completion(prefix, n_predict=0)
            saved = serverkit.save_slot(server)
            learned = store.put(saved.tokens, saved.state, entry_class="learned", n_system=len(prefix))
            prompt = [*prefix, *server.tokenize(serverkit.QUESTION, add_special=False)]
            server.completion(prompt, n_predict=8)
            put = serverkit.save_slot(server)
            entry = store.put(put.tokens, put.state, n_system=len(prefix))
            if architecture not in serverkit.WINDOW_OR_RECURRENT:
                assert entry.parent == learned.id
            longer = [*put.tokens.tolist(), *server.tokenize(serverkit.QUESTION, add_special=False)]
            reference = server.completion(longer, n_predict=16)["tokens"]
            server.kill()
    with serverkit.new_server(tmp_path / "slots", architecture, flash_attn=flash_attn) as server:
        assert server.fingerprint() == fingerprint
        with Store(path, fingerprint=fingerprint, min_saved_mib=0.01) as store:
            match = store.match(longer)
            assert match is not None
            assert (match.entry.id, match.n_common) == (entry.id, put.tokens.shape[0])
            state = store.get(entry.id)
            assert state is not None
            np.testing.assert_array_equal(state.main, put.state)
            assert serverkit.restore_slot(server, state.tokens, state.main) == put.tokens.shape[0]
            answer = server.completion(longer, n_predict=16)
            # A window model goes back to a checkpoint a few tokens before the end.
            assert answer["timings"]["cache_n"] >= 0.9 * put.tokens.shape[0]
            assert answer["tokens"] == reference


@pytest.mark.parametrize("python", [p for p in serverkit.pythons() if p] or [None])
def test_other_versions_of_the_server(tmp_path: Path, python: str | None) -> None:
    if python is None:
        pytest.skip("no other interpreters in KVSTORE_TEST_PYTHONS")
    with serverkit.new_server(tmp_path, python=python) as server:
        tokens = server.tokenize(serverkit.PROMPT)
        first = server.completion(tokens, n_predict=8)["tokens"]
        saved = serverkit.save_slot(server)
        serverkit.restore_slot(server, saved.tokens, saved.state)
        again = server.completion(tokens, n_predict=8)
        assert again["tokens"] == first
        assert again["timings"]["cache_n"] == len(tokens) - 1
