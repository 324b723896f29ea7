"""What a request asks the model for: whether its state can be cached, and the tokens of its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...types import Tokens

CHAT_PATHS = ("/v1/chat/completions", "/chat/completions")
COMPLETION_PATHS = ("/completion", "/completions", "/v1/completions")
GENERATES = (*CHAT_PATHS, *COMPLETION_PATHS)
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
    """A request whose state can be cached. `text` and `tokens` are filled in as they become known."""

    kind: Literal["chat", "completion"]
    body: bytes
    data: dict[str, Any]
    id_slot: int | None = None  # the slot that the client asks for
    text: str | None = None
    tokens: Tokens | None = None
    spliced: bool = False
    puts_failed: int = 0

    @property
    def messages(self) -> list[Any]:
        return list(self.data["messages"]) if self.kind == "chat" else []

    @property
    def excerpt(self) -> str:
        """The start of the first user message."""
        for message in self.messages:
            if message.get("role") == "user":
                return text_of(message)[:500]
        return "" if self.kind == "chat" or self.text is None else self.text[:500]

    def shape(self) -> dict[str, Any]:
        """All fields besides the messages that decide the prompt."""
        return {name: value for name, value in self.data.items() if name not in _SAMPLING}

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
    if path in CHAT_PATHS:
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages or not all(_is_text(m) for m in messages):
            return None
        return Prompt("chat", body, data, wanted)
    prompt = data.get("prompt")
    if isinstance(prompt, str) and prompt:
        return Prompt("completion", body, data, wanted, text=prompt)
    if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < 1 << 31 for t in prompt):
        return Prompt("completion", body, data, wanted, tokens=np.array(prompt, np.int32))
    return None


def continues(earlier: list[Any], messages: list[Any]) -> int | None:
    """The characters that a chat adds to an earlier chat and its answer; None where it does not continue that chat."""
    n = len(earlier)
    if len(messages) <= n or messages[:n] != earlier or messages[n].get("role") != "assistant":
        return None
    return sum(len(json.dumps(m)) for m in messages[n + 1 :])
