"""Real llama-servers for tests: which models and interpreters there are, and what a test does with a slot.

Environment:
KVSTORE_TEST_MODELS, a folder with more tiny models (one a kind of state); KVSTORE_TEST_PYTHONS, interpreters with
other versions of xllamacpp, separated as in PATH.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import slotfile
from kvstore.engines.llama_server.process import LlamaServer, LlamaServerError, find_server

MODELS = Path(__file__).parent / "data" / "models"
ARCHITECTURES = ("llama", "qwen2vl", "deepseek2", "gemma3", "jamba", "lfm2", "mamba")
WINDOW_OR_RECURRENT = ("gemma3", "jamba", "lfm2", "mamba")

PROMPT = "In the beginning there was a prompt that many others would go on from. " * 3
QUESTION = "What came next?"


def model(name: str = "llama") -> Path:
    """The path of a tiny model; skips the test where there is none."""
    folders = [MODELS, *(Path(folder) for folder in [os.environ.get("KVSTORE_TEST_MODELS")] if folder)]
    for folder in folders:
        if (path := folder / f"{name}.gguf").is_file():
            return path
    pytest.skip(f"no {name}.gguf: set KVSTORE_TEST_MODELS to a folder that has it")


def need_server(python: str | None = None) -> None:
    """Skip the test where there is no llama-server."""
    try:
        find_server(python)
    except LlamaServerError as error:
        pytest.skip(str(error))


def pythons() -> list[str | None]:
    """This interpreter (None), and those of KVSTORE_TEST_PYTHONS."""
    return [None, *(p for p in os.environ.get("KVSTORE_TEST_PYTHONS", "").split(os.pathsep) if p)]


def new_server(slot_dir: Path, name: str = "llama", **options: Any) -> LlamaServer:
    """A server that was not started yet, with a small context and without a prompt cache of its own."""
    need_server(options.get("python"))
    # One thread: two of them wait for each other by spinning, which takes seconds on a busy machine.
    extra = {"cache_ram_mib": 0, "threads": 1, **options.pop("extra", {})}
    return LlamaServer(model(name), slot_dir=slot_dir, **{"n_ctx": 2048, "extra": extra, **options})


def save_slot(server: LlamaServer, slot: int = 0) -> slotfile.SlotFile:
    """What a slot holds, through a slot file that is removed again."""
    server.slot_save(slot, "save.bin")
    path = server.slot_dir / "save.bin"
    saved = slotfile.read(path)
    path.unlink()
    return saved


def slot_form(server: LlamaServer, slot: int = 0) -> slotfile.SlotFile:
    """A slot file as this build writes it, to take its version and form from. The slot is empty afterwards."""
    server.slot_erase(slot)
    return save_slot(server, slot)


def restore_slot(
    server: LlamaServer, tokens: npt.NDArray[np.int32], state: npt.NDArray[np.uint8], slot: int = 0
) -> int:
    """Put a state into a slot, through a slot file that is removed again; the number of tokens restored."""
    path = server.slot_dir / "restore.bin"
    slotfile.write(path, replace(slot_form(server, slot), tokens=tokens, state=state))
    try:
        return int(server.slot_restore(slot, path.name)["n_restored"])
    finally:
        path.unlink()
