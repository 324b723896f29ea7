"""What an object holds before it is sealed:

    u32       bytes of the head
    head      JSON: the meta of the entry, and what follows
    tokens    int32, little-endian
    main      the state, whole or as a delta
    draft     the state of the draft model, if there is one

The id of the parent in the header of a delta is the first 8 characters of the parent's `state`, as a big-endian number.
Nothing in a head is trusted: it was written by another machine.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import bkvd
from ..errors import DeltaError
from ..meta import clean_excerpt
from ..types import CLASSES, SOURCES, Bytes, EntryClass, Source, Tokens
from ..util.hashing import digest
from .names import Chain, Names, ObjectName
from .sealing import RefusedError

FULL, DELTA = "full", "bkvd"
MAX_HEAD = 64 << 20
U64, I63 = (1 << 64) - 1, (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One state of an object: how it is written, its bytes here, and the bytes and digest that it decodes to."""

    name: str
    kind: str
    stored: int
    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The meta of a published entry."""

    fingerprint: str
    entry_class: EntryClass
    source: Source
    excerpt: str
    family: int
    n_input: int
    n_images: int
    head: bytes | None
    n_tokens: int
    parts: tuple[PartFacts, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PublishedState:
    """An entry as it travels: its meta, its tokens and its whole states."""

    facts: StateFacts
    tokens: Tokens
    main: Bytes
    draft: Bytes | None

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(part.digest for part in self.facts.parts)


def parent_id(state: str) -> int:
    return int.from_bytes(state.encode()[:8], "big")


# -- writing


def encode(
    state: PublishedState, parent: PublishedState | None, parent_state: str, *, min_saved: int = 0
) -> tuple[list[Any], bool]:
    """The parts of an object to be sealed, and whether main is a delta against the parent."""
    bodies: list[Any] = []
    parts: list[PartFacts] = []
    shared = False
    for old in state.facts.parts:
        whole = state.main if old.name == "main" else state.draft
        assert whole is not None
        body: Any = whole
        against = None if parent is None else (parent.main if old.name == "main" else parent.draft)
        if against is not None and (old.name == "main" or shared):
            delta = bkvd.encode(whole, against, parent_id(parent_state), min_saved=min_saved, content=True)
            if delta is not None:
                body = delta.data
                shared = shared or old.name == "main"
        kind = DELTA if body is not whole else FULL
        parts.append(PartFacts(old.name, kind, memoryview(body).nbytes, old.size, old.digest))
        bodies.append(body)
    head = _head_json(state.facts, parts)
    tokens = np.ascontiguousarray(state.tokens, "<i4").view(np.uint8)
    return [struct.pack("<I", len(head)), head, tokens, *bodies], shared


def _head_json(facts: StateFacts, parts: Sequence[PartFacts]) -> bytes:
    value = {
        "fingerprint": facts.fingerprint,
        "class": facts.entry_class,
        "source": facts.source,
        "excerpt": facts.excerpt,
        "family": facts.family,
        "n_input": facts.n_input,
        "n_images": facts.n_images,
        "n_tokens": facts.n_tokens,
        "slot_head": None if facts.head is None else base64.b64encode(facts.head).decode(),
        "parts": [
            {"name": p.name, "kind": p.kind, "stored": p.stored, "size": p.size, "digest": p.digest.hex()} for p in parts
        ],
    }
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


# -- reading


@dataclass(frozen=True, slots=True)
class Opened:
    """The start of an object: the meta, the tokens, and where its parts begin."""

    facts: StateFacts
    tokens: Tokens
    body_at: int


def head_bytes(plain: Bytes, n_tokens: int) -> int:
    """How many plain bytes hold the head and the tokens. Raises RefusedError."""
    if plain.size < 4:
        raise RefusedError("it has no head")
    n = int.from_bytes(plain[:4].tobytes(), "little")
    end = 4 + n + 4 * n_tokens
    if n > MAX_HEAD or end > plain.size:
        raise RefusedError("its head is longer than the object")
    return end


def read_head(plain: Bytes, name: ObjectName, names: Names) -> Opened:
    """The start of an opened object, which must say what its name says. Raises RefusedError."""
    end = head_bytes(plain, name.n_tokens)
    n = end - 4 - 4 * name.n_tokens
    facts = _facts(plain[4 : 4 + n].tobytes())
    tokens: Tokens = plain[4 + n : end].copy().view("<i4").astype(np.int32, copy=False)
    if facts.fingerprint != names.fingerprint:
        raise RefusedError("it has another fingerprint")
    if facts.n_tokens != name.n_tokens or not names.fits(name, Chain(names.hasher, tokens)):
        raise RefusedError("its tokens are not those of its name")
    if facts.entry_class != name.entry_class:
        raise RefusedError("its class is not that of its name")
    if names.state(tuple(part.digest for part in facts.parts)) != name.state:
        raise RefusedError("its state is not that of its name")
    if sum(part.stored for part in facts.parts) != plain.size - end:
        raise RefusedError("its parts are not as long as its head says")
    if name.is_delta != (facts.parts[0].kind == DELTA) or (not name.is_delta and facts.parts[-1].kind == DELTA):
        raise RefusedError("its parent is not that of its name")
    return Opened(facts, tokens, end)


def fingerprint_in(plain: Bytes) -> str:
    """The fingerprint that an opened object names, before its name can be checked. Raises RefusedError."""
    n = int.from_bytes(plain[:4].tobytes(), "little")
    if n > MAX_HEAD or 4 + n > plain.size:
        raise RefusedError("its head is longer than the object")
    return _facts(plain[4 : 4 + n].tobytes()).fingerprint


def _facts(data: bytes) -> StateFacts:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError("its head is not JSON") from error
    if not isinstance(value, Mapping):
        raise RefusedError("its head is not an object of JSON")
    try:
        slot_head = value["slot_head"]
        facts = StateFacts(
            fingerprint=_text(value["fingerprint"]),
            entry_class=_one_of(value["class"], CLASSES),
            source=_one_of(value["source"], SOURCES),
            excerpt=clean_excerpt(_text(value["excerpt"])),
            family=_number(value["family"], U64),
            n_input=_number(value["n_input"], I63),
            n_images=_number(value["n_images"], 1 << 31),
            head=None if slot_head is None else base64.b64decode(_text(slot_head), validate=True),
            n_tokens=_number(value["n_tokens"], 1 << 31),
            parts=tuple(_part(each) for each in value["parts"]),
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RefusedError("its head lacks a field, or a field has another type") from error
    if [part.name for part in facts.parts] not in (["main"], ["main", "draft"]):
        raise RefusedError("its head names other parts than main and draft")
    return facts


def _part(value: Any) -> PartFacts:
    part = PartFacts(
        name=_text(value["name"]),
        kind=_one_of(value["kind"], (FULL, DELTA)),
        stored=_number(value["stored"], I63),
        size=_number(value["size"], I63),
        digest=bytes.fromhex(_text(value["digest"])),
    )
    if len(part.digest) != 16 or not part.size or (part.kind == FULL and part.size != part.stored):
        raise ValueError("a part's sizes")
    return part


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    value.encode()  # UnicodeEncodeError, a ValueError, for lone surrogates
    return value


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError("not a number in range")
    return value


def _one_of(value: Any, allowed: Sequence[Any]) -> Any:
    if value not in allowed:
        raise ValueError("not one of the known values")
    return value


def decode(opened: Opened, plain: Bytes, parent: PublishedState | None, parent_state: str) -> PublishedState:
    """The whole states of an opened object, checked by their digests. Raises RefusedError."""
    at = opened.body_at
    states: dict[str, Bytes] = {}
    for part in opened.facts.parts:
        body = plain[at : at + part.stored]
        at += part.stored
        if part.kind == DELTA:
            base = None if parent is None else (parent.main if part.name == "main" else parent.draft)
            body = _undelta(body, base, parent_state, part.size)
        if digest(body) != part.digest:
            raise RefusedError("its state does not have its digest")
        body.flags.writeable = False
        states[part.name] = body
    return PublishedState(opened.facts, opened.tokens, states["main"], states.get("draft"))


def _undelta(body: Bytes, base: Bytes | None, parent_state: str, size: int) -> Bytes:
    if bkvd.size(body) != size:
        raise RefusedError("its delta is of another size than its head says")
    try:
        return bkvd.decode(body, base, parent_id(parent_state))
    except DeltaError as error:
        raise RefusedError(f"its delta cannot be decoded: {error.message}") from error
    except MemoryError as error:
        raise RefusedError("there is no memory for its state") from error
