"""What the proxy needs of an inference server, whatever its API.

`BackendLink`, `SlotTable`, `Cache`, `Saver` and `Tokenizer` use a server through this protocol alone. The first
implementation is `LlamaServerBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from ... import layout, slotfile
from ...errors import KVStoreError
from ...types import Bytes, Tokens
from .slot_memory import SlotMemory

REQUEST_SECONDS = 60.0


class CacheOff(KVStoreError):
    """The cache cannot work with this server; the message says why."""

    code = "cache_off"


@dataclass(frozen=True)
class Identity:
    """A server process: `marker` differs from process to process where the build has one.

    `adapters` is the server's list of adapters, None where it has none; `probed` says whether the fingerprint contains
    the computed probe; `fresh` whether no request had used the process yet; `keeps` whether a context shift keeps the
    start of a prompt unless a request says otherwise.
    """

    marker: str
    fingerprint: str
    n_slots: int
    n_ctx: int
    model: str
    form: slotfile.SlotFile  # a slot file of this server, as the pattern of those that are restored
    adapters: Any = None
    probed: bool = True
    fresh: bool = False
    keeps: bool = False

    def slot_file(self, tokens: Tokens, state: Bytes) -> slotfile.SlotFile:
        """A state in the form of this server's slot files."""
        return replace(self.form, tokens=tokens, state=state, media=(), padding=b"")

    @cached_property
    def crops(self) -> bool:
        """Whether the server can continue from any position of a state: it then reuses all that a prompt shares with it."""
        return layout.parse(self.form.state).can_crop


@dataclass(frozen=True)
class Status:
    """What a server says of its process without being woken. `unique` says whether no other process has this marker."""

    marker: str
    unique: bool = True
    sleeping: bool = False


@dataclass(frozen=True)
class SlotReport:
    """A slot as the server lists it: its last task, the number of its prompt tokens, whether it works, and the adapters
    of its last request where the server lists them."""

    id: int
    task: int | None = None
    n_tokens: int | None = None
    working: bool = False
    adapters: Any = None


@dataclass(frozen=True)
class Timings:
    """The server's report of an answered request: tokens reused, tokens computed, and tokens generated. `computed_ms` is
    0 where it does not tell the time."""

    cached: int
    computed: int
    computed_ms: float
    generated: int


class Backend(Protocol):
    """An inference server with slots that can be saved and restored.

    Every coroutine raises UpstreamError where the server cannot be reached (`status` is None) or refuses.
    """

    @property
    def url(self) -> str: ...

    @property
    def memory(self) -> SlotMemory: ...

    # -- the process

    async def status(self, timeout: float) -> Status:
        """Neither wakes a sleeping server nor keeps a server awake. A sleeping server has unloaded its model: its slots
        hold nothing, and the next request that computes wakes it."""
        ...

    async def probe(self) -> Identity:
        """Computes a probe in an idle slot, which is empty afterwards. Raises CacheOff where slots cannot be saved."""
        ...

    async def list_adapters(self, timeout: float = REQUEST_SECONDS) -> Any:
        """The adapters and their scales; None where the server has none."""
        ...

    async def metrics(self, headers: Mapping[str, str]) -> str:
        """The server's own Prometheus text."""
        ...

    # -- prompts

    async def apply_template(self, body: Mapping[str, Any] | bytes) -> str:
        """The prompt that the chat template makes of a chat request."""
        ...

    async def tokenize(
        self, content: str | Sequence[str | int], *, add_special: bool, parse_special: bool = True
    ) -> Tokens:
        """The tokens of a text, or of texts and tokens that follow each other."""
        ...

    # -- slots

    async def list_slots(self, timeout: float = REQUEST_SECONDS) -> list[SlotReport]: ...

    async def save_slot(self, slot: int, timeout: float, *, n_tokens: int | None = None) -> slotfile.SlotFile:
        """What a slot holds, n_tokens at most as far as is known. Also raises SlotFileError, OSError."""
        ...

    async def restore_slot(
        self, slot: int, file: slotfile.SlotFile, timeout: float, *, begin: Callable[[], bool] | None = None
    ) -> int:
        """Puts a state into a slot; the number of tokens that the server took. `begin` is called when the state is ready
        for the server: where it returns False the server is not asked, and the result is 0. Also raises SlotFileError,
        OSError."""
        ...

    async def erase_slot(self, slot: int) -> None: ...

    def remove_stale(self) -> list[str]:
        """Removes what killed proxies left behind; the names."""
        ...

    async def close(self) -> None:
        """Waits for saves and restores under way."""
        ...

    # -- requests of clients

    def parse_timings(self, head: bytes, tail: bytes) -> Timings | None:
        """The timings in an answer, streamed or not, of which these are the beginning and the end."""
        ...

    def is_open(self, target: bytes) -> bool:
        """Whether the server answers this target without a key."""
        ...

    def only_reads(self, path: str) -> bool:
        """Whether a POST to this path uses no slot and changes no setting."""
        ...

    def changes_adapters(self, path: str) -> bool: ...

    def slot_of(self, path: str) -> int | None:
        """The slot that a path names itself (to save, restore or erase it)."""
        ...

    def taints(self, body: bytes) -> bool:
        """Whether a request asks for other numbers than other requests get (adapters, moved chunks)."""
        ...
