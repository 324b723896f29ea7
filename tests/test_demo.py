"""The demo, with a tiny model: it passes, and it fails when what it shows does not hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo
import pytest
import serverkit

from kvstore import Store
from kvstore.types import SavedState

pytestmark = pytest.mark.slow
# Few enough for the tiny model's context, so many that a garbled answer is a small part.
ARGUMENTS = ["--tokens", "2500", "--conversations", "2"]


class SmallStore(Store):
    """A store that shares the tiny model's states too."""

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, min_saved_mib=0.01, **options)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow") is None:
        serverkit.need_server()
        path = serverkit.model()
        monkeypatch.setattr(demo, "model_path", lambda: path)
        monkeypatch.setattr(demo, "Store", SmallStore)


def test_passes_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert demo.main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    for part in ("chat 2", "killed with SIGKILL", "the same text", "byte for byte", "sharing saved"):
        assert part in out
    assert list(tmp_path.iterdir()) == []


def test_keep_leaves_the_store(tmp_path: Path, capsys: Any) -> None:
    assert demo.main([*ARGUMENTS, "--keep", str(tmp_path / "kept")]) == 0
    with SmallStore(tmp_path / "kept" / "demo.kvstore", readonly=True) as store:
        assert store.verify() == []
    assert demo.main([*ARGUMENTS, "--keep", str(tmp_path / "kept")]) == 1
    assert "is there already" in capsys.readouterr().err


def test_fails_if_a_byte_differs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Flipping(SmallStore):
        def get(self, id: int, **options: Any) -> SavedState | None:
            saved = super().get(id, **options)
            assert saved is not None
            main = saved.main.copy()
            main[-1] ^= 1
            return replace(saved, main=main)

    monkeypatch.setattr(demo, "Store", Flipping)
    # The text may already differ for it; either is a failure.
    assert demo.main(ARGUMENTS) == 1
    assert "differ" in capsys.readouterr().err


def test_fails_if_nothing_was_reused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(demo.LlamaServer, "slot_restore", lambda self, id, filename: {})
    assert demo.main(ARGUMENTS) == 1
    assert "the server reused 0 of the" in capsys.readouterr().err


def test_fails_if_the_text_differs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    completion = demo.LlamaServer.completion
    servers: list[Any] = []

    def other_text(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        answer = completion(self, *arguments, **options)
        if self not in servers:
            servers.append(self)
        return {**answer, "content": answer["content"] + "!" * (len(servers) - 1)}

    monkeypatch.setattr(demo.LlamaServer, "completion", other_text)
    assert demo.main(ARGUMENTS) == 1
    assert "the texts differ" in capsys.readouterr().err


def test_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def nothing() -> Path:
        raise demo.DemoError("the demo's model is not installed")

    monkeypatch.setattr(demo, "model_path", nothing)
    assert demo.main([]) == 1
    assert "not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_with_the_real_model() -> None:
    serverkit.need_server()
    try:
        demo.model_path()
    except demo.DemoError as error:
        pytest.skip(str(error))
    argv = [sys.executable, demo.__file__, "--tokens", "800", "--conversations", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "sharing saved" in done.stdout
