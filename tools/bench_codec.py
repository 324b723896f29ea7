"""The codec beside memcmp and memcpy, on synthetic states, in one process: medians as ratios."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import bkvd

Bytes = npt.NDArray[np.uint8]
N_LAYER, ROW = 32, 8192
ID = 0x1122334455667788

libc = ctypes.CDLL(None)
libc.memcmp.argtypes = libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
libc.memcmp.restype, libc.memcpy.restype = ctypes.c_int, ctypes.c_void_p

# Piecewise memcpy, and the peak of this process, without Python between the pieces.
PIECES = """
#include <string.h>
#include <stdint.h>
void pieces(char *to, const char *const *from, const uint64_t *n, uint64_t count)
{
    for (uint64_t i = 0; i < count; to += n[i++])
        memcpy(to, from[i], n[i]);
}
"""


def build_pieces() -> Callable[..., None]:
    """A C loop of memcpy, compiled for this run."""
    import subprocess
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-"))
    (folder / "pieces.c").write_text(PIECES)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", folder / "pieces.so", folder / "pieces.c"], check=True)
    function = ctypes.CDLL(str(folder / "pieces.so")).pieces
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    function.restype = None
    return function  # type: ignore[no-any-return]


def cells(n: int) -> bytes:
    table = np.zeros((n, 3), "<u4")
    table[:, 0] = np.arange(n)
    table[:, 1] = 1
    return table.tobytes()


def pair(mib: int, new: float, transposed: bool) -> tuple[Bytes, Bytes]:
    """Child of about `mib` MiB and its parent; the last `new` of the child's cells are its own."""
    n = max(2, (mib << 20) // (2 * N_LAYER * ROW))
    rng = np.random.Generator(np.random.SFC64(1))
    heads = {k: struct.pack("<iII", 1, 2, ROW // 2) if k and transposed else struct.pack("<iQ", 1, ROW) for k in (0, 1)}
    states = []
    tensors = [np.frombuffer(rng.bytes(n * ROW), np.uint8) for _ in range(2 * N_LAYER)]
    for count in (n, n - max(1, round(n * new))):
        parts = [struct.pack("<IiII", 0xAF143CD8, 0, 1, count), cells(count), struct.pack("<II", transposed, N_LAYER)]
        for i, data in enumerate(tensors):
            is_v = i >= N_LAYER
            parts.append(heads[is_v])
            if is_v and transposed:
                parts.append(np.ascontiguousarray(data.reshape(-1, 2 * n)[:, : 2 * count]).tobytes())
            else:
                parts.append(data[: count * ROW].tobytes())
        states.append(np.frombuffer(b"".join(parts), np.uint8))
    return states[0], states[1]


def repeating(piece: bytes, mib: int) -> tuple[Bytes, Bytes]:
    """Child and parent whose unknown tails of `mib` MiB repeat `piece`, shifted and here and there spoiled in the child."""
    state = pair(1, 0.03, transposed=False)[1].tobytes()
    data = piece * ((mib << 20) // len(piece) + 1)
    spoiled = np.frombuffer(data[3:], np.uint8).copy()
    spoiled[1000::2003] = np.random.default_rng(1).integers(0, 256, spoiled[1000::2003].size)
    return tuple(np.frombuffer(state + tail, np.uint8) for tail in (spoiled.tobytes(), data))  # type: ignore[return-value]


def seconds(calls: list[Callable[[], object]], runs: int) -> list[float]:
    """Median time of each call; the calls take turns, so that a slow moment of the machine hits all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def op_table(delta: Bytes, parent: Bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Address and length of the source of every op."""
    data, base, at = memoryview(delta), delta.ctypes.data, 44
    sources, sizes = [], []
    for _ in range(struct.unpack_from("<I", data, 40)[0]):
        code, arg = struct.unpack_from("<BQ", data, at)
        if code:
            sources.append(base + at + 9)
            sizes.append(arg)
            at += 9 + arg
        else:
            sources.append(parent.ctypes.data + arg)
            sizes.append(struct.unpack_from("<Q", data, at + 9)[0])
            at += 17
    return np.array(sources, np.uint64), np.array(sizes, np.uint64)


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def resident_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def peak_of(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes that the peak of the process rises above what it holds before the call, with free memory given back."""
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_kib()
    result = call()
    return (peak_kib() - before) * 1024, result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py codec")
    parser.add_argument("--mib", type=int, default=256, help="size of the states")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--new", type=float, default=0.03, help="part of the child's cells that the parent has not")
    args = parser.parse_args(argv)
    pieces = build_pieces()
    print(f"{args.mib} MiB, {args.new:.0%} new cells, medians of {args.runs} runs\n")
    print("| what | V | ms | beside | ms | ratio | limit |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: |")

    def line(what: str, v: str, own: float, beside: str, other: float, limit: float) -> None:
        print(f"| {what} | {v} | {own * 1e3:.1f} | {beside} | {other * 1e3:.1f} | {own / other:.2f} | {limit} |")

    for transposed in (False, True):
        v = "transposed" if transposed else "by rows"
        child, parent = pair(args.mib, args.new, transposed)
        first = bkvd.encode(child, parent, ID)
        assert first is not None
        delta, shared = first.data, first.shared
        same = child[:shared].copy()
        out = np.zeros(child.size, np.uint8)
        sources, sizes = op_table(delta, parent)

        def plain(child: Bytes = child, parent: Bytes = parent) -> object:
            return bkvd.encode(child, parent, ID)

        def content(child: Bytes = child, parent: Bytes = parent) -> object:
            return bkvd.encode(child, parent, ID, content=True)

        def compare(child: Bytes = child, same: Bytes = same) -> object:
            return libc.memcmp(child.ctypes.data, same.ctypes.data, same.size)

        def decode(delta: Bytes = delta, parent: Bytes = parent, out: Bytes = out) -> object:
            return bkvd.decode(delta, parent, ID, out)

        def copy(child: Bytes = child, out: Bytes = out) -> object:
            return libc.memcpy(out.ctypes.data, child.ctypes.data, child.size)

        def copy_pieces(out: Bytes = out, a: npt.NDArray[np.uint64] = sources, n: npt.NDArray[np.uint64] = sizes) -> object:
            return pieces(out.ctypes.data, a.ctypes.data, n.ctypes.data, a.size)

        t = seconds([plain, content, compare, decode, copy, copy_pieces], args.runs)
        line("encode", v, t[0], "memcmp of the shared bytes", t[2], 3 if transposed else 1.5)
        line("encode, content", v, t[1], "encode", t[0], 1.5)
        line("decode", v, t[3], "memcpy", t[4], 1.2)
        line("decode", v, t[3], "memcpy in the same pieces", t[5], 1.2)
        del same, out
        for name, call in (("encode", plain), ("encode, content", content)):
            peak, result = peak_of(call)
            size = result.data.size  # type: ignore[attr-defined]
            print(
                f"| {name}, memory | {v} | | beside the output ({size} bytes), of the child | | "
                f"{(peak - size) / child.size:.2%} | 1% |"
            )
    for name, piece in (("zeros", b"\0"), ("period 12", bytes(range(12))), ("period 4096", bytes(4000) + bytes(range(96)))):
        child, parent = repeating(piece, args.mib)

        def search(child: Bytes = child, parent: Bytes = parent) -> object:
            return bkvd.encode(child, parent, ID, min_saved=0, content=True)

        (taken,) = seconds([search], 3)
        line("encode, content, of data that repeats itself", name, taken, "0.5 s a MiB", 0.5 * args.mib, 1)
    return 0
