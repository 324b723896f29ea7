"""HTTP through the proxy: the same answers as llama-server's own, byte for byte where it matters, and no good answer made of
a broken one."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import serverkit

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import proxykit
from proxykit import post, stats, wait_for

from kvstore.engines.llama_server.process import LlamaServer
from kvstore.engines.proxy import runner as proxy
from kvstore.engines.proxy.http_client import HttpClient, HttpError, HttpTimeout

KEY = "sesame"
ORIGIN = "http://page.example"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, str]]:
    """A server and a proxy before it that want the same key."""
    folder = tmp_path_factory.mktemp("keyed")
    with (
        serverkit.new_server(folder / "slots", parallel=2, n_ctx=4096, api_key=KEY, extra={"metrics": True}) as server,
        proxy.running(
            upstream=server.url, slot_dir=server.slot_dir, store=folder / "s", listen="127.0.0.1:0", api_key=KEY,
            upstream_api_key=KEY,
        ) as url,
    ):  # fmt: skip
        wait_for(lambda: post_stats(url)["caching"])
        yield server, url


def post_stats(url: str) -> dict[str, Any]:
    return dict(httpx.get(url + "/kvstore/stats", headers={"X-Api-Key": KEY}).raise_for_status().json())


def exchange(url: str, data: bytes, *, n: int = 1, head: bool = False) -> tuple[list[tuple[int, dict[str, str], bytes]], bool]:
    """Sends bytes; the answers as status, headers and body, and whether the other side closed after them."""
    answers = []
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        stream = connection.makefile("rb")
        while len(answers) < n:
            status = int(stream.readline().split()[1])
            headers: dict[str, str] = {}
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            if status == 100:
                continue
            if head or status in (204, 304):
                body = b""
            elif headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(stream.readline(), 16):
                    body += stream.read(size)
                    stream.readline()
                stream.readline()
            else:
                body = stream.read(int(headers["content-length"]))
            answers.append((status, headers, body))
        # One that stays open answers once more.
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            closed = not stream.readline()
        except ConnectionError:
            closed = True
    return answers, closed


def request(method: str, path: str, body: bytes | None = None, *, key: bool = True, version: str = "1.1", **more: str) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x"]
    lines += [f"Authorization: Bearer {KEY}"] if key else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    lines += [] if body is None or "Transfer_Encoding" in more else [f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


# What is between two neighbours, what counts requests, and what Python's and C++'s servers call themselves.
OWN = {"keep-alive", "date", "server", "connection", "accept-ranges"}


def same(server: LlamaServer, url: str, data: bytes, *, head: bool = False, n: int = 1, bodies: bool = True) -> int:
    """Asks both; the status, after all that must be equal is."""
    direct, direct_closed = exchange(server.url, data, n=n, head=head)
    through, through_closed = exchange(url, data, n=n, head=head)
    for theirs, ours in zip(direct, through, strict=True):
        assert ours[0] == theirs[0]
        drop = OWN if bodies else {*OWN, "content-length"}
        assert {k: v for k, v in ours[1].items() if k not in drop} == {k: v for k, v in theirs[1].items() if k not in drop}
        if b" HTTP/1.0" not in data:  # where closing is the rule
            assert ours[1].get("connection") == theirs[1].get("connection")
        assert not bodies or ours[2] == theirs[2]
    assert through_closed == direct_closed
    return through[-1][0]


TOKENIZE = b'{"content":"x"}'


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize(
    ("method", "path"),
    [("OPTIONS", path) for path in ("/v1/chat/completions", "/slots", "/nowhere", "/metrics")]
    + [(method, path) for method in ("GET", "HEAD") for path in ("/health", "/v1/health", "/slots", "/props", "/nowhere")]
    + [("GET", path) for path in ("/", "/index.html", "/favicon.ico", "/sw.js", "/_app/none.js", "/_app/../slots", "/health/")]
    + [("POST", "/health"), ("DELETE", "/slots"), ("GET", "/v1/models?a=/health")],
)
def test_with_and_without_the_key_as_the_server(keyed: tuple[LlamaServer, str], method: str, path: str, key: bool) -> None:
    server, url = keyed
    for more in ({}, {"Origin": ORIGIN, "Accept_Encoding": "gzip"}):
        data = request(method, path, key=key, **more)
        same(server, url, data, head=method == "HEAD", bodies=path not in ("/slots", "/v1/models?a=/health"))


def test_browser_is_let_in(keyed: tuple[LlamaServer, str]) -> None:
    _, url = keyed
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = httpx.options(url + "/v1/chat/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    for path in ("/v1/models", "/kvstore/stats", "/kvstore/nowhere"):
        refused = httpx.get(url + path, headers={"Origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_open_paths_do_not_carry_the_servers_key(tmp_path: Path) -> None:
    given = {"upstream_api_key": "theirs", "api_key": "ours", "slot_dir": tmp_path, "store": tmp_path / "s"}
    with proxykit.recorder() as (upstream, seen), proxy.running(upstream=upstream, listen="127.0.0.1:0", **given) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            seen.clear()
            assert httpx.get(url + "/health", headers=headers).status_code == 200
            assert [r.headers.get("authorization") for r in seen if r.path == "/health"] == [None]


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/tokenize", TOKENIZE),
        request("POST", "/tokenize", TOKENIZE, version="1.0"),
        request("POST", "/tokenize", TOKENIZE, Connection="close"),
        request("POST", "/tokenize", TOKENIZE, Expect="100-continue"),
        request("POST", "/tokenize", b"f\r\n" + TOKENIZE + b"\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
        request("POST", "/tokenize", gzip.compress(TOKENIZE), Content_Encoding="gzip"),
        request("POST", "/completion", gzip.compress(b'{"prompt":"x","n_predict":1}'), Content_Encoding="gzip"),
        request("POST", "/tokenize", b"{]"),
        request("POST", "/tokenize", b""),
        request("POST", "/slots/0?action=nothing", b"{}"),
        request("POST", "/slots/x?action=save", b"{}"),
        request("POST", "/nowhere", b"{}"),
        request("POST", "/v1/embeddings", b'{"input":"x"}'),
        request("PUT", "/tokenize", TOKENIZE),
        request("GET", "/health", version="1.0", key=False),
        request("GET", "/health", Connection="close"),
        request("GET", "/%2e%2e/a%20b%C3%A9?c=%23&d"),
    ],
)
def test_answers_are_the_servers(keyed: tuple[LlamaServer, str], data: bytes) -> None:
    server, url = keyed
    same(server, url, data)


def test_requests_that_follow_each_other_at_once(keyed: tuple[LlamaServer, str]) -> None:
    server, url = keyed
    assert same(server, url, request("GET", "/health") * 3 + request("POST", "/tokenize", TOKENIZE), n=4) == 200


@pytest.mark.parametrize("path", ["/tokenize", "/completion", "/kvstore/stats"])
def test_refusal_of_a_long_body_arrives(keyed: tuple[LlamaServer, str], path: str) -> None:
    _, url = keyed
    answers, _ = exchange(url, request("POST", path, b"x" * 3_000_000, key=False))
    assert answers[0][0] == 401


def nested(n: int) -> bytes:
    return b"[" * n + b"]" * n


ODD = {
    "deep": b'{"prompt":"x","n_predict":1,"a":%s}' % nested(978),
    "deeper": b'{"prompt":"x","n_predict":1,"a":%s}' % nested(50_000),
    "not so deep": b'{"prompt":"x","n_predict":1,"a":%s}' % nested(90),
    "deep prompt": b'{"n_predict":1,"prompt":%s}' % nested(978),
    "surrogate": b'{"prompt":"\\ud800","n_predict":1}',
    "surrogates": b'{"prompt":"\\ud83d\\ude00","n_predict":1}',
    "equal keys": b'{"prompt":"a b c d","n_predict":1,"prompt":"b"}',
    "NaN": b'{"prompt":"x","n_predict":NaN}',
    "infinity": b'{"prompt":"x","n_predict":1,"temperature":-Infinity}',
    "too large": b'{"prompt":"x","n_predict":1,"temperature":1e999}',
    "long number": b'{"prompt":"x","n_predict":1,"seed":%s}' % (b"9" * 5000),
    "no slot": b'{"prompt":"x","n_predict":1,"id_slot":100000000000000000000}',
    "slot as text": b'{"prompt":"x","n_predict":1,"id_slot":"1"}',
    "slot as float": b'{"prompt":"x","n_predict":1,"id_slot":1.0}',
    "BOM": b'\xef\xbb\xbf{"prompt":"x","n_predict":1}',
    "UTF-16": '{"prompt":"x","n_predict":1}'.encode("utf-16-le"),
    "no UTF-8": b'{"prompt":"\xff\xfe","n_predict":1}',
    "NUL": b'{"prompt":"a\\u0000b","n_predict":1}',
    "control": b'{"prompt":"a\nb","n_predict":1}',
    "empty": b"",
    "list": b"[1]",
    "null": b"null",
    "text": b'"x"',
    "no prompt": b'{"n_predict":1}',
    "number": b'{"prompt":1,"n_predict":1}',
    "cut": b'{"prompt":"x","n_predict":1',
    "more": b'{"prompt":"x","n_predict":1} x',
    "two keys of a slot": b'{"id_slot":-1,"prompt":"x","n_predict":1,"id_slot":-1}',
    "10 MB": b'{"prompt":"%s","n_predict":1}' % (b"a " * 5_000_000),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "10 MB" else k for k in ODD])
def test_odd_bodies_are_left_to_the_server(keyed: tuple[LlamaServer, str], kind: str) -> None:
    server, url = keyed
    data = request("POST", "/completion", ODD[kind])
    before = post_stats(url)["failures"]
    same(server, url, data, bodies=False)
    (direct,), _ = exchange(server.url, data)
    (through,), _ = exchange(url, data)
    if direct[0] == 200:
        told = [json.loads(body)["content"] for _, _, body in (direct, through)]
        assert told[0] == told[1]
    else:
        assert through[2] == direct[2] or b"column" in direct[2]  # a slot's number in front moves the column
    assert post_stats(url)["failures"] == before


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"metadata":%s}' % nested(978),
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":%s}' % nested(300),
        b'{"messages":[{"role":"user","content":"\\udc00"}],"max_tokens":1}',
        b'{"messages":[{"role":1,"content":"x"}],"max_tokens":1}',
        b'{"messages":[[]],"max_tokens":1}',
        b'{"messages":{},"max_tokens":1}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":"x"}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"chat_template_kwargs":{"a":NaN}}',
    ],
)
def test_odd_chats_are_left_to_the_server(keyed: tuple[LlamaServer, str], body: bytes) -> None:
    server, url = keyed
    before = post_stats(url)["failures"]
    same(server, url, request("POST", "/v1/chat/completions", body), bodies=False)
    assert post_stats(url)["failures"] == before


# -- servers that cannot be made of llama-server


@contextmanager
def fake(answer: Callable[[socket.socket, bytes], None], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """An upstream of plain sockets: `answer` gets each connection with the head of its first request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                if tls is not None:
                    connection = tls.wrap_socket(connection, server_side=True)
                with connection:
                    data = b""
                    while b"\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
                        data += more
                    if data:
                        answer(connection, data)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=work, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


WHOLE = {
    "close": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nall of it",
    "1.0": b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nall of it\r\n0\r\n\r\n",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
}
CUT = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nall of",
    "length, no body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nall",
    "after a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nall of it\r\n",
    "end of chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nall of it\r\n0\r\n",
}
NOTHING = {
    "nothing": b"",
    "head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "not HTTP": b"SSH-2.0-x\r\n",
    "long status": b"HTTP/1.1 " + b"2" * 100_000,
}


def saying(data: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda connection, _: connection.sendall(data)


def options(tmp_path: Path, upstream: str) -> dict[str, Any]:
    return {"upstream": upstream, "slot_dir": tmp_path, "store": tmp_path / "s", "listen": "127.0.0.1:0"}


@pytest.mark.parametrize("path", ["/v1/models", "/completion"])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_answers_are_whole(tmp_path: Path, kind: str, path: str) -> None:
    with fake(saying(WHOLE[kind])) as upstream, proxy.running(**options(tmp_path, upstream)) as url:
        answer = httpx.post(url + path, content=b'{"prompt":"x"}', timeout=30)
        assert (answer.status_code, answer.text) == (200, "all of it")


@pytest.mark.parametrize("path", ["/v1/models", "/completion"])
@pytest.mark.parametrize("kind", CUT)
def test_cut_answers_are_broken_ones(tmp_path: Path, kind: str, path: str) -> None:
    with (
        fake(saying(CUT[kind])) as upstream,
        proxy.running(**options(tmp_path, upstream)) as url,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        httpx.post(url + path, content=b'{"prompt":"x"}', timeout=30)


@pytest.mark.parametrize("kind", NOTHING)
def test_no_answer_is_said_to_be_none(tmp_path: Path, kind: str) -> None:
    with fake(saying(NOTHING[kind])) as upstream, proxy.running(**options(tmp_path, upstream)) as url:
        answer = httpx.get(url + "/v1/models", timeout=30, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def ask(url: str, timeout: float = 30) -> tuple[int, bytes]:
    async def once() -> tuple[int, bytes]:
        client = HttpClient(url)
        try:
            return await client.request("GET", "/", {}, b"", timeout)
        finally:
            await client.close()

    return asyncio.run(once())


def test_own_requests_see_what_is_broken() -> None:
    for whole in WHOLE.values():
        with fake(saying(whole)) as upstream:
            assert ask(upstream) == (200, b"all of it")
    for broken in (*CUT.values(), *NOTHING.values()):
        with fake(saying(broken)) as upstream, pytest.raises(HttpError):
            ask(upstream)
    with fake(lambda connection, _: connection.recv(1)) as upstream, pytest.raises(HttpTimeout) as caught:
        ask(upstream, 0.2)
    assert caught.value.late


def test_own_requests_survive_the_end_of_a_kept_connection(tmp_path: Path) -> None:
    server = serverkit.new_server(tmp_path / "slots", api_key="")

    async def three() -> list[int]:
        client = HttpClient(server.url)
        loop = asyncio.get_running_loop()
        try:
            found = [(await client.request("POST", "/tokenize", {}, b'{"content":"x"}', 30))[0]]
            await loop.run_in_executor(None, proxykit.restart, server)
            found.append((await client.request("POST", "/tokenize", {}, b'{"content":"x"}', 30))[0])
            found.append((await client.request("GET", "/health", {}, b"", 30))[0])
            return found
        finally:
            await client.close()

    with server:
        assert asyncio.run(three()) == [200, 200, 200]


def test_nothing_is_added_to_what_passes(tmp_path: Path) -> None:
    heads: list[bytes] = []

    def answer(connection: socket.socket, head: bytes) -> None:
        heads.append(head)
        connection.sendall(WHOLE["length"])

    with fake(answer) as upstream, proxy.running(**options(tmp_path, upstream)) as url:
        target = b"//a/../b%2Fc?x=%zz&y={}|^`#"
        exchange(url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nX-B: \xc3\xa9\r\nx-a: 1\r\nX-B: 2\r\n\r\n")
        (head,) = [h for h in heads if b"x-a" in h.lower()]
    lines = head.decode().split("\r\n")
    assert lines[0] == "GET //a/../b%2Fc?x=%zz&y={}|^` HTTP/1.1"
    fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)]
    assert [f for f in fields if f[0] not in ("host", "connection")] == [("x-b", "é"), ("x-a", "1"), ("x-b", "2")]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that no system trusts, and a server's context with it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("ca")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", folder / "key", "-out", folder / "crt"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return folder / "crt", context


def test_private_authority_is_trusted_for_all_requests(
    tmp_path: Path, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, context = authority
    heads: list[bytes] = []

    def answer(connection: socket.socket, head: bytes) -> None:
        heads.append(head)
        connection.sendall(WHOLE["length"])

    with fake(answer, context) as upstream:
        with proxy.running(**options(tmp_path, upstream)) as url:
            refused = httpx.get(url + "/v1/models", timeout=30)
            assert refused.status_code == 502
            assert "CERTIFICATE_VERIFY_FAILED" in refused.text
            assert "set SSL_CERT_FILE" in refused.text
        assert heads == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        with proxy.running(**options(tmp_path, upstream)) as url:
            assert httpx.get(url + "/v1/models", timeout=30).text == "all of it"
            wait_for(lambda: any(b"/props" in head for head in heads))


# -- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("extra", [{}, {"n": 1, "cache_prompt": False}], ids=["cached", "passed"])
@pytest.mark.slow
def test_generation_ends_with_its_client(tmp_path: Path, stream: bool, extra: dict[str, Any]) -> None:
    with proxykit.both(tmp_path, n_ctx=8192) as (server, url):
        body = json.dumps({"prompt": "Once upon a time ", "n_predict": 8000, "ignore_eos": True, "stream": stream, **extra})

        def working() -> bool:
            return any(slot["is_processing"] for slot in server.slots())

        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request("POST", "/completion", body.encode(), key=False))
            wait_for(working)
        wait_for(lambda: not working())
        told = wait_for(lambda: (s := stats(url)) and not any(slot["busy"] for slot in s["slots"]) and s)
        assert told["failures"] == 0
        if stream:  # without, this llama-server goes on to the end, whoever asked it
            ended = re.findall(r"stop processing: n_tokens = (\d+), truncated = (\d)", server.log_tail(200))
            assert ended[-1][1] == "0"
        assert post(url + "/completion", {"prompt": "Hello", "n_predict": 1})["timings"]


def test_upload_that_breaks_off_is_no_fault_of_the_server(tmp_path: Path) -> None:
    with proxykit.both(tmp_path) as (_, url):
        chat = proxykit.Chat(url, "Anna")
        chat.ask()
        proxykit.wait_saved(url)
        host, port = url.removeprefix("http://").split(":")
        for path in ("/tokenize", "/completion"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(request("POST", path, b"x" * 10, key=False).replace(b": 10", b": 1000"))
        chat.ask()
        assert chat.reused > 0.85
        assert stats(url)["upstream_changes"] == 0
