"""What the tests of the proxy share: a server with a proxy before it, chats, and an upstream that only records."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import serverkit

from kvstore.engines.llama_server.process import LlamaServer
from kvstore.engines.proxy import runner as proxy

# httpx gives up after 5 seconds where it is not told: too few for a busy machine.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 240.0)

SYSTEM = "You are the assistant of a small house. Be kind to all, and answer in few and short words. " * 4
QUESTIONS = ("Tell me of the kettle in the kitchen, please. " * 3, "And then?", "Thank you.", "Why?", "Good bye.")


@dataclass
class Chat:
    """A conversation through a proxy. `timings` are the server's of the last answer."""

    url: str
    name: str
    system: str = SYSTEM
    messages: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)

    def ask(self, question: str | None = None, **params: Any) -> int:
        """One turn; the number of prompt tokens."""
        if not self.messages:
            self.messages = [{"role": "system", "content": self.system}]
        n = sum(m["role"] == "user" for m in self.messages)
        self.messages.append({"role": "user", "content": question or f"I am {self.name}. {QUESTIONS[n % len(QUESTIONS)]}"})
        body = {"messages": self.messages, "max_tokens": 8, "temperature": 0, **params}
        answer = post(self.url + "/v1/chat/completions", body)
        self.messages.append(answer["choices"][0]["message"])
        self.timings = answer["timings"]
        return int(self.timings["cache_n"] + self.timings["prompt_n"])

    @property
    def reused(self) -> float:
        """Share of the tokens before this turn's that were not computed again."""
        return float(self.timings["cache_n"] / (self.timings["cache_n"] + self.timings["prompt_n"]))


def post(url: str, body: Any, **headers: str) -> Any:
    response = httpx.post(url, json=body, headers=headers, timeout=240)
    response.raise_for_status()
    return response.json()


def stats(url: str) -> dict[str, Any]:
    return dict(httpx.get(url + "/kvstore/stats").raise_for_status().json())


def wait_for(what: Callable[[], Any], seconds: float = 240) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def wait_saved(url: str) -> dict[str, Any]:
    """Until every slot's tokens are in the store."""
    return dict(wait_for(lambda: (s := stats(url)) and all(_saved(slot) for slot in s["slots"]) and s))


def _saved(slot: dict[str, Any]) -> bool:
    return not slot["busy"] and not slot["saving"] and slot["tokens"] - slot["stored_tokens"] < 16


@contextmanager
def proxied(server: LlamaServer, store: Path, **options: Any) -> Iterator[str]:
    options = {"min_saved_mib": 0.1, "upstream_api_key": server.api_key, "listen": "127.0.0.1:0", **options}
    with proxy.running(upstream=server.url, slot_dir=server.slot_dir, store=store, **options) as url:
        wait_for(lambda: stats(url)["caching"])
        yield url


def restart(server: LlamaServer) -> None:
    """As after a crash, on the same port."""
    port = server.port
    server.kill()
    server.port, server._fixed_port = port, True
    server.start()


@contextmanager
def both(folder: Path, model: str = "llama", **options: Any) -> Iterator[tuple[LlamaServer, str]]:
    """A server and the address of a proxy before it."""
    own = ("min_tokens", "idle_seconds", "warm_start", "slot_memory")
    proxy_options = {name: options.pop(name) for name in own if name in options}
    with (
        serverkit.new_server(folder / "slots", model, **options) as server,
        proxied(server, folder / "states.kvstore", **proxy_options) as url,
    ):
        yield server, url


@dataclass
class Recorded:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def recorder() -> Iterator[tuple[str, list[Recorded]]]:
    """An upstream that is no llama-server: keeps what it gets, and answers {}."""
    seen: list[Recorded] = []

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            n = int(self.headers.get("Content-Length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen.append(Recorded(self.command, self.path, headers, self.rfile.read(n)))
            if self.path == "/slow":
                # Answers nothing, and records when the other side has closed.
                self.connection.settimeout(240)
                assert self.connection.recv(1) == b""
                seen.append(Recorded("CLOSED", self.path, {}, b""))
                return
            data = json.dumps({}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("X-From", "upstream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = _any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()
