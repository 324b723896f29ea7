"""The fingerprint of a server: whatever changes its numbers changes it, a restart alone does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ggufkit
import numpy as np
import pytest
import serverkit

from kvstore import layout, slotfile
from kvstore.engines import probe
from kvstore.engines.llama_server.process import LlamaServer

YARN = {"rope_scaling": "yarn", "rope_freq_scale": 0.5}
CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope base": ("llama", {}, {"rope_freq_base": 20000.0}),
    "rope base, a little": ("llama", {}, {"rope_freq_base": 10100.0}),
    "rope scale": ("llama", {}, {"rope_freq_scale": 0.5}),
    "yarn": ("llama", {"rope_freq_scale": 0.5}, YARN),
    "yarn, another original context": ("llama", YARN, {**YARN, "yarn_orig_ctx": 1024}),
    "whole window": ("gemma3", {}, {"swa_full": True}),
    "rope base of a window model": ("gemma3", {}, {"rope_freq_base": 20000.0}),
    "rope base of a hybrid": ("lfm2", {}, {"rope_freq_base": 20000.0}),
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return ggufkit.write_lora(tmp_path / "adapter.gguf", 1)


def rows(folder: Path, name: str = "llama", **options: Any) -> str | None:
    """The probe of a fresh server."""
    with serverkit.new_server(folder, name, **options) as server:
        return server._probe()


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_that_changes_the_numbers_changes_the_probe(tmp_path: Path, what: str) -> None:
    name, before, after = CHANGES[what]
    assert rows(tmp_path, name, extra=before) != rows(tmp_path, name, extra=after)


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "nofa"])
@pytest.mark.parametrize("name", serverkit.ARCHITECTURES)
@pytest.mark.slow
def test_settings_that_change_no_number_keep_the_probe(tmp_path: Path, name: str, flash_attn: bool) -> None:
    first = rows(tmp_path, name, flash_attn=flash_attn)
    assert first is not None
    for options in (
        {},
        {"extra": {"threads": 2}},
        {"extra": {"n_ubatch": 8}},
        {"n_ctx": 4096},
        {"parallel": 3},
        {"parallel": 3, "extra": {"kv_unified": True}},
    ):
        assert rows(tmp_path, name, flash_attn=flash_attn, **options) == first, options


def test_an_adapter_replaced_under_its_name_changes_the_fingerprint(tmp_path: Path, adapter: Path) -> None:
    def ask() -> str:
        with serverkit.new_server(tmp_path / "slots", extra={"lora": str(adapter)}) as server:
            return server.fingerprint()

    first = ask()
    assert ask() == first
    ggufkit.write_lora(adapter, 2)
    assert ask() != first
    ggufkit.write_lora(adapter, 1)
    assert ask() == first


def test_an_adapter_set_by_a_request_changes_the_fingerprint(tmp_path: Path, adapter: Path) -> None:
    with serverkit.new_server(tmp_path / "slots", extra={"lora": str(adapter)}) as server:
        first = server.fingerprint()
        server._send("POST", "/lora-adapters", [{"id": 0, "scale": 0.0}], timeout=10)  # type: ignore[arg-type]
        assert server.fingerprint() != first
        server._send("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}], timeout=10)  # type: ignore[arg-type]
        assert server.fingerprint() == first


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_a_probe_puts_back_what_the_slots_held(tmp_path: Path, name: str) -> None:
    options = {"flash_attn": False, "extra": {"kv_unified": True}}
    with serverkit.new_server(tmp_path / "slots", name, parallel=2, **options) as server:
        prompts = [server.tokenize(f"{i} " + serverkit.PROMPT) for i in range(2)]
        for slot, prompt in enumerate(prompts):
            server.completion(prompt, n_predict=0, id_slot=slot)
        busy = server.fingerprint()
        for slot, prompt in enumerate(prompts):
            answer = server.completion([*prompt, 5, 6], n_predict=0, id_slot=slot)
            assert answer["timings"]["cache_n"] >= 0.9 * len(prompt)
        assert list(server.slot_dir.iterdir()) == []
        server.kill()
        server.start()
        # The sums of this probe would depend on where in the common buffer its cells are.
        assert server.fingerprint() == busy


def test_a_server_that_saves_no_slots_has_the_fingerprint_of_its_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serverkit.new_server(tmp_path / "slots") as server:
        shutil.rmtree(server.slot_dir)
        text = server.fingerprint()
        assert '"probe": null' in text
        assert "cannot be probed" in caplog.text
        server.slot_dir.mkdir()
        assert server.fingerprint() != text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with serverkit.new_server(tmp_path_factory.mktemp("slots")) as server:
        yield server


def test_the_digest_does_not_follow_the_order_of_cells(server: LlamaServer) -> None:
    server.slot_erase(0)
    server.completion(probe.TOKENS, n_predict=0)
    state = serverkit.save_slot(server).state
    (part,) = layout.parse(state).attention
    (stream,) = part.streams
    order = np.roll(np.arange(stream.n_cells), 7)
    moved = state.copy()
    starts = [(stream.start + 4, 12, 1)] + [(s.start, s.width, s.rows) for s in stream.sections]
    for start, width, n_rows in starts:
        block = state[start : start + n_rows * stream.n_cells * width].reshape(n_rows, stream.n_cells, width)
        moved[start : start + block.size] = block[:, order].ravel()
    assert layout.parse(moved).streams[0].pos.tolist() == stream.pos[order].tolist()
    assert probe.rows_digest(moved) == probe.rows_digest(state)
    assert probe.is_plain(moved, stream.n_cells)
    changed = state.copy()
    changed[-1] ^= 1
    assert probe.rows_digest(changed) != probe.rows_digest(state)


def test_positions_with_a_gap_are_not_plain(server: LlamaServer) -> None:
    server.slot_erase(0)
    server.completion(probe.TOKENS, n_predict=0)
    file = serverkit.save_slot(server)
    n = file.tokens.shape[0]
    assert probe.is_plain(file.state, n)
    assert not probe.is_plain(file.state, n - 1)
    assert not probe.is_plain(file.state, n + 1)
    shifted = file.state.copy()
    stream = layout.parse(shifted).streams[0]
    at = stream.start + 4 + 12 * int(np.argmax(stream.pos))
    shifted[at : at + 4] = np.array([n + 3], "<i4").view(np.uint8)
    assert layout.parse(shifted).streams[0].pos.max() == n + 3
    assert not probe.is_plain(shifted, n)


@pytest.mark.parametrize("name", serverkit.ARCHITECTURES)
def test_every_state_of_a_prompt_is_plain(tmp_path: Path, name: str) -> None:
    with serverkit.new_server(tmp_path, name) as server:
        tokens = server.tokenize(serverkit.PROMPT)
        server.completion(tokens, n_predict=5)
        file: slotfile.SlotFile = serverkit.save_slot(server)
        assert probe.is_plain(file.state, file.tokens.shape[0])
