"""The proxy's parts that need no llama-server: who may come in, what passes untouched, and small units."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import proxykit

from kvstore import InvalidInputError, NotAStoreError
from kvstore.engines.proxy import runner as proxy
from kvstore.engines.proxy.backend import Timings
from kvstore.engines.proxy.llama_backend import LlamaServerBackend
from kvstore.engines.proxy.prompt import continues, parse
from kvstore.engines.proxy.slots import Rates
from kvstore.engines.proxy.tokenizer import Tokenizer
from kvstore.engines.proxy.upstream import end_to_end

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def options(tmp_path: Path, upstream: str, **more: Any) -> dict[str, Any]:
    return {"upstream": upstream, "slot_dir": tmp_path, "store": tmp_path / "s", "listen": "127.0.0.1:0", **more}


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0"])
def test_other_addresses_than_loopback_need_a_key(tmp_path: Path, listen: str) -> None:
    given = options(tmp_path, "http://127.0.0.1:1", listen=listen)
    if listen == ":0":
        assert proxy.parse_address(listen) == ("127.0.0.1", 0)
        return
    with pytest.raises(InvalidInputError, match="API key"):
        proxy.serve(**given)
    arguments = ["--upstream", given["upstream"], "--slot-dir", str(tmp_path), "--store", "s", "--listen", listen]
    assert proxy.main(arguments) == InvalidInputError.exit_code


@pytest.mark.parametrize(
    "wrong", [{"upstream": "127.0.0.1:8080"}, {"slot_dir": "nowhere"}, {"listen": "8081x"}, {"min_tokens": 0}]
)
def test_wrong_options_are_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        proxy.serve(**{**options(tmp_path, "http://127.0.0.1:1"), **wrong})


def test_file_that_is_no_store_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"something else, long enough to be no empty file" * 100)
    with pytest.raises(NotAStoreError):
        proxy.serve(**options(tmp_path, "http://127.0.0.1:1"))


def test_every_request_needs_the_key(tmp_path: Path) -> None:
    key = "sesame é"
    basic = "Basic " + base64.b64encode(f"me:{key}".encode()).decode()
    with proxykit.recorder() as (upstream, seen), proxy.running(**options(tmp_path, upstream, api_key=key)) as url:
        seen.clear()
        for path in ("/v1/models", "/slots", "/kvstore/", "/kvstore/stats", "/metrics"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic !"}, {"X-Api-Key": ""}):
                answer = httpx.get(url + path, headers=headers)
                assert answer.status_code == 401, path
        assert httpx.get(url + "/kvstore/").headers["www-authenticate"].startswith("Basic")
        bearer = f"Bearer {key}".encode()
        assert httpx.get(url + "/kvstore/stats", headers={"Authorization": basic}).status_code == 200
        assert httpx.get(url + "/v1/models", headers={"Authorization": bearer}).status_code == 200
        assert httpx.get(url + "/v1/models", headers={"X-Api-Key": key.encode()}).status_code == 200
        passed = [r for r in seen if r.path == "/v1/models"]
        # The proxy's key stays with the proxy.
        assert not any({"authorization", "x-api-key"} & set(r.headers) for r in passed)


def test_authorization_passes_where_the_proxy_has_no_key(tmp_path: Path) -> None:
    mine = {"Authorization": "Bearer mine"}
    with proxykit.recorder() as (upstream, seen):
        with proxy.running(**options(tmp_path, upstream)) as url:
            httpx.get(url + "/v1/models", headers=mine)
            assert next(r for r in seen if r.path == "/v1/models").headers["authorization"] == "Bearer mine"
        seen.clear()
        with proxy.running(**options(tmp_path, upstream, upstream_api_key="theirs")) as url:
            httpx.get(url + "/v1/models", headers=mine)
            assert {r.headers.get("authorization") for r in seen} == {"Bearer theirs"}


def test_pages_are_for_this_address_alone(tmp_path: Path) -> None:
    with proxykit.recorder() as (upstream, _), proxy.running(**options(tmp_path, upstream)) as url:
        for path in ("/kvstore/", "/kvstore/stats", "/metrics"):
            assert httpx.get(url + path).status_code == 200
            assert httpx.get(url + path, headers={"Host": "evil.example"}).status_code == 403
        assert "kvstore_requests_total 0" in httpx.get(url + "/metrics").text
        page = httpx.get(url + "/kvstore/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text
        assert "https://" not in page.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "cache_prompt": False}),
        ("POST", "/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["AAAA"]}}),
        ("PUT", "/some/thing%20else?q=%2F&q", {"a": 1}),
    ],
)
def test_what_is_not_cached_passes_untouched(tmp_path: Path, method: str, path: str, body: Any) -> None:
    data = json.dumps(body, indent=3).encode()
    headers = {"X-Mine": "1", "User-Agent": "me", "Content-Type": "application/json", "TE": "trailers"}
    with proxykit.recorder() as (upstream, seen), proxy.running(**options(tmp_path, upstream)) as url:
        answer = httpx.request(method, url + path, content=data, headers=headers)
        assert answer.headers["x-from"] == "upstream"
        (got,) = [r for r in seen if r.headers.get("x-mine")]
    assert (got.method, got.path, got.body) == (method, path, data)
    assert got.headers["user-agent"] == "me"
    assert "te" not in got.headers
    assert int(got.headers["content-length"]) == len(data)


def test_bodies_pass_in_pieces(tmp_path: Path) -> None:
    with proxykit.recorder() as (upstream, seen), proxy.running(**options(tmp_path, upstream)) as url:
        data = bytes(range(256)) * 4096
        httpx.post(url + "/upload", content=data)
        assert next(r for r in seen if r.path == "/upload").body == data


@pytest.mark.parametrize("body", [None, b"{}"])
def test_client_that_goes_away_is_seen_without_writing_to_it(tmp_path: Path, body: bytes | None) -> None:
    with proxykit.recorder() as (upstream, seen), proxy.running(**options(tmp_path, upstream)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.request("POST", url + "/slow", content=body, timeout=httpx.Timeout(240, read=0.2))
        proxykit.wait_for(lambda: any(r.method == "CLOSED" for r in seen))


def test_prompt_goes_to_a_slot_otherwise_unchanged() -> None:
    body = b' {"prompt": "\xc3\xa9",  "seed": 12345678901234567890, "seed": 1e400}'
    prompt = parse("/completion", body)
    assert prompt is not None
    assert prompt.for_slot(3) == body.replace(b"{", b'{"id_slot":3,', 1)
    prompt = parse("/completion", b'{"prompt": "x", "id_slot": -1}')
    assert prompt is not None
    assert json.loads(prompt.for_slot(3))["id_slot"] == 3
    prompt = parse("/completion", b'{"prompt": [1, 2], "id_slot": 1}')
    assert prompt is not None
    assert (prompt.id_slot, prompt.for_slot(1)) == (1, prompt.body)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b'{"prompt": 1}', b'{"prompt": ["a", "b"]}', b'{"prompt": [[1], [2]]}', b'{"prompt": [true]}',
     b'{"prompt": ""}', b'{"prompt": [-1]}', b'{"prompt": "x", "lora": [{"id": 0}]}', b'{"prompt": "x", "id_slot": "1"}',
     b'\xff\xfe{\x00}\x00'],
)  # fmt: skip
def test_what_is_not_understood_is_not_cached(body: bytes) -> None:
    assert parse("/completion", body) is None
    assert parse("/v1/chat/completions", body) is None


def test_timings_are_found_in_the_end_of_an_answer() -> None:
    timings = {"cache_n": 5, "prompt_n": 2, "prompt_ms": 1.5, "predicted_n": 3}
    told = json.dumps('"timings":{"cache_n":1,"prompt_n":1,"prompt_ms":1,"predicted_n":1}')
    last = json.dumps({"content": "x", "timings": timings}, separators=(",", ":"))
    answer = f'{{"content":{told}}}\n{last}'.encode()
    parse_timings = LlamaServerBackend(FakeServer(), ".").parse_timings
    assert parse_timings(b"", answer) == Timings(5, 2, 1.5, 3)
    assert parse_timings(b"", f"{told}".encode()) is None
    assert parse_timings(b"", b'{"timings":{"cache_n":null}}') is None


def test_chat_that_continues() -> None:
    first = [{"role": "user", "content": "a"}]
    answer = {"role": "assistant", "content": "b"}
    assert continues(first, [*first, answer]) == 0
    added = continues(first, [*first, answer, {"role": "user", "content": "c"}])
    assert added is not None
    assert added > 0
    assert continues(first, first) is None
    assert continues(first, [{"role": "user", "content": "z"}, answer]) is None
    assert continues(first, [*first, {"role": "user", "content": "c"}]) is None


def test_headers_between_neighbours_stay_there() -> None:
    given = [(b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"), (b"Keep-Alive", b"5"), (b"Date", b"d"), (b"Set-Cookie", b"a")]
    assert end_to_end([*given, (b"Set-Cookie", b"b")]) == [(b"date", b"d"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]


class FakeServer:
    """Tokens are code points, after a start token; `merge` makes one token of the letters at a join."""

    url = ""

    def __init__(self, *, start: bool = True) -> None:
        self.asked: list[str] = []
        self.start = start

    async def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 0) -> Any:
        self.asked.append(body["content"])
        start = [1] if self.start and body["add_special"] else []
        return {"tokens": [*start, *(ord(c) for c in body["content"])]}


def _filled(tokenizer: Tokenizer, prompt: Any) -> Any:
    asyncio.run(tokenizer.fill(prompt))
    return prompt.tokens


def _prompt(text: str) -> Any:
    return parse("/completion", json.dumps({"prompt": text}).encode())


def test_long_prompts_are_tokenized_from_the_end_of_a_known_one() -> None:
    server = FakeServer()
    tokenizer = Tokenizer(LlamaServerBackend(server, "."))
    known, longer = "a" * 5000, "a" * 5000 + "b" * 20
    asyncio.run(tokenizer.fill(_prompt(known)))
    second = _prompt(longer)
    tokens = _filled(tokenizer, second)
    assert server.asked == [known, "b" * 20]
    assert tokens.tolist() == [1, *(ord(c) for c in longer)]
    assert tokenizer.reconcile(second, tokens, len(tokens))
    # What the server really made of the whole is another thing, again and again: no more joins.
    other = tokens.copy()
    other[-5] = 7
    for _ in range(3):
        assert not tokenizer.reconcile(second, other, len(other))
    asyncio.run(tokenizer.fill(_prompt(longer + "c")))
    assert server.asked[-1] == longer + "c"


def test_tokens_of_another_model_are_not_remembered() -> None:
    async def run() -> None:
        server = FakeServer()
        tokenizer = Tokenizer(LlamaServerBackend(server, "."))
        under_way = asyncio.create_task(tokenizer.fill(_prompt("a" * 5000)))
        await asyncio.sleep(0)
        tokenizer.reset()
        await under_way
        await tokenizer.fill(_prompt("a" * 5001))
        assert server.asked[-1] == "a" * 5001

    asyncio.run(run())


def test_start_token_that_only_one_side_adds_is_learned() -> None:
    server = FakeServer()
    tokenizer = Tokenizer(LlamaServerBackend(server, "."))
    prompt = _prompt("hello")
    tokens = _filled(tokenizer, prompt)
    assert not tokenizer.reconcile(prompt, tokens[1:], len(tokens) - 1)
    assert _filled(tokenizer, _prompt("hello")).tolist() == tokens[1:].tolist()
    assert tokenizer.mismatches == 1


def test_small_restore_that_was_delayed_says_nothing_of_large_ones() -> None:
    rates = Rates()
    before = rates.restore_seconds(512 << 20)
    for _ in range(5):
        rates.restored(200_000, 0.1)
    assert rates.restore_seconds(200_000) < 0.02
    assert rates.restore_seconds(512 << 20) < 20 * before


def test_large_restores_are_a_measurement() -> None:
    rates = Rates()
    for _ in range(5):
        rates.restored(512 << 20, 10.0)
    assert 7 < rates.restore_seconds(512 << 20) < 11
    for _ in range(50):
        rates.skipped()
    assert rates.restore_seconds(512 << 20) < 0.3
