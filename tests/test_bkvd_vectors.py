"""The known answers of vectors.json."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import bkvd
from kvstore.errors import DeltaError

HERE = Path(__file__).parent / "data" / "vectors"
VECTORS = json.loads((HERE / "vectors.json").read_text())

spec = importlib.util.spec_from_file_location("make_states", HERE / "make_states.py")
assert spec is not None
assert spec.loader is not None
make_states = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_states)


@functools.lru_cache(maxsize=4)
def state(arguments: str) -> bytes:
    blob: bytes = make_states.state(json.loads(arguments))
    return blob


@pytest.mark.parametrize("case", VECTORS["encode"], ids=lambda case: case["name"])
def test_encode(case: dict[str, Any]) -> None:
    child, parent = state(json.dumps(case["child"])), state(json.dumps(case["parent"]))
    assert hashlib.sha256(child).hexdigest() == case["child_sha256"]
    assert hashlib.sha256(parent).hexdigest() == case["parent_sha256"]
    id_ = int(case["parent_id"], 16)
    for cell_ext in (case["cell_ext"], None):
        delta = bkvd.encode(child, parent, id_, cell_ext=cell_ext)
        if not case["shared"]:
            assert delta is None
            continue
        assert delta is not None
        assert (delta.data.size, delta.n_ops, delta.shared) == (case["delta_size"], case["n_ops"], case["bytes_shared"])
        assert hashlib.sha256(delta.data).hexdigest() == case["delta_sha256"]
        assert bkvd.is_delta(delta.data)
        assert bkvd.parent_id(delta.data) == id_
        assert bkvd.size(delta.data) == len(child)
        assert bkvd.decode(delta.data, parent, id_).tobytes() == child
    found = bkvd.encode(child, parent, id_, content=True)
    if found is not None:
        assert delta is None or found.data.size <= delta.data.size
        assert bkvd.decode(found.data, parent, id_).tobytes() == child


@pytest.mark.parametrize("case", VECTORS["decode"]["cases"], ids=lambda case: case["name"])
def test_decode(case: dict[str, Any]) -> None:
    about = VECTORS["decode"]["parent"]
    parent = make_states.noise(about["label"], about["n"])
    assert bkvd.sample_hash(parent) == int(about["sample_hash"], 16)
    delta = np.frombuffer(bytes.fromhex(case["delta"]), np.uint8).copy()
    id_ = int(about["id"], 16)
    if "error" in case:
        with pytest.raises(DeltaError) as raised:
            bkvd.decode(delta, parent, id_)
        assert raised.value.message == case["error"]
        assert bkvd.is_delta(delta) == (case["error"] != "not a shared state")
    else:
        assert hashlib.sha256(bkvd.decode(delta, parent, id_)).hexdigest() == case["child_sha256"]
