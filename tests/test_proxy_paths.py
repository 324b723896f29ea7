"""Every path that generates text is cached: real clients of each API, before a real llama-server with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import ggufkit
import proxykit
import serverkit
from proxykit import post, stats, wait_saved

from kvstore.engines.llama_server.process import LlamaServer
from kvstore.engines.proxy import chat_bodies, shapes
from kvstore.engines.proxy import prompt as prompts

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{%- endif %}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>\n' }}{%- endif %}
{%- if message.content %}{{ message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}{%- endif %}"""
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "number", "minimum": 1.5}}}
TOOLS = [("sky", "Tells the weather of a place.", SCHEMA), ("time", "Tells the time.", {"type": "object"})]
ARGUMENTS = {"at": "Ö\"", "d": 1.5}
QUESTIONS = ("How is it?", "And now?", "And?", "Thanks.")
SYSTEM = proxykit.SYSTEM * 8  # with a context of 4,096 tokens, a turn is to be less than a twentieth
SETTINGS: dict[str, Any] = {"extra": {"chat_template": TEMPLATE}, "n_ctx": 8192}


class OfChat:
    """Turns of the OpenAI chat API."""

    def body(self, turn: int) -> dict[str, Any]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for i, question in enumerate(QUESTIONS[: turn + 1]):
            messages.append({"role": "user", "content": question})
            if i < turn:
                call = {"id": f"c{i}", "type": "function", "function": {"name": "sky", "arguments": json.dumps(ARGUMENTS)}}
                messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": "rain"})
        tools = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]
        return {"model": "any", "messages": messages, "tools": tools, "max_tokens": 8, "temperature": 0}

    path = "/v1/chat/completions"

    def read(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        content = answer["choices"][0]["message"]["content"]
        return content or "", usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    def sync(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
            return self.read(client.chat.completions.create(**body).model_dump())

    def asynchronous(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")

        async def ask() -> dict[str, Any]:
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
                answer: dict[str, Any] = (await client.chat.completions.create(**body)).model_dump()
                return answer

        return self.read(asyncio.run(ask()))

    def stream(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
            chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        return text, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


class OfMessages:
    """Turns of the Anthropic Messages API."""

    path = "/v1/messages"

    def body(self, turn: int) -> dict[str, Any]:
        messages: list[Any] = []
        result: list[Any] = []
        for i, question in enumerate(QUESTIONS[: turn + 1]):
            messages.append({"role": "user", "content": [*result, {"type": "text", "text": question}]})
            if i < turn:
                call = {"type": "tool_use", "id": f"c{i}", "name": "sky", "input": ARGUMENTS}
                thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
                messages.append({"role": "assistant", "content": [thinking, call]})
                result = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": [{"type": "text", "text": "rain"}]}]
        marked = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": "Be kind."}, marked]
        tools = [{"name": n, "description": d, "input_schema": p} for n, d, p in TOOLS]
        return {"model": "any", "system": system, "messages": messages, "tools": tools, "max_tokens": 8, "temperature": 0}

    def read(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        text = "".join(block.get("text") or block.get("thinking") or "" for block in answer["content"])
        cached = usage["cache_read_input_tokens"]
        return text, cached, cached + usage["input_tokens"]

    def sync(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        anthropic = pytest.importorskip("anthropic")
        with anthropic.Anthropic(base_url=url, api_key="none", timeout=240) as client:
            return self.read(client.messages.create(**rest_of(body)).model_dump())

    def asynchronous(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        anthropic = pytest.importorskip("anthropic")

        async def ask() -> dict[str, Any]:
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=240) as client:
                answer: dict[str, Any] = (await client.messages.create(**rest_of(body))).model_dump()
                return answer

        return self.read(asyncio.run(ask()))

    def stream(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        anthropic = pytest.importorskip("anthropic")
        with (
            anthropic.Anthropic(base_url=url, api_key="none", timeout=240) as client,
            client.messages.stream(**rest_of(body)) as events,
        ):
            return self.read(events.get_final_message().model_dump())


def rest_of(body: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the client: what it does not take itself goes into the extra body."""
    return {**{k: v for k, v in body.items() if k != "temperature"}, "extra_body": {"temperature": 0}}


class OfResponses:
    """Turns of the OpenAI Responses API."""

    path = "/v1/responses"

    def body(self, turn: int) -> dict[str, Any]:
        items: list[Any] = []
        for i, question in enumerate(QUESTIONS[: turn + 1]):
            items.append({"role": "user", "content": question})
            if i < turn:
                text = {"type": "output_text", "text": "I look.", "annotations": []}
                items.append({"type": "message", "role": "assistant", "id": f"m{i}", "status": "completed", "content": [text]})
                call = {"type": "function_call", "call_id": f"c{i}", "name": "sky", "arguments": json.dumps(ARGUMENTS)}
                items += [call, {"type": "function_call_output", "call_id": f"c{i}", "output": "rain"}]
        tools = [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in TOOLS]
        body = {"model": "any", "instructions": SYSTEM, "input": items, "tools": tools}
        return {**body, "max_output_tokens": 8, "temperature": 0}

    def read(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        text = "".join(part.get("text") or "" for part in parts)
        return text, usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]

    def sync(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
            return self.read(client.responses.create(**body).model_dump())

    def asynchronous(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")

        async def ask() -> dict[str, Any]:
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
                answer: dict[str, Any] = (await client.responses.create(**body)).model_dump()
                return answer

        return self.read(asyncio.run(ask()))

    def stream(self, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=240) as client:
            last = list(client.responses.create(**body, stream=True))[-1]
        assert last.type == "response.completed"
        return self.read(last.response.model_dump())


@pytest.mark.parametrize("mode", ["sync", *(pytest.param(m, marks=pytest.mark.slow) for m in ("asynchronous", "stream"))])
@pytest.mark.parametrize("api", [OfChat(), OfMessages(), OfResponses()], ids=["chat", "messages", "responses"])
def test_a_fourth_turn_with_tools_comes_from_the_store_after_a_crash(tmp_path: Path, api: Any, mode: str) -> None:
    with proxykit.both(tmp_path, parallel=2, api_key="", warm_start=False, **SETTINGS) as (server, url):
        for turn in range(3):
            getattr(api, mode)(url, api.body(turn))
            wait_saved(url)
        proxykit.restart(server)
        text, cached, n_prompt = getattr(api, mode)(url, api.body(3))
        assert cached >= 0.95 * n_prompt
        told = stats(url)
        assert (told["failures"], told["token_mismatches"], told["restores_useless"], told["passed"]) == (0, 0, 0, 0)
        assert told["restores"] >= 1
        assert [(s["path"], s["disagreed"]) for s in told["shapes"]] == [(api.path, 0)] * len(told["shapes"])
        assert told["shapes"]
        for slot in range(2):
            server.slot_erase(slot)
        assert getattr(api, mode)(server.url, api.body(3)) == (text, 0, n_prompt)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, str]]:
    with proxykit.both(tmp_path_factory.mktemp("paths"), **SETTINGS) as found:
        yield found


LONG = "In the beginning there was a list of things to do. " * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": LONG}], "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}],
                                  "chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG},
                                               {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."},
                                               {"role": "user", "content": "Why?"}]}),
        ("/v1/messages", {"system": LONG, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/responses", {"input": LONG, "reasoning": {"effort": "low"}}),
        ("/completion", {"prompt": [LONG]}),
        ("/completion", {"prompt": {"prompt_string": "Object: " + LONG}}),
        ("/completions", {"prompt": ["A list: " + LONG, 65, 66, "and so on"]}),
        ("/v1/completions", {"prompt": [65, 66, LONG, 67]}),
    ],
)  # fmt: skip
def test_each_form_of_a_request_comes_from_the_store(pair: tuple[LlamaServer, str], path: str, body: dict[str, Any]) -> None:
    _, url = pair
    body = {"temperature": 0, "n_predict": 4, "max_output_tokens" if "responses" in path else "max_tokens": 4, **body}
    before = stats(url)
    first = post(url + path, body)
    wait_saved(url)
    post(url + "/completion", {"prompt": "Quite another story takes the only slot. " * 3, "n_predict": 2})
    wait_saved(url)
    again = post(url + path, body)
    told = stats(url)
    latest = told["recent"][0]
    # All but the last token.
    assert (latest["path"], latest["cached_tokens"]) == (path, latest["prompt_tokens"] - 1)
    assert latest["source"] == "store"
    assert told["passed"] == before["passed"]
    assert told["token_mismatches"] == 0
    for volatile in ("id", "created", "created_at", "completed_at", "timings", "usage", "tokens_cached", "generation_settings"):
        first.pop(volatile, None)
        again.pop(volatile, None)
    if "output" not in first:
        assert again == first


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"system": LONG, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses/input_tokens", {"input": LONG}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_counting_passes_and_disturbs_no_slot(pair: tuple[LlamaServer, str], path: str, body: dict[str, Any]) -> None:
    server, url = pair
    post(url + "/completion", {"prompt": LONG, "n_predict": 2})
    before = wait_saved(url)
    assert post(url + path, body) == server.request("POST", path, body)
    assert stats(url)["slots"] == before["slots"]


@pytest.fixture(scope="module")
def infill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, str]]:
    """A model with infill tokens: control characters that no text of the tests has."""
    folder = tmp_path_factory.mktemp("infill")
    names = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
    keys = {f"tokenizer.ggml.{name}_token_id": 4 + i for i, name in enumerate(names)}
    path = ggufkit.with_numbers(serverkit.model(), folder / "infill.gguf", keys)
    serverkit.need_server()
    extra = {"cache_ram_mib": 0, "threads": 1, "n_batch": 512}
    with (
        LlamaServer(path, slot_dir=folder / "slots", n_ctx=4096, extra=extra) as server,
        proxykit.proxied(server, folder / "states.kvstore") as url,
    ):
        yield server, url


OTHER = [{"filename": "a.py", "text": "def a():\n    return 1\n" * 9}, {"text": "b = 2\n" * 9}]


@pytest.mark.parametrize("extra", [None, OTHER], ids=["alone", "with other files"])
@pytest.mark.parametrize("long", [False, True], ids=["short", "cut to a batch"])
def test_infill_is_cached_once_its_form_was_seen(infill: tuple[LlamaServer, str], extra: Any, long: bool) -> None:
    _, url = infill
    prefix = "".join(f"x{i} = {i}\n" for i in range(80 if long else 20))
    body = {"input_prefix": prefix, "input_suffix": "\nprint(x)\n", "prompt": "y =", "n_predict": 4, "temperature": 0}
    body |= {} if extra is None else {"input_extra": extra}
    for text in ("", " 1", " 1 +"):
        answer = post(url + "/infill", {**body, "prompt": "y =" + text})
        wait_saved(url)
    post(url + "/completion", {"prompt": "Quite another story takes the only slot. " * 9, "n_predict": 2})
    wait_saved(url)
    again = post(url + "/infill", {**body, "prompt": "y = 1 +"})
    told = stats(url)
    assert again["content"] == answer["content"]
    latest = told["recent"][0]
    assert (latest["source"], latest["cached_tokens"]) == ("store", latest["prompt_tokens"] - 1)
    assert [s for s in told["shapes"] if s["disagreed"]] == []
    assert told["failures"] == 0


def test_a_path_that_the_server_does_not_serve_passes(pair: tuple[LlamaServer, str]) -> None:
    server, url = pair
    post(url + "/completion", {"prompt": LONG, "n_predict": 2})
    before = wait_saved(url)
    body = {"input_prefix": "a", "input_suffix": "b"}
    for _ in range(2):
        answer = httpx.post(url + "/infill", json=body, timeout=240)
        direct = httpx.post(server.url + "/infill", json=body, headers={"Authorization": f"Bearer {server.api_key}"})
        assert (answer.status_code, answer.content) == (501, direct.content)
    told = stats(url)
    assert told["failures"] == before["failures"]
    assert told["passed"] == before["passed"] + 1  # once the refusal is known
    assert told["slots"] == before["slots"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1e15}}]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": ["x"]},
        {"system": [{"type": "text"}], "messages": []},
        {"messages": []},
    ],
)
def test_messages_that_are_not_understood_pass(body: dict[str, Any]) -> None:
    assert prompts.parse("/v1/messages", json.dumps(body).encode()) is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "reasoning", "summary": [], "content": []}]},
        {"input": [{"type": "function_call", "content": ["x"]}]},
        {"input": ["x"]},
    ],
)
def test_responses_that_are_not_understood_pass(body: dict[str, Any]) -> None:
    assert prompts.parse("/v1/responses", json.dumps(body).encode()) is None


def test_a_shape_whose_tokens_are_wrong_is_not_guessed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(data: Any) -> Any:
        """As if the server made another chat of these bodies."""
        chat = chat_bodies.of_messages_api(data)
        return {**chat, "messages": [{"role": "user", "content": "not what the server says"}, *chat["messages"]]}

    monkeypatch.setattr(prompts, "of_messages_api", newer)
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4, "temperature": 0}
    with proxykit.both(tmp_path, **SETTINGS) as (server, url):
        answers = [post(url + "/v1/messages", body)["content"] for _ in range(3)]
        told = stats(url)
        assert (told["requests"], told["passed"], told["passed_by_shape"]) == (1, 2, 2)
        (shape,) = told["shapes"]
        assert shape == {"path": "/v1/messages", "features": ["user"], "agreed": 0, "disagreed": 1}
        metrics = httpx.get(url + "/metrics").text
        assert 'kvstore_request_shapes{trusted="no"} 1' in metrics
        assert "kvstore_passed_by_shape_total 2" in metrics
        # Other shapes are not touched, and the answers are the server's.
        post(url + "/v1/chat/completions", body)
        assert stats(url)["requests"] == 2
        assert answers == [server.request("POST", "/v1/messages", body)["content"]] * 3


def test_the_book_of_shapes_is_bounded_and_forgets_no_shape_that_disagreed() -> None:
    book = shapes.ShapeBook()
    wrong = shapes.Shape("/wrong")
    assert book.record(wrong, agreed=False)
    assert not book.record(wrong, agreed=False)
    for i in range(2 * shapes.MAX_SHAPES):
        book.record(shapes.Shape(f"/{i}"), agreed=True)
    assert len(book.known) == shapes.MAX_SHAPES
    assert not book.trusts(wrong)
    assert book.trusts(shapes.Shape("/new"))
    for i in range(2 * shapes.MAX_SHAPES):
        book.record(shapes.Shape(f"/{i}"), agreed=False)
    assert len(book.known) == shapes.MAX_SHAPES
    # Full of shapes that disagreed: nothing new is guessed.
    assert not book.trusts(shapes.Shape("/new"))


def test_a_shape_names_features_and_never_texts() -> None:
    body = {"messages": [{"role": "user", "content": "secret"}, {"role": "secret", "secret": 1}], "secret": {}, "tools": [{}]}
    shape = shapes.Shape.of("/v1/chat/completions", body)
    assert "secret" not in str(shape)
    assert shape.features == {"user", "other", "tools"}


def test_unpinned_requests_find_their_slot_and_their_conversation(tmp_path: Path) -> None:
    """The Messages API has no field for a slot: with several of them, the server chooses."""
    with proxykit.both(tmp_path, parallel=3, **{**SETTINGS, "n_ctx": 12288}) as (server, url):
        histories: dict[str, list[Any]] = {name: [] for name in ("Anna", "Bert", "Carla", "Dora")}
        for turn in range(3):
            for name, messages in histories.items():
                messages.append({"role": "user", "content": f"I am {name}, turn {turn}. " + LONG})
                body = {"system": f"{name}: " + LONG, "messages": messages, "max_tokens": 4, "temperature": 0}
                answer = post(url + "/v1/messages", body)
                messages.append({"role": "assistant", "content": answer["content"]})
                usage = answer["usage"]
                cached, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
                # All that was computed in earlier turns.
                assert not turn or cached >= 0.9 * turn / (turn + 1) * (cached + computed)
                wait_saved(url)
        told = stats(url)
        assert (told["failures"], told["restores_useless"], told["passed"], told["token_mismatches"]) == (0, 0, 0, 0)
        held = {report["id"]: report.get("n_prompt_tokens") for report in server.slots()}
        assert {slot["id"]: slot["tokens"] for slot in told["slots"] if slot["tokens"]}.items() <= held.items()
