"""llama-server as a `Backend`: its paths, its answers, and the slot files that pass between it and the proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ... import slotfile
from ...types import Tokens
from . import fingerprint
from .backend import REQUEST_SECONDS, Identity, SlotReport, Status, Timings
from .slot_files import SlotFiles
from .slot_memory import SlotMemory
from .transfers import Transfers
from .upstream import UpstreamError

PROBE_SECONDS = 30.0
_TIMINGS = re.compile(rb'"timings":(\{[^{}]*\})')
_USAGE = re.compile(rb'"usage":(\{(?:[^{}]|\{[^{}]*\})*\})')
_MESSAGE_START = re.compile(rb"^event: message_start\n", re.MULTILINE)
_TAINTS = (b'"lora"', b'"n_cache_reuse"')
_SLOT_ACTION = re.compile(r"/slots/(\d+)")
_READS_ONLY = (
    "/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens", "/responses/input_tokens", "/v1/responses/input_tokens",
)  # fmt: skip
# llama-server answers these without a key: its health, and the files of its page.
_OPEN = re.compile(
    rb"/(?:(?:v1/)?health|index\.html|build\.json|sw\.js|manifest\.webmanifest|[\w-]+\.(?:ico|svg|png)"
    rb"|(?:_app|recommended-mcp)/(?:[\w-]+[./])*[\w-]+)?"
)


class Client(Protocol):
    """The part of `Upstream` that a backend needs."""

    @property
    def url(self) -> str: ...

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, *, timeout: float = REQUEST_SECONDS
    ) -> Any: ...

    async def text(self, path: str, headers: Mapping[str, str]) -> str: ...


class LlamaServerBackend:
    """One llama-server. `slot_dir` is the directory of its --slot-save-path."""

    def __init__(
        self,
        client: Client,
        slot_dir: str | os.PathLike[str],
        *,
        memory: SlotMemory | None = None,
        count: Callable[[str], None] | None = None,
    ) -> None:
        self.client = client
        self.files = SlotFiles(slot_dir)
        self.memory = memory or SlotMemory(0)
        self.transfers = Transfers(self._act, self.files, self.memory, count)

    @property
    def url(self) -> str:
        return self.client.url

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, *, timeout: float = REQUEST_SECONDS
    ) -> Any:
        """One request of the proxy's own; the JSON of the answer. Raises UpstreamError."""
        return await self.client.ask(method, path, body, timeout=timeout)

    # -- the process

    async def status(self, timeout: float) -> Status:
        props = await self.ask("GET", "/props", timeout=timeout)
        if not isinstance(props, dict):
            raise UpstreamError("GET /props: not an object")
        unique, sleeping = bool(props.get("media_marker")), bool(props.get("is_sleeping"))
        return Status(fingerprint.marker_of(props), unique, sleeping)

    async def probe(self) -> Identity:
        return await fingerprint.identify(self)

    async def list_adapters(self, timeout: float = REQUEST_SECONDS) -> Any:
        try:
            return (await self.ask("GET", "/lora-adapters", timeout=timeout)) or None
        except UpstreamError as error:
            if error.status is None:
                raise
            return None

    async def metrics(self, headers: Mapping[str, str]) -> str:
        return await self.client.text("/metrics", headers)

    # -- prompts

    async def apply_template(self, body: Mapping[str, Any] | bytes) -> str:
        answer = await self.ask("POST", "/apply-template", body)
        return str(answer["prompt"])

    async def tokenize(
        self, content: str | Sequence[str | int], *, add_special: bool, parse_special: bool = True
    ) -> Tokens:
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self.ask("POST", "/tokenize", body)
        return np.asarray(answer["tokens"], np.int32)

    # -- slots

    async def list_slots(self, timeout: float = REQUEST_SECONDS) -> list[SlotReport]:
        return [_report(each) for each in await self.ask("GET", "/slots", timeout=timeout)]

    async def save_slot(
        self, slot: int, timeout: float = PROBE_SECONDS, *, n_tokens: int | None = None
    ) -> slotfile.SlotFile:
        # If the caller is cancelled, the server still writes the file: its removal must wait for that.
        return await asyncio.shield(self.files.task(self.transfers.save(slot, n_tokens, timeout)))

    async def restore_slot(
        self, slot: int, file: slotfile.SlotFile, timeout: float, *, begin: Callable[[], bool] | None = None
    ) -> int:
        return await asyncio.shield(self.files.task(self.transfers.restore(slot, file, timeout, begin)))

    async def try_memory(self, slot: int, file: slotfile.SlotFile) -> None:
        """Finds out whether this server can take and give states through memory. The slot holds the file afterwards."""
        await asyncio.shield(self.files.task(self.transfers.try_memory(slot, file, PROBE_SECONDS)))

    async def erase_slot(self, slot: int) -> None:
        await self._act(slot, "erase", {}, PROBE_SECONDS)

    async def _act(self, slot: int, action: str, body: Mapping[str, Any], timeout: float) -> Any:
        return await self.ask("POST", f"/slots/{slot}?action={action}", body, timeout=timeout)

    def remove_stale(self) -> list[str]:
        return self.files.remove_stale()

    async def close(self) -> None:
        await self.files.close()

    # -- requests of clients

    def parse_timings(self, head: bytes, tail: bytes) -> Timings | None:
        # The model's own text has its quotes escaped, so it does not match.
        found = _TIMINGS.findall(tail)
        try:
            if found:
                t = json.loads(found[-1])
                return Timings(int(t["cache_n"]), int(t["prompt_n"]), float(t["prompt_ms"]), int(t["predicted_n"]))
            return _timings_of_usage(head, tail)
        except (ValueError, KeyError, TypeError):
            return None

    def is_open(self, target: bytes) -> bool:
        return _OPEN.fullmatch(target) is not None

    def only_reads(self, path: str) -> bool:
        return path in _READS_ONLY

    def changes_adapters(self, path: str) -> bool:
        return path.startswith("/lora-adapters")

    def slot_of(self, path: str) -> int | None:
        found = _SLOT_ACTION.match(path)
        return None if found is None else int(found[1])

    def taints(self, body: bytes) -> bool:
        return any(name in body for name in _TAINTS)


def _timings_of_usage(head: bytes, tail: bytes) -> Timings | None:
    """Answers of the Messages API and whole ones of the Responses API have no timings. A streamed answer of the former
    tells the tokens of the prompt in its first event."""
    found = _USAGE.findall(tail)
    if not found:
        return None
    usage = json.loads(found[-1])
    generated = int(usage["output_tokens"])
    if begin := _MESSAGE_START.search(head):
        usage = json.loads(_USAGE.findall(head, begin.end())[0])
    if "cache_read_input_tokens" in usage:
        return Timings(int(usage["cache_read_input_tokens"]), int(usage["input_tokens"]), 0.0, generated)
    cached = int(usage["input_tokens_details"]["cached_tokens"])
    return Timings(cached, int(usage["input_tokens"]) - cached, 0.0, generated)


def _report(listed: Mapping[str, Any]) -> SlotReport:
    n_tokens = listed.get("n_prompt_tokens")
    return SlotReport(
        id=int(listed["id"]),
        task=listed.get("id_task"),
        n_tokens=None if n_tokens is None else int(n_tokens),
        working=bool(listed.get("is_processing")),
        adapters=(listed.get("params") or {}).get("lora"),
    )
