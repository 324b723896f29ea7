"""`bench.py peers`: a child state as a delta against its parent, by BKVD, zstd, xdelta3, bsdiff4 and content-defined chunks.

Each way gets the same two arrays in memory; the programs get files in /dev/shm. Sizes are ratios to the ideal: the bytes of
the new rows and cells alone, with 24 bytes for each op that they need. Times are ratios to a memcpy of the child, taken in
turns with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import bkvd

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
ID = 0x1122334455667788
BSDIFF_MOST = 16 * MIB  # it sorts all suffixes of the parent: 17 bytes of memory a byte, and minutes
AVERAGE_CHUNK = 1 << 16
Coder: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], Any]]"  # encode, decode


def synthetic(n: int, new: int, n_layer: int, row: int, transposed: bool) -> tuple[Bytes, Bytes]:
    """Child of n cells, the last `new` of which the parent has not; K and V of `row` bytes a token and layer."""
    rng = np.random.Generator(np.random.SFC64(11))
    tensors = [np.frombuffer(rng.bytes(n * row), np.uint8).reshape(n, row) for _ in range(2 * n_layer)]
    states = []
    for count in (n, n - new):
        cells = np.zeros((count, 3), "<u4")
        cells[:, 0], cells[:, 1] = np.arange(count), 1
        parts = [struct.pack("<IiII", 0xAF143CD8, 0, 1, count), cells.tobytes(), struct.pack("<II", transposed, n_layer)]
        for i, rows in enumerate(tensors):
            if i >= n_layer and transposed:
                parts.append(struct.pack("<iII", 1, 2, row // 2))
                parts.append(np.ascontiguousarray(rows[:count].view("<u2").T).tobytes())
            else:
                parts.append(struct.pack("<iQ", 1, row))
                parts.append(rows[:count].tobytes())
        states.append(np.frombuffer(b"".join(parts), np.uint8))
    return states[0], states[1]


def real() -> tuple[Bytes, Bytes] | None:
    """SmolLM2-135M's states of a prompt and its continuation, saved by a real llama-server; None without the model."""
    import demo

    from kvstore import slotfile
    from kvstore.engines.llama_server.process import LlamaServer

    try:
        model = demo.model_path()
    except demo.DemoError as error:
        print(f"no real states: {error}")
        return None
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        LlamaServer(model, slot_dir=Path(name), n_ctx=4096) as server,
    ):
        tokens = server.tokenize(demo.system_prompt(server, 1600))
        states = []
        for n in (1200, 1500):
            server.completion(tokens[:n], n_predict=0, id_slot=0)
            server.slot_save(0, f"{n}.bin")
            states.append(np.array(slotfile.read(Path(name) / f"{n}.bin").state))
    return states[1], states[0]


def by_program(child: Bytes, parent: Bytes, folder: Path, name: str) -> Coder:
    """zstd and xdelta3, with a window that spans both states."""
    if shutil.which(name) is None:
        raise ImportError(f"the program {name} is not installed")
    old, new, delta, back = (folder / file for file in ("old", "new", "delta", "back"))
    parent.tofile(old)
    child.tofile(new)
    forth: list[str | Path]
    back_again: list[str | Path]
    if name == "zstd":
        window = f"--long={min(31, max(10, (child.size + parent.size).bit_length()))}"
        words = [name, "-q", "-f", window, f"--patch-from={old}"]
        forth, back_again = [*words, new, "-o", delta], [*words, "-d", delta, "-o", back]
    else:
        words = [name, "-f", "-B", str(max(1 << 20, parent.size)), "-S", "none"]
        forth, back_again = [*words, "-e", "-s", old, new, delta], [*words, "-d", "-s", old, delta, back]

    def encode() -> bytes:
        subprocess.run(forth, check=True)
        return delta.read_bytes()

    def decode(_: Any) -> bytes:
        subprocess.run(back_again, check=True)
        return back.read_bytes()

    return encode, decode


def bsdiff4(child: Bytes, parent: Bytes) -> Coder:
    if child.size > BSDIFF_MOST:
        raise ImportError(f"left out above {BSDIFF_MOST // MIB} MiB: it sorts all suffixes")
    module = importlib.import_module("bsdiff4")
    old, new = parent.tobytes(), child.tobytes()
    return (lambda: module.diff(old, new)), (lambda delta: bytes(module.patch(old, delta)))


def chunks(child: Bytes, parent: Bytes) -> Coder:
    """As restic and borg: chunks that end where the content says; the delta is a list of them and those that are new."""
    fastcdc = importlib.import_module("fastcdc").fastcdc

    def cut(data: bytes) -> list[tuple[bytes, int, int]]:
        found = fastcdc(data, AVERAGE_CHUNK // 4, AVERAGE_CHUNK, AVERAGE_CHUNK * 4)
        view = memoryview(data)
        return [
            (hashlib.blake2b(view[c.offset : c.offset + c.length], digest_size=32).digest(), c.offset, c.length) for c in found
        ]

    old, new = parent.tobytes(), child.tobytes()
    known = {name: old[at : at + n] for name, at, n in cut(old)}

    def encode() -> tuple[bytes, list[bytes], dict[bytes, bytes]]:
        found = cut(new)
        fresh = {name: new[at : at + n] for name, at, n in found if name not in known}
        names = [name for name, _, _ in found]
        return b"".join((*names, *fresh.values())), names, fresh

    def decode(delta: tuple[bytes, list[bytes], dict[bytes, bytes]]) -> bytes:
        return b"".join(delta[2].get(name) or known[name] for name in delta[1])

    return encode, decode


def ours(child: Bytes, parent: Bytes) -> Coder:
    out = np.empty(child.size, np.uint8)

    def encode() -> Bytes:
        done = bkvd.encode(child, parent, ID, min_saved=0)
        assert done is not None
        return done.data

    def decode(delta: Bytes) -> Bytes:
        bkvd.decode(delta, parent, ID, out)
        return out

    return encode, decode


def ways(child: Bytes, parent: Bytes, folder: Path) -> Iterator[tuple[str, Callable[[], Coder]]]:
    yield "kvstore (BKVD)", lambda: ours(child, parent)
    yield "zstd --patch-from", lambda: by_program(child, parent, folder, "zstd")
    yield "xdelta3", lambda: by_program(child, parent, folder, "xdelta3")
    yield "bsdiff4", lambda: bsdiff4(child, parent)
    yield "chunks (restic, borg)", lambda: chunks(child, parent)


def size_of(delta: Any) -> int:
    data = delta[0] if isinstance(delta, tuple) else delta
    return int(memoryview(data).nbytes)


def compare(title: str, child: Bytes, parent: Bytes, ideal: int, runs: int) -> None:
    print(f"\n{title}: child {child.size / MIB:.1f} MiB, ideal {ideal / MIB:.2f} MiB, medians of {runs}")
    print(f"{'':22} {'delta':>10} {'of ideal':>9} {'encode':>16} {'decode':>16}")
    copy = np.empty_like(child)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for name, make in ways(child, parent, Path(folder)):
            try:
                encode, decode = make()
            except ImportError as error:
                print(f"{name:22} {error}")
                continue
            taken: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
            delta: Any = None
            for _ in range(runs):
                for what, call in (
                    ("copy", lambda: np.copyto(copy, child)),
                    ("encode", encode),
                    ("decode", lambda: decode(delta)),  # noqa: B023
                ):
                    started = time.perf_counter()
                    result: Any = call()
                    taken[what].append(time.perf_counter() - started)
                    if what == "encode":
                        delta = result
            if bytes(result) != child.tobytes():
                raise SystemExit(f"{name}: a byte differs")
            seconds = {what: statistics.median(found) for what, found in taken.items()}
            copied = seconds.pop("copy")
            columns = " ".join(f"{each * 1e3:7.0f} ms x{each / copied:<5.1f}" for each in seconds.values())
            print(f"{name:22} {size_of(delta) / MIB:7.2f} MiB {size_of(delta) / ideal:8.2f}x {columns}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py peers", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000, help="of the large state, 128 KiB each")
    parser.add_argument("--no-real", action="store_true", help="leave out the states of a real llama-server")
    args = parser.parse_args(argv)
    layers, row = 32, 2048  # Llama-3-8B: 8 KV heads of 128, f16
    for transposed in (False, True):
        for n, n_layer in ((args.tokens, layers), (100, 4)):
            new = max(1, n * 3 // 100)
            child, parent = synthetic(n, new, n_layer, row, transposed)
            ops = 1 + n_layer * (1 + (row // 2 if transposed else 1))
            ideal = new * (12 + 2 * n_layer * row) + 24 * ops
            title = f"as of Llama-3-8B, {n_layer} layers, V {'transposed' if transposed else 'by rows'}"
            compare(title, child, parent, ideal, args.runs)
    found = None if args.no_real else real()
    if found is not None:
        child, parent = found
        compare("SmolLM2-135M, 1,200 and 1,500 tokens", child, parent, child.size - parent.size, args.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
