"""The tokens of prompts, as the server computes them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...types import Tokens
from ...util.buffers import common_prefix_length
from .backend import Backend
from .infill import InfillFrame, Pieces
from .prompt import Prompt
from .shapes import ShapeBook

log = logging.getLogger("kvstore.proxy")

# SmolLM2's tokenizer takes 5.6 us per token: below this length, tokenizing a whole prompt takes less than 3 ms.
SPLICE_CHARS = 2048
# An answer that starts with a line break may merge with the one before it: one wrong join is not the rule.
MAX_BAD_SPLICES = 3
CACHED_TEXTS, CACHED_CHARS = 64, 8 << 20
CACHED_PIECES = 512
INFILL_FILE = "tmp"  # the server's name for a file without one
MAX_EXCUSES = 8


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
    """Finds the tokens of prompts, and learns from those that the server computed.

    Of a text that begins with a known text, only the rest is tokenized. Where the server tokenizes the whole differently,
    the tokens are right up to the join; `reconcile` ends the practice where that happens often.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.shapes = ShapeBook()
        self.mismatches = 0
        self.reset()

    def reset(self) -> None:
        """The server has another model."""
        self.known = KnownTexts()
        self.bad_splices = 0
        self.add_special = True
        self.frame = InfillFrame()
        self.excuses = 0
        self._pieces: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()
        self.shapes.reset()

    async def template(self, prompt: Prompt) -> str:
        return await self._backend.apply_template(prompt.template_body)

    async def tokenize(self, text: str, *, add_special: bool) -> Tokens:
        return await self._backend.tokenize(text, add_special=add_special)

    async def fill(self, prompt: Prompt, n_ctx: int = 0) -> None:
        """Finds the tokens of a prompt whose text is known, or of one that has no text. What the server makes of an
        infill request may not be known yet: then they stay unknown."""
        if prompt.kind == "infill":
            frame = self.frame
            prompt.pieces = await self._infill(prompt.data)
            prompt.tokens = frame.predict(prompt.pieces, n_ctx)
        elif prompt.mixed is not None:
            prompt.tokens = await self._backend.tokenize(prompt.mixed, add_special=self.add_special)
        else:
            await self._fill_text(prompt)

    async def _fill_text(self, prompt: Prompt) -> None:
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

    async def _infill(self, data: Mapping[str, Any]) -> Pieces:
        extra = data.get("input_extra") or []
        texts = [data["input_prefix"], data["input_suffix"]]
        for each in extra:
            texts += [each.get("filename", INFILL_FILE) + "\n", each["text"]]
        wanted = [(data.get("prompt", ""), True), *((text, False) for text in texts)]
        prompt, prefix, suffix, *rest = await asyncio.gather(*(self._piece(*each) for each in wanted))
        return Pieces(prefix, prompt, suffix, list(zip(rest[::2], rest[1::2], strict=True)))

    async def _piece(self, text: str, parse_special: bool) -> list[int]:
        if not text:
            return []
        pieces, key = self._pieces, (text, parse_special)
        found = pieces.get(key)
        if found is None:
            tokens = await self._backend.tokenize(text, add_special=False, parse_special=parse_special)
            found = pieces[key] = tokens.tolist()
            while len(pieces) > CACHED_PIECES:
                pieces.popitem(last=False)
        return found

    def counted(self, prompt: Prompt, n_prompt: int) -> None:
        """Compares the number of our tokens of a prompt with the server's, before the tokens themselves can be seen."""
        if prompt.tokens is None or prompt.given or prompt.kind == "infill" or prompt.spliced:
            return
        if abs(prompt.tokens.shape[0] - n_prompt) > 1:  # a start token more or less: `reconcile` learns that
            self._disagrees(prompt)

    def reconcile(self, prompt: Prompt, tokens: Tokens, n_prompt: int) -> bool:
        """Compares our tokens of a prompt with those in its slot after the request, of which n_prompt were the prompt;
        whether ours were right."""
        seen = tokens[:n_prompt]
        if prompt.tokens is None:
            if prompt.text is not None:
                self.known.remember(prompt.text, seen)
            if prompt.pieces is not None:
                self.frame.learn(prompt.pieces, seen.tolist())
            return True
        if prompt.tokens.shape[0] == n_prompt and common_prefix_length(prompt.tokens, tokens) >= seen.shape[0]:
            if not prompt.given:
                self.shapes.record(prompt.shape, agreed=True)
            return True
        self.mismatches += 1
        if prompt.spliced:
            self.bad_splices += 1
        elif not self._excused(prompt, tokens, n_prompt):
            self._disagrees(prompt)
        self.known = KnownTexts()
        return False

    def _excused(self, prompt: Prompt, tokens: Tokens, n_prompt: int) -> bool:
        """Whether something was learned that explains the difference; each may be learned a few times, not for ever."""
        assert prompt.tokens is not None
        if self.excuses >= MAX_EXCUSES:
            return False
        if prompt.pieces is not None:
            learned = self.frame.learn(prompt.pieces, tokens[:n_prompt].tolist())
        else:
            # Either the tokenizer or the server adds a start token, but not both.
            shifted = ((prompt.tokens[1:], tokens), (prompt.tokens, tokens[1:]))
            learned = max(common_prefix_length(*each) for each in shifted) > 1
            self.add_special ^= learned
        self.excuses += learned
        return learned

    def _disagrees(self, prompt: Prompt) -> None:
        if not prompt.disagrees and self.shapes.record(prompt.shape, agreed=False):
            log.warning("requests of this shape pass from now on, their tokens are not known: %s", prompt.shape)
        prompt.disagrees = True


async def block_lengths(tokenizer: Tokenizer, backend: Backend, prompt: Prompt, tokens: Tokens) -> tuple[int, int]:
    """The number of tokens of the system block, and the position of the first user turn; 0 where there is none.

    The system block is the beginning that the prompt shares with the prompt of the system messages alone, or of these and
    an empty question where the template requires one.
    """
    messages = prompt.messages
    n = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    if not messages:
        return 0, 0
    fields = prompt.template_fields()
    block: str | None = None
    for probe in (messages[:n], [*messages[:n], {"role": "user", "content": ""}]):
        if not probe:
            continue
        try:
            block = await backend.apply_template({**fields, "messages": probe, "add_generation_prompt": False})
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
