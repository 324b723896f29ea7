"""The process that serves a model with the llama-server inside xllamacpp; `kvstore.engines.llama_server` starts it.

Any interpreter that has xllamacpp runs it by its path, so it imports nothing of kvstore. The first line of standard
input is a JSON object: `params` (attributes of `CommonParams`, dotted where nested), `optional` (the same, ignored
where this version has no such attribute). It serves until standard input ends, so it does not outlive its starter.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def assign(params: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        params = getattr(params, parent)
    getattr(params, name)
    setattr(params, name, value)


def main() -> None:
    # The script's folder comes first in sys.path: its modules would hide others of the same name.
    del sys.path[0]
    import xllamacpp

    config = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    types = {
        "flash_attn_type": "llama_flash_attn_type",
        "cache_type_k": "ggml_type",
        "cache_type_v": "ggml_type",
        "rope_scaling_type": "llama_rope_scaling_type",
    }
    for group in ("params", "optional"):
        for path, value in config[group].items():
            try:
                if path == "hostnames" and not hasattr(params, path):
                    # Until autumn 2026 the attribute had this name and took one address.
                    params.hostname = value[0]
                elif path == "lora_adapters":
                    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(value), 1.0)]
                elif path in types:
                    assign(params, path, getattr(getattr(xllamacpp, types[path]), value))
                else:
                    assign(params, path, value)
            except AttributeError:
                if group == "params":
                    sys.exit(f"xllamacpp {xllamacpp.__version__} has no {path} = {value!r}")
    server = xllamacpp.Server(params)  # noqa: F841 - it serves while it is referred to
    sys.stdin.read()
    # Without destructors: these may wait for open connections, and there is nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
