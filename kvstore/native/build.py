"""Builds the module `kvstore._native` (cffi, out of line, limited API).

The declarations are cut from kernel.h, so they are written once. KVSTORE_SANITIZE=1 in the environment builds with the
address and undefined behaviour sanitizers, KVSTORE_SCALAR=1 without vector code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = ("encode.c", "index.c", "winnow.c", "prefilter.c", "search.c", "decode.c", "chain.c", "compose.c")


def declarations() -> str:
    """What stands between the two marks of kernel.h."""
    text = (HERE / "kernel.h").read_text(encoding="ascii")
    return text.split("/* cdef: begin */")[1].split("/* cdef: end */")[0]


def compile_args() -> list[str]:
    if sys.platform == "win32":
        return ["/O2"]
    if os.environ.get("KVSTORE_SANITIZE") == "1":
        return ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    return ["-O3", "-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]


def link_args() -> list[str]:
    return ["-fsanitize=address,undefined"] if os.environ.get("KVSTORE_SANITIZE") == "1" else []


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "kvstore._native",
    '#include "kernel.h"',
    sources=[f"kvstore/native/{name}" for name in SOURCES],
    depends=[f"kvstore/native/{name}" for name in ("kernel.h", "bytes.h", "ops.h", "stream.h", "minimizers.h")],
    include_dirs=[str(HERE)],
    define_macros=[("KV_SCALAR", "1")] if os.environ.get("KVSTORE_SCALAR") == "1" else [],
    extra_compile_args=compile_args(),
    extra_link_args=link_args(),
)
