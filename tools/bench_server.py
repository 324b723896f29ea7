"""`bench.py server`: time to the first token of a chat of many tokens, on a real llama-server with a real model.

cold: nothing is cached. own cache: the server's cache in RAM, after another chat had the slot. slot file: the server was
restarted and reads a file that it saved. kvstore: server and proxy were restarted, and the proxy restores the state from the
store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from bench_store import timed

from kvstore.engines import proxy
from kvstore.engines.llama_server.process import LlamaServer


def restart(server: LlamaServer) -> None:
    """Kills the server and starts it again at the same port."""
    port = server.port
    server.kill()
    server.port, server._fixed_port = port, True
    server.start()


class Chats:
    """The same chat by four ways; each makes its own beginning."""

    def __init__(self, model: Path, folder: Path, n_tokens: int) -> None:
        import demo

        self._folder = folder
        self._server = LlamaServer(model, slot_dir=folder / "slots", n_ctx=n_tokens + 1024)
        self._server.start()
        system = demo.system_prompt(self._server, n_tokens)
        self.first = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}]
        self._other = [{"role": "system", "content": "Be brief. " + system[::-1]}, {"role": "user", "content": "Hi."}]
        answer = self._server.chat(self.first, max_tokens=8)["choices"][0]["message"]["content"]
        self.second = [*self.first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]

    def close(self) -> None:
        self._server.stop()

    def _ask(self, messages: list[dict[str, str]]) -> float:
        return timed(lambda: self._server.chat(messages, max_tokens=1, cache_prompt=True))[0]

    def cold(self) -> float:
        restart(self._server)
        return self._ask(self.second)

    def own_cache(self) -> float:
        restart(self._server)
        self._ask(self.first)
        self._ask(self._other)
        return self._ask(self.second)

    def slot_file(self) -> float:
        restart(self._server)
        self._ask(self.first)
        self._server.slot_save(0, "bench.bin")
        restart(self._server)
        return timed(self._server.slot_restore, 0, "bench.bin")[0] + self._ask(self.second)

    def kvstore(self) -> float:
        from bench_turn import _post

        restart(self._server)
        path = self._folder / "kv.store"
        options: dict[str, Any] = {"upstream": self._server.url, "slot_dir": self._server.slot_dir, "store": path}
        options |= {"upstream_api_key": self._server.api_key, "listen": "127.0.0.1:0", "warm_start": False}
        body = {"temperature": 0, "max_tokens": 1}
        with proxy.running(**options) as url:
            _post(url, {**body, "messages": self.first})
        restart(self._server)  # and the proxy: what is restored comes from the file
        with proxy.running(**options) as url:
            seconds, _ = timed(_post, url, {**body, "messages": self.second})
        return seconds


def main(argv: list[str]) -> int:
    import demo

    parser = argparse.ArgumentParser(prog="bench.py server", description=__doc__)
    parser.add_argument("--tokens", type=int, default=3000, help="of the system prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the demo's SmolLM2-135M)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the system's for temporary files)")
    options = parser.parse_args(argv)
    try:
        model = options.model or demo.model_path()
    except demo.DemoError as error:
        print(f"left out: {error}")
        return 0
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-") as name,
        closing(Chats(model, Path(name), options.tokens)) as chats,
    ):
        ways: dict[str, Callable[[], float]] = {
            "cold": chats.cold, "own cache": chats.own_cache, "slot file": chats.slot_file, "kvstore": chats.kvstore,
        }  # fmt: skip
        for _ in range(options.runs):  # in turns
            for way, measure in ways.items():
                seconds.setdefault(way, []).append(measure())
    cold = statistics.median(seconds["cold"])
    print(f"first token of a chat of about {options.tokens:,} tokens, {model.name}, medians of {options.runs}")
    for way, found in seconds.items():
        middle = statistics.median(found)
        spread = f"({min(found) * 1e3:.0f} to {max(found) * 1e3:.0f})"
        print(f"{way:10} {middle * 1e3:8.0f} ms   {spread}   cold / this {cold / middle:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
