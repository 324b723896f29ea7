"""The chat that llama-server makes of a request of the Messages API or the Responses API, before its template is applied.

llama-server answers these two by turning them into a chat request, and only tells the number of the prompt's tokens. What
is not sure to become the chat below raises `NotUnderstood`; such a request passes without the cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
# Claude Code stamps each request: llama-server overwrites the five characters after the name, so that prompts stay alike.
_STAMPED, _STAMP, _STAMP_CHARS = "x-anthropic-billing-header:", "cch=", 5
# From here on C++ and Python write floats in different ways.
_LARGE = 1e15


class NotUnderstood(ValueError):
    """The proxy does not know which prompt the server would make of this."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise NotUnderstood(what)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise NotUnderstood(f"{what} is not a text")
    return value


def _objects(value: Any, what: str) -> list[Json]:
    _need(isinstance(value, list) and all(isinstance(each, dict) for each in value), f"{what} is not a list of objects")
    return list(value)


def of_messages_api(data: Mapping[str, Any]) -> Json:
    """The chat of a body of /v1/messages. Raises NotUnderstood."""
    messages: list[Json] = []
    if data.get("system") is not None:
        messages.append({"role": "system", "content": _system(data["system"])})
    for message in _objects(data.get("messages"), "messages"):
        messages += _turn(message)
    chat: Json = {"messages": messages}
    if "tools" in data:
        chat["tools"] = [_tool(tool) for tool in _objects(data["tools"], "tools")]
    choice = data.get("tool_choice")
    if isinstance(choice, dict):
        wanted = {"auto": "auto", "any": "required", "tool": "required"}.get(str(choice.get("type")))
        if wanted is not None:
            chat["tool_choice"] = wanted
    if "chat_template_kwargs" in data:
        chat["chat_template_kwargs"] = data["chat_template_kwargs"]
    thinking = data.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = thinking.get("budget_tokens", 10000)
    return chat


def _system(system: Any) -> str:
    if isinstance(system, str):
        return _unstamped(system)
    blocks = _objects(system, "system")
    return "".join(_unstamped(_text(each.get("text"), "text")) for each in blocks if each.get("type") == "text")


def _unstamped(text: str) -> str:
    at = text.find(_STAMP, len(_STAMPED)) + len(_STAMP) if text.startswith(_STAMPED) else 0
    end = at + _STAMP_CHARS
    if at < len(_STAMPED):
        return text
    _need(text[at:end].isascii(), "the stamp is not one")  # the server counts bytes
    if not text[end:].startswith(";"):
        return text
    return text[:at] + "f" * _STAMP_CHARS + text[end:]


def _turn(message: Json) -> list[Json]:
    """The messages of a chat that one message becomes."""
    if "content" not in message:
        return [] if message.get("role") == "assistant" else [message]
    content = message["content"]
    if isinstance(content, str):
        return [message]
    role = _text(message.get("role"), "role")
    texts: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    reasoning = ""
    for block in _objects(content, "content"):
        match block.get("type"):
            case "text":
                _text(block.get("text"), "text")
                texts.append(block)
            case "thinking":
                reasoning += _text(block.get("thinking"), "thinking")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                results.append(_result(block))
            case kind:
                raise NotUnderstood(f"a block of type {kind!r}")
    turn: list[Json] = []
    if texts or calls or reasoning:
        turn.append({"role": role, "content": texts or ""})
        if calls:
            turn[0]["tool_calls"] = calls
        if reasoning:
            turn[0]["reasoning_content"] = reasoning
    return turn + results


def _call(block: Json) -> Json:
    arguments = block.get("input", {})
    _need(isinstance(arguments, dict), "input is not an object")
    function = {"name": _text(block.get("name"), "name"), "arguments": compact(arguments)}
    return {"id": _text(block.get("id"), "id"), "type": "function", "function": function}


def _result(block: Json) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        parts = _objects(content, "content")
        _need(all(part.get("type") == "text" for part in parts), "a tool result that is more than text")
        content = "".join(_text(part.get("text"), "text") for part in parts)
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": _text(block.get("tool_use_id"), "tool_use_id"), "content": content}


def _tool(tool: Json) -> Json:
    function = {
        "name": _text(tool.get("name", ""), "name"),
        "description": _text(tool.get("description", ""), "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def compact(value: Any) -> str:
    """JSON as llama-server writes it: no spaces, no escapes that are not needed. Raises NotUnderstood for numbers that it
    may write in another way."""
    level = [value]
    while level:
        inner: list[Any] = []
        for node in level:
            if isinstance(node, (dict, list)):
                inner += node.values() if isinstance(node, dict) else node
            elif isinstance(node, float):
                _need(abs(node) < _LARGE, f"the number {node}")
            elif isinstance(node, int):
                _need(-(1 << 63) <= node < 1 << 64, f"the number {node}")
        level = inner
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def of_responses_api(data: Mapping[str, Any]) -> Json:
    """The chat of a body of /v1/responses: all fields that have no other form in a chat stay. Raises NotUnderstood."""
    _need(not data.get("previous_response_id"), "previous_response_id")
    changed = ("input", "instructions", "tools", "max_output_tokens", "reasoning")
    chat = {name: value for name, value in data.items() if name not in changed}
    messages: list[Json] = []
    if "instructions" in data:
        instructions = data["instructions"]
        messages.append({"role": "system", "content": "" if instructions is None else _text(instructions, "instructions")})
    if isinstance(data.get("input"), str):
        messages.append({"role": "user", "content": data["input"]})
    else:
        for item in _objects(data.get("input"), "input"):
            _add_item(messages, item)
    chat["messages"] = messages
    if "tools" in data:
        functions = [dict(tool) for tool in _objects(data["tools"], "tools") if tool.get("type") == "function"]
        for function in functions:
            del function["type"]
            function.setdefault("strict", True)
        if functions:
            chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if "max_output_tokens" in data:
        chat["max_tokens"] = data["max_output_tokens"]
    if "reasoning" in data:
        reasoning = data["reasoning"]
        _need(isinstance(reasoning, dict), "reasoning is not an object")
        if "effort" in reasoning:
            chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _add_item(messages: list[Json], item: Json) -> None:
    """Adds an input item; items of the assistant that follow each other become one message."""
    kind, role = item.get("type"), item.get("role")
    if role in ("user", "system", "developer"):
        rest = {name: value for name, value in item.items() if name not in ("type", "status")}
        messages.append({**rest, "content": _parts(item.get("content"), ("input_text",))})
    elif role == "assistant" and kind == "message":
        content = _parts(item.get("content"), ("output_text", "input_text"))
        earlier = _assistant(messages)
        if earlier is None:
            rest = {name: value for name, value in item.items() if name not in ("type", "status")}
            messages.append({**rest, "content": content})
        else:
            known = earlier.get("content")
            earlier["content"] = [*(known if isinstance(known, list) else ()), *content]
    elif kind == "function_call":
        names = ("arguments", "name")
        function = {name: _text(item.get(name), name) for name in names}
        call = {"function": function, "id": _text(item.get("call_id"), "call_id"), "type": "function"}
        earlier = _assistant(messages)
        if earlier is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            known = earlier.get("tool_calls")
            earlier["tool_calls"] = [*(known if isinstance(known, list) else ()), call]
    elif kind == "function_call_output":
        output = item.get("output")
        said = output if isinstance(output, str) else _parts(output, ("input_text",))
        messages.append({"content": said, "role": "tool", "tool_call_id": _text(item.get("call_id"), "call_id")})
    elif kind == "reasoning":
        _need(isinstance(item.get("summary"), list), "a reasoning item without a summary")
        content = _objects(item.get("content"), "content")
        _need(bool(content), "a reasoning item without content")
        text = _text(content[0].get("text"), "text")
        earlier = _assistant(messages)
        if earlier is None:
            messages.append({"role": "assistant", "content": [], "reasoning_content": text})
        else:
            earlier["reasoning_content"] = text
    else:
        raise NotUnderstood(f"an item of type {kind!r} and role {role!r}")


def _assistant(messages: list[Json]) -> Json | None:
    return messages[-1] if messages and messages[-1].get("role") == "assistant" else None


def _parts(content: Any, kinds: tuple[str, ...]) -> list[Json]:
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    parts = _objects(content, "content")
    _need(all(part.get("type") in kinds for part in parts), "content that is more than text")
    return [{"text": _text(part.get("text"), "text"), "type": "text"} for part in parts]
