"""The digest that tells model files apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import serverkit

from kvstore import StoreIOError
from kvstore.engines import model_file


def test_the_digest_follows_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    model = serverkit.model()
    data = bytearray(model.read_bytes())
    copy = tmp_path / "copy.bin"
    copy.write_bytes(data)
    assert model_file.digest(copy) == model_file.digest(str(model))
    for at in (0, len(data) // 2, -1):
        changed = data.copy()
        changed[at] ^= 1
        copy.write_bytes(changed)
        assert model_file.digest(copy) != model_file.digest(model)
    copy.write_bytes(data + b"x")
    assert model_file.digest(copy) != model_file.digest(model)


def test_other_weights_in_a_large_file_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    weights = np.random.default_rng(1).standard_normal(10 << 20).astype("<f4")
    path.write_bytes(weights.tobytes())
    first = model_file.digest(path)
    weights[1 << 19 : -(1 << 19)] += 1e-3
    path.write_bytes(weights.tobytes())
    assert model_file.digest(path) != first


def test_every_shard_counts(tmp_path: Path) -> None:
    names = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        name.write_bytes(bytes([i]) * 1000)
    first = model_file.digest(names[0])
    assert first == model_file.digest(names[1])
    names[2].write_bytes(b"other")
    assert model_file.digest(names[0]) != first
    names[1].unlink()
    with pytest.raises(StoreIOError, match="00002"):
        model_file.digest(names[0])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreIOError, match=r"none\.gguf"):
        model_file.digest(tmp_path / "none.gguf")
