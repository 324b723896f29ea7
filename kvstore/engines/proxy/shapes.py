"""The shapes of requests: their path and the features that decide how the server makes the prompt.

Where the tokens that the proxy found for a prompt were not those that the server computed, requests of that shape pass
without the cache from then on: a wrong guess costs a restore that is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SHAPES = 256
MAX_SHAPES_SHOWN = 50
# The fields that may decide a prompt; the names of others are the client's own, and not kept.
_FIELDS = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "functions", "grammar",
    "input_extra", "instructions", "json_schema", "parallel_tool_calls", "reasoning", "reasoning_effort",
    "reasoning_format", "response_format", "system", "text", "thinking", "tool_choice", "tools",
)  # fmt: skip
_PARTS = (
    "text", "input_text", "output_text", "thinking", "redacted_thinking", "tool_use", "tool_result", "function_call",
    "function_call_output", "reasoning", "message",
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Shape:
    path: str
    features: frozenset[str] = frozenset()

    @classmethod
    def of(cls, path: str, data: Mapping[str, Any]) -> Shape:
        """The shape of a request that was understood."""
        found = {name for name in _FIELDS if data.get(name) is not None}
        if path.startswith(("/v1/messages", "/v1/responses", "/responses")) or "messages" in data:
            found |= set(_of_turns(data))
        for name in ("prompt", "system", "input"):
            if name in data:
                found.add(f"{name}:{_kind(data[name])}")
        return cls(path, frozenset(found))

    def __str__(self) -> str:
        return " ".join([self.path, *sorted(self.features)])


def _kind(value: Any) -> str:
    if isinstance(value, list):
        kinds = {"text" if isinstance(each, str) else "object" if isinstance(each, dict) else "token" for each in value}
        return f"list of {'+'.join(sorted(kinds)) or 'nothing'}"
    return "text" if isinstance(value, str) else "object"


def _of_turns(data: Mapping[str, Any]) -> Iterator[str]:
    turns = data.get("messages", data.get("input"))
    if not isinstance(turns, list):
        return
    turns = [turn for turn in turns if isinstance(turn, dict)]
    for turn in turns:
        role, kind = turn.get("role"), turn.get("type")
        name = role if role in _ROLES else kind if kind in _PARTS else "other"
        yield name
        yield from (f"{name}:{field}" for field in ("tool_calls", "reasoning_content", "name") if turn.get(field))
        content = turn.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            yield f"{name}:{part.get('type') if part.get('type') in _PARTS else 'other'}"
            if part.get("type") == "tool_use" and _has_floats(part.get("input")):
                yield "tool_use:float"
    if turns and turns[-1].get("role") == "assistant":
        yield "ends with assistant"


def _has_floats(value: Any) -> bool:
    level = [value]
    while level:
        if any(isinstance(node, float) for node in level):
            return True
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return False


@dataclass
class Verdicts:
    """How often the tokens found for prompts of a shape were those of the server."""

    agreed: int = 0
    disagreed: int = 0


@dataclass
class ShapeBook:
    """What is known of the shapes seen. The shapes that agree are forgotten first; if only others are left, shapes that
    are not in the book are not trusted."""

    known: OrderedDict[Shape, Verdicts] = field(default_factory=OrderedDict)

    def trusts(self, shape: Shape) -> bool:
        verdicts = self.known.get(shape)
        if verdicts is not None:
            return not verdicts.disagreed
        return len(self.known) < MAX_SHAPES or self._oldest_agreeing() is not None

    def record(self, shape: Shape, *, agreed: bool) -> bool:
        """Records a comparison; whether it is the first of the shape that did not agree."""
        verdicts = self.known.get(shape)
        if verdicts is None:
            if len(self.known) >= MAX_SHAPES:
                oldest = self._oldest_agreeing()
                if oldest is None:
                    return False
                del self.known[oldest]
            verdicts = self.known[shape] = Verdicts()
        self.known.move_to_end(shape)
        if agreed:
            verdicts.agreed += 1
        else:
            verdicts.disagreed += 1
        return verdicts.disagreed == 1 and not agreed

    def _oldest_agreeing(self) -> Shape | None:
        return next((shape for shape, verdicts in self.known.items() if not verdicts.disagreed), None)

    def reset(self) -> None:
        """The server has another model."""
        self.known.clear()

    @property
    def n_agreeing(self) -> int:
        return len(self.known) - self.n_distrusted

    @property
    def n_distrusted(self) -> int:
        return sum(1 for verdicts in self.known.values() if verdicts.disagreed)

    def as_list(self) -> list[dict[str, Any]]:
        """JSON-ready: the shapes that disagreed first, then the latest."""
        latest = list(reversed(self.known.items()))
        latest.sort(key=lambda item: not item[1].disagreed)
        return [
            {"path": shape.path, "features": sorted(shape.features), "agreed": v.agreed, "disagreed": v.disagreed}
            for shape, v in latest[:MAX_SHAPES_SHOWN]
        ]
