"""What a request asks the model for: whether its state can be cached, and the tokens of its prompt."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...types import Tokens
from ...util.buffers import common_prefix_length
from .backend import Backend

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
# SmolLM2's tokenizer takes 5.6 us per token: below this length, tokenizing a whole prompt takes less than 3 ms.
SPLICE_CHARS = 2048
# An answer that starts with a line break may merge with the one before it: one wrong join is not the rule.
MAX_BAD_SPLICES = 3
# Bodies that nest deeper are not cached: comparing and writing them would raise a RecursionError.
MAX_DEPTH = 100
CACHED_TEXTS, CACHED_CHARS = 64, 8 << 20


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


class KnownTexts:
    """The tokens of the texts that were tokenized last."""

    def __init__(self) -> None:
        self.texts: OrderedDict[str, Tokens] = OrderedDict()
        self._chars = 0

    def remember(self, text: str, tokens: Tokens) -> None:
        if text in self.texts:
            return
        self.texts[text] = tokens
        self._chars += len(text)
        while len(self.texts) > CACHED_TEXTS or self._chars > CACHED_CHARS:
            self._chars -= len(self.texts.popitem(last=False)[0])

    def longest(self, text: str, *, splices: bool) -> str | None:
        """The longest known text that begins the text; with `splices` also a shorter one of some length."""
        found: str | None = text
        if text not in self.texts:
            begins = (t for t in self.texts if splices and len(t) >= SPLICE_CHARS and text.startswith(t))
            found = max(begins, key=len, default=None)
        if found is not None:
            self.texts.move_to_end(found)
        return found


class Tokenizer:
    """The tokens of prompts, as the server computes them.

    Of a text that begins with a known text, only the rest is tokenized. Where the server tokenizes the whole differently,
    the tokens are right up to the join; `reconcile` ends the practice where that happens often.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.mismatches = 0
        self.reset()

    def reset(self) -> None:
        """The server has another model."""
        self.known = KnownTexts()
        self.bad_splices = 0
        self.add_special = True

    async def template(self, prompt: Prompt) -> str:
        return await self._backend.apply_template(prompt.body)

    async def tokenize(self, text: str, *, add_special: bool) -> Tokens:
        return await self._backend.tokenize(text, add_special=add_special)

    async def fill(self, prompt: Prompt) -> Tokens:
        """The tokens of a prompt whose text is known."""
        assert prompt.text is not None
        known = self.known  # the server may get another model meanwhile
        start = known.longest(prompt.text, splices=self.bad_splices < MAX_BAD_SPLICES)
        if start is None:
            prompt.tokens = await self.tokenize(prompt.text, add_special=self.add_special)
        else:
            begin, rest = known.texts[start], prompt.text[len(start) :]
            prompt.spliced = bool(rest)
            tail = await self.tokenize(rest, add_special=False) if rest else np.empty(0, np.int32)
            prompt.tokens = np.concatenate([begin, tail])
        known.remember(prompt.text, prompt.tokens)
        return prompt.tokens

    def reconcile(self, prompt: Prompt, tokens: Tokens, n_prompt: int) -> bool:
        """Compares our tokens of a prompt with those in its slot after the request, of which n_prompt were the prompt;
        whether ours were right."""
        if prompt.tokens is None:
            if prompt.text is not None:
                self.known.remember(prompt.text, tokens[:n_prompt])
            return True
        if prompt.tokens.shape[0] == n_prompt and common_prefix_length(prompt.tokens, tokens) >= min(n_prompt, tokens.shape[0]):
            return True
        self.mismatches += 1
        if prompt.spliced:
            self.bad_splices += 1
        elif prompt.text is not None and max(
            common_prefix_length(prompt.tokens[1:], tokens), common_prefix_length(prompt.tokens, tokens[1:])
        ) > 1:
            # Either the tokenizer or the server adds a start token, but not both.
            self.add_special = not self.add_special
        self.known = KnownTexts()
        return False


async def block_lengths(tokenizer: Tokenizer, backend: Backend, prompt: Prompt, tokens: Tokens) -> tuple[int, int]:
    """The number of tokens of the system block, and the position of the first user turn; 0 where there is none.

    The system block is the beginning that the prompt shares with the prompt of the system messages alone, or of these and
    an empty question where the template requires one.
    """
    messages = prompt.messages
    n = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    if not messages:
        return 0, 0
    shape = prompt.shape()
    block: str | None = None
    for probe in (messages[:n], [*messages[:n], {"role": "user", "content": ""}]):
        if not probe:
            continue
        try:
            block = await backend.apply_template({**shape, "messages": probe, "add_generation_prompt": False})
        except Exception as error:
            # Many templates refuse a chat without a user message.
            if not hasattr(error, "status"):
                raise
            continue
        break
    if not block:
        return 0, 0
    known = tokenizer.known
    block_tokens = await tokenizer.tokenize(block, add_special=tokenizer.add_special)
    shared = common_prefix_length(block_tokens, tokens)
    if not n:
        return 0, shared
    if shared == block_tokens.shape[0]:
        known.remember(block, block_tokens)
    return shared, shared
