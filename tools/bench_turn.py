"""`bench.py turn`: a conversation that grows turn by turn: bytes written, time of put and get, first chat after a restart.

Bytes are those that the kernel counts as written to the disk by a process of its own for each way (`write_bytes` of
/proc/self/io), so a log and what is written behind a put count too; cancelled writes do not. Beside kvstore: one slot file a
turn (what `--slot-save-path` gives), and a store of blocks, simulated by plain files, each named by the hash of all tokens up
to its end, the last block of a state with its remainder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_store import timed, write_plain

import kvstore

Bytes = npt.NDArray[np.uint8]
N_LAYER, ROW = 8, 1024  # 16 KiB a token
MIB = 1 << 20
WAYS = ("kvstore", "slot files", "blocks of 64", "blocks of 256")


class Conversation:
    """States of the first n tokens of one conversation, V by rows or transposed."""

    def __init__(self, n: int, transposed: bool) -> None:
        rng = np.random.Generator(np.random.SFC64(7))
        self.tokens = np.arange(1, n + 1, dtype=np.int32)
        self.transposed = transposed
        self._rows = [np.frombuffer(rng.bytes(n * ROW), np.uint8).reshape(n, ROW) for _ in range(2 * N_LAYER)]

    def state(self, n: int) -> Bytes:
        cells = np.zeros((n, 3), "<u4")
        cells[:, 0], cells[:, 1] = np.arange(n), 1
        parts = [struct.pack("<IiII", 0xAF143CD8, 0, 1, n), cells.tobytes(), struct.pack("<II", self.transposed, N_LAYER)]
        for i, rows in enumerate(self._rows):
            if i >= N_LAYER and self.transposed:
                parts.append(struct.pack("<iII", 1, 2, ROW // 2))
                parts.append(np.ascontiguousarray(rows[:n].view("<u2").T).tobytes())
            else:
                parts.append(struct.pack("<iQ", 1, ROW))
                parts.append(rows[:n].tobytes())
        return np.frombuffer(b"".join(parts), np.uint8)


def written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


class Kvstore:
    def __init__(self, folder: Path, n_learned: int) -> None:
        self._path, self._n_learned = folder / "kv.store", n_learned
        self._store = kvstore.Store(self._path, cache_ram_mib=0)
        self._id = 0

    def put(self, tokens: npt.NDArray[np.int32], state: Bytes) -> None:
        learned = len(tokens) == self._n_learned
        self._id = self._store.put(tokens, state, entry_class="learned" if learned else "normal").id

    def get(self) -> Bytes:
        saved = self._store.get(self._id)
        assert saved is not None
        return saved.main

    def close(self) -> None:
        self._store.close()


class SlotFiles:
    def __init__(self, folder: Path, n_learned: int) -> None:
        self._folder, self._last = folder, folder

    def put(self, tokens: npt.NDArray[np.int32], state: Bytes) -> None:
        self._last = self._folder / f"{len(tokens)}.bin"
        write_plain(self._last, np.frombuffer(tokens.tobytes() + state.tobytes(), np.uint8))
        for old in self._folder.glob("*.bin"):
            if old != self._last:
                old.unlink()

    def get(self) -> Bytes:
        return np.fromfile(self._last, np.uint8)

    def close(self) -> None:
        os.sync()


class Blocks:
    """What a store of blocks writes: a file for each full block that is new, and one for the rest of the state."""

    def __init__(self, folder: Path, n_learned: int, size: int) -> None:
        self._folder, self._size = folder, size
        self._names: list[Path] = []

    def put(self, tokens: npt.NDArray[np.int32], state: Bytes) -> None:
        self._names = []
        per_token = len(state) // len(tokens)
        hasher = hashlib.blake2b(digest_size=16)
        for start in range(0, len(tokens), self._size):
            block = tokens[start : start + self._size]
            hasher.update(block.tobytes())
            name = self._folder / f"{hasher.hexdigest()}-{len(block)}"
            self._names.append(name)
            if not name.exists():
                write_plain(name, state[start * per_token : (start + len(block)) * per_token])

    def get(self) -> Bytes:
        return np.concatenate([np.fromfile(name, np.uint8) for name in self._names])

    def close(self) -> None:
        os.sync()


def opened(way: str, folder: Path, n_learned: int) -> Any:
    if way == "kvstore":
        return Kvstore(folder, n_learned)
    if way == "slot files":
        return SlotFiles(folder, n_learned)
    return Blocks(folder, n_learned, int(way.rpartition(" ")[2]))


def talk(way: str, turns: int, step: int, transposed: bool, folder: Path) -> dict[str, Any]:
    """One way, in this process: the learned prefix first, then the turns; bytes are counted from the first turn on."""
    said = Conversation(1000 + turns * step, transposed)
    store = opened(way, folder, 1000)
    store.put(said.tokens[:1000], said.state(1000))
    time.sleep(1)
    before, puts, gets, copies = written(), [], [], []
    for turn in range(1, turns + 1):
        n = 1000 + turn * step
        state = said.state(n)
        seconds, _ = timed(store.put, said.tokens[:n], state)
        puts.append(seconds)
        if turn in (1, turns // 2, turns):
            for _ in range(5):
                seconds, got = timed(store.get)
                gets.append((turn, seconds))
                copies.append((turn, timed(state.copy)[0]))
            if way == "kvstore" and not np.array_equal(got, state):
                raise SystemExit("a byte differs")
    store.close()
    of = {t: statistics.median(s for turn, s in gets if turn == t) for t, _ in gets}
    copy = {t: statistics.median(s for turn, s in copies if turn == t) for t, _ in copies}
    return {
        "written": written() - before,
        "new": turns * step * 2 * N_LAYER * ROW,
        "put": [statistics.median(puts[:5]), statistics.median(puts[-5:])],
        "get_by_memcpy": {t: of[t] / copy[t] for t in of},
    }


def in_a_process(way: str, turns: int, step: int, transposed: bool, where: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=where, prefix="kvstore-bench-") as folder:
        words = [sys.executable, __file__, "--one", way, "--turns", str(turns), "--step", str(step), "--dir", folder]
        done = subprocess.run([*words, *(["--transposed"] if transposed else [])], stdout=subprocess.PIPE, check=True)
        return dict(json.loads(done.stdout))


def table(turns: int, step: int, transposed: bool, where: str | None) -> list[dict[str, Any]]:
    form = "transposed" if transposed else "by rows"
    print(f"\n{turns} turns of {step} tokens over a prefix of 1000, 16 KiB a token, V {form}")
    titles = f"{'MiB written':>12} {'a new byte':>11} {'put 1..5':>10} {'put last':>10}"
    print(f"{'':14} {titles}   get, by memcpy of the state, by turn")
    found = []
    for way in WAYS:
        if transposed and way.startswith("blocks"):
            continue  # a block of tokens is not a range of bytes there
        row = in_a_process(way, turns, step, transposed, where)
        gets = "  ".join(f"{turn}: {ratio:.2f}" for turn, ratio in row["get_by_memcpy"].items())
        print(
            f"{way:14} {row['written'] / MIB:12.1f} {row['written'] / row['new']:11.2f} {row['put'][0] * 1e3:7.1f} ms "
            f"{row['put'][1] * 1e3:7.1f} ms   {gets}",
            flush=True,
        )
        found.append({"way": way, "turns": turns, "step": step, "transposed": transposed, **row})
    return found


def first_chat(slot_memory: float | None, warm_start: bool, where: str | None) -> float:
    """Seconds to the first token of a chat that goes on, after the server was restarted."""
    import demo

    from kvstore.engines import proxy
    from kvstore.engines.llama_server.process import LlamaServer

    with tempfile.TemporaryDirectory(dir=where, prefix="kvstore-bench-") as name:
        folder = Path(name)
        server = LlamaServer(demo.model_path(), slot_dir=folder / "slots", n_ctx=4096, extra={"cache_ram_mib": 0})
        options: dict[str, Any] = {"slot_memory": slot_memory, "warm_start": warm_start, "listen": "127.0.0.1:0"}
        with server:
            system = demo.system_prompt(server, 1500)
            key = server.api_key
            with proxy.running(
                upstream=server.url, slot_dir=server.slot_dir, store=folder / "kv.store", upstream_api_key=key, **options
            ) as url:
                chat = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}]
                body = {"messages": chat, "max_tokens": 8, "temperature": 0}
                answer = _post(url, body)["choices"][0]["message"]["content"]
                time.sleep(3)  # saved, once the server is idle
                port = server.port
                server.kill()
                server.port, server._fixed_port = port, True
                server.start()
                time.sleep(4)  # a warm start takes place here
                chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
                return timed(_post, url, {**body, "messages": chat, "max_tokens": 1})[0]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    import urllib.request

    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return dict(json.load(answer))


def restarts(runs: int, where: str | None) -> list[dict[str, Any]]:
    ways = {
        "slot files, no warm start": (0.0, False),
        "memory, no warm start": (None, False),
        "slot files, warm start": (0.0, True),
        "memory, warm start": (None, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):  # in turns
        for name, (memory, warm) in ways.items():
            seconds[name].append(first_chat(memory, warm, where))
    print("\nfirst token of a chat of 1,500 tokens after llama-server was restarted (SmolLM2-135M), median of", runs)
    for name, found in seconds.items():
        print(f"{name:28} {statistics.median(found) * 1e3:8.0f} ms   ({min(found) * 1e3:.0f} to {max(found) * 1e3:.0f})")
    return [{"way": name, "seconds": found} for name, found in seconds.items()]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.py turn", description=__doc__)
    parser.add_argument("--dir", help="a folder on the disk to measure (default: the system's for temporary files)")
    parser.add_argument("--quick", action="store_true", help="10 turns, no server")
    parser.add_argument("--runs", type=int, default=3, help="restarts of the server, each way")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--transposed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(talk(args.one, args.turns, args.step, args.transposed, Path(args.dir))))
        return 0
    found: dict[str, Any] = {"turns": []}
    for turns, step in ((10, 300),) if args.quick else ((40, 300), (200, 100)):
        for transposed in (False, True):
            found["turns"] += table(turns, step, transposed, args.dir)
    if not args.quick:
        found["restarts"] = restarts(args.runs, args.dir)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
