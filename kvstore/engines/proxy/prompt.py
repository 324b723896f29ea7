"""What a request asks the model for: whether its state can be cached, and the tokens of its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np

from ...types import Tokens
from .chat_bodies import NotUnderstood, of_messages_api, of_responses_api
from .infill import Pieces
from .shapes import Shape

CHAT_PATHS = ("/v1/chat/completions", "/chat/completions")
MESSAGES_PATHS = ("/v1/messages",)
RESPONSES_PATHS = ("/v1/responses", "/responses")
COMPLETION_PATHS = ("/completion", "/completions", "/v1/completions")
INFILL_PATHS = ("/infill",)
GENERATES = (*CHAT_PATHS, *MESSAGES_PATHS, *RESPONSES_PATHS, *COMPLETION_PATHS, *INFILL_PATHS)
# These fields do not change the prompt that the chat template makes.
_SAMPLING = frozenset(
    {
        "messages", "stream", "stream_options", "temperature", "top_p", "top_k",
        "min_p", "max_tokens", "max_completion_tokens", "n_predict", "seed", "id_slot",
        "cache_prompt", "user", "metadata", "store", "timings_per_token", "return_progress",
        "return_tokens", "stop", "model", "presence_penalty", "frequency_penalty", "repeat_penalty",
        "logprobs", "top_logprobs", "n_probs", "logit_bias", "n",
    }
)  # fmt: skip
# Bodies that nest deeper are not cached: comparing and writing them would raise a RecursionError.
MAX_DEPTH = 100


@dataclass(eq=False)
class Prompt:
    """A request whose state can be cached. `text` and `tokens` are filled in as they become known.

    chat: the chat that the server makes of the request. mixed: texts and tokens that make up the prompt. given: whether
    the tokens are the client's own. pinned: whether the server takes the slot that a request names.
    """

    kind: Literal["chat", "completion", "infill"]
    body: bytes
    data: dict[str, Any]
    shape: Shape
    id_slot: int | None = None  # the slot that the client asks for
    chat: dict[str, Any] | None = None
    text: str | None = None
    mixed: list[str | int] | None = None
    tokens: Tokens | None = None
    pieces: Pieces | None = None
    given: bool = False
    pinned: bool = True
    spliced: bool = False
    disagrees: bool = False  # our tokens were not the server's
    puts_failed: int = 0

    @property
    def messages(self) -> list[Any]:
        return [] if self.chat is None else list(self.chat["messages"])

    @property
    def template_body(self) -> Mapping[str, Any] | bytes:
        """The body that gives the text of the prompt where the chat template is applied to it."""
        assert self.chat is not None
        return self.body if self.chat is self.data else self.chat

    @property
    def excerpt(self) -> str:
        """The start of the first user message."""
        for message in self.messages:
            if message.get("role") == "user":
                return text_of(message)[:500]
        if self.kind == "infill":
            return str(self.data["input_prefix"])[:500]
        if self.mixed is not None:
            return "".join(each for each in self.mixed if isinstance(each, str))[:500]
        return "" if self.kind == "chat" or self.text is None else self.text[:500]

    def template_fields(self) -> dict[str, Any]:
        """All fields besides the messages that decide the text that the template gives."""
        return {name: value for name, value in (self.chat or {}).items() if name not in _SAMPLING}

    def for_slot(self, id: int, *, plain: bool = False) -> bytes:
        """The client's body with the slot added, otherwise byte for byte as it came. `plain` turns --cache-reuse off for
        this request: a chunk that the server moves differs from the same chunk computed in its place."""
        more = b'"n_cache_reuse":0,' if plain and "n_cache_reuse" not in self.data else b""
        body = self.body
        if self.id_slot is None:
            if "id_slot" in self.data:  # of two equal keys the server takes the last
                end = body.rindex(b"}")
                body = body[:end] + b',"id_slot":%d' % id + body[end:]
            else:
                more = b'"id_slot":%d,' % id + more
        at = body.index(b"{") + 1
        return body[:at] + more + body[at:] if more else body


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _is_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _deeper(data: Any, levels: int) -> bool:
    level = [data]
    for _ in range(levels):
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in inner for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _understood(body: bytes) -> dict[str, Any] | None:
    """The object in a body, if Python reads it as the server does. The server accepts some bodies that Python does not
    (any depth, a byte order mark), and reports what is wrong with the others."""
    try:
        # Decoded first: json would also read bytes as UTF-16.
        data = json.loads(body.decode(), parse_constant=_refuse)
        if b"\\u" in body:
            # Fails on half a surrogate pair, which the server refuses.
            json.dumps(data, ensure_ascii=False).encode()
        if not isinstance(data, dict):
            return None
        deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper(data, MAX_DEPTH)
    except (ValueError, RecursionError):
        return None
    return None if deep else data


def parse(path: str, body: bytes) -> Prompt | None:
    """The request, or None where it must pass without the cache: it has several prompts or answers, images or audio, its
    own adapters, or chunks to move, it does not want to be cached, or it is not understood."""
    data = _understood(body)
    if data is None:
        return None
    if data.get("cache_prompt", True) is not True or data.get("lora") or data.get("n_cache_reuse"):
        return None
    if any(data.get(name, 1) not in (1, None) for name in ("n", "n_cmpl")):
        return None
    id_slot = data.get("id_slot", -1)
    if not isinstance(id_slot, int) or isinstance(id_slot, bool):
        return None
    wanted = id_slot if id_slot >= 0 else None
    try:
        return _prompt(path, body, data, wanted)
    except NotUnderstood:
        return None


def _prompt(path: str, body: bytes, data: dict[str, Any], id_slot: int | None) -> Prompt | None:
    if path in MESSAGES_PATHS:
        # The server hears nothing of a slot here, and chooses one by itself.
        chat = of_messages_api(data)
        return Prompt("chat", body, data, Shape.of(path, data), chat=chat, pinned=False) if _is_chat(chat) else None
    if path in RESPONSES_PATHS:
        chat = of_responses_api(data)
        return Prompt("chat", body, data, Shape.of(path, data), id_slot, chat=chat) if _is_chat(chat) else None
    if path in CHAT_PATHS:
        return Prompt("chat", body, data, Shape.of(path, data), id_slot, chat=data) if _is_chat(data) else None
    if path in INFILL_PATHS:
        return Prompt("infill", body, data, Shape.of(path, data), id_slot) if _is_infill(data) else None
    return _completion(path, body, data, id_slot)


def _is_chat(chat: Mapping[str, Any]) -> bool:
    messages = chat.get("messages")
    return isinstance(messages, list) and bool(messages) and all(_is_text(m) for m in messages)


def _is_infill(data: Mapping[str, Any]) -> bool:
    texts = (data.get("input_prefix"), data.get("input_suffix"), data.get("prompt", ""))
    extra = data.get("input_extra", [])
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(extra, list)
        and all(
            isinstance(each, dict) and isinstance(each.get("text"), str) and isinstance(each.get("filename", ""), str)
            for each in extra
        )
    )


def _completion(path: str, body: bytes, data: dict[str, Any], id_slot: int | None) -> Prompt | None:
    prompt = data.get("prompt")
    while isinstance(prompt, list) and len(prompt) == 1 and not _is_token(prompt[0]):
        prompt = prompt[0]  # a list of one prompt
    if isinstance(prompt, dict) and prompt.keys() == {"prompt_string"}:
        prompt = prompt["prompt_string"]
    shape = Shape.of(path, data)
    if isinstance(prompt, str) and prompt:
        return Prompt("completion", body, data, shape, id_slot, text=prompt)
    if isinstance(prompt, list) and prompt and all(_is_token(each) for each in prompt):
        return Prompt("completion", body, data, shape, id_slot, tokens=np.array(prompt, np.int32), given=True)
    if _is_mixed(prompt):
        return Prompt("completion", body, data, shape, id_slot, mixed=list(prompt))
    return None


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_mixed(prompt: Any) -> TypeGuard[list[str | int]]:
    return (
        isinstance(prompt, list)
        and all(isinstance(each, str) or _is_token(each) for each in prompt)
        and {isinstance(each, str) for each in prompt} == {True, False}
    )


def continues(earlier: list[Any], messages: list[Any]) -> int | None:
    """The characters that a chat adds to an earlier chat and its answer; None where it does not continue that chat."""
    n = len(earlier)
    if len(messages) <= n or messages[:n] != earlier or messages[n].get("role") != "assistant":
        return None
    return sum(len(json.dumps(m)) for m in messages[n + 1 :])
