"""The tokens of prompts, as the server computes them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...types import Tokens
from ...util.buffers import common_prefix_length
from .backend import Backend
from .prompt import Prompt

# SmolLM2's tokenizer takes 5.6 us per token: below this length, tokenizing a whole prompt takes less than 3 ms.
SPLICE_CHARS = 2048
# An answer that starts with a line break may merge with the one before it: one wrong join is not the rule.
MAX_BAD_SPLICES = 3
CACHED_TEXTS, CACHED_CHARS = 64, 8 << 20


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
