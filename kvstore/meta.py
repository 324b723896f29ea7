"""The meta block: the meta of an entry in 512 bytes, little-endian.

    at     type   field
    0      u64    id
    8      u8     class: 0 normal, 1 learned, 2 pinned
    9      u8     source of the class: 0 default, 1 request, 2 policy, 3 admin
    10     u8     1 if counted as saved in its family
    11     u8     1 if counted as reused in its family
    12     u8     1 if the entry has a parent
    13     3      0
    16     i64    created, unix seconds
    24     i64    last used, unix seconds
    32     i64    expires, unix seconds, 0 = never
    40     i64    ttl in seconds, 0 = none
    48     u64    hits
    56     u64    family
    64     i64    input tokens of the request that made it
    72     u16    excerpt length in bytes
    74            excerpt, UTF-8
    504    u64    parent, where byte 12 is 1

Source: the blocks of stores of version 1 and of exports. Blocks older than sharing have byte 12 at 0 and may let the
excerpt run to the end of the block, over the place of the parent.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import InvalidInputError, MetaBlockError
from .types import CLASSES, SOURCES, Blob, EntryClass, Source
from .util.validate import I64, U64, check_int

BLOCK_BYTES = 512
EXCERPT_AT = 74
PARENT_AT = 504
MAX_EXCERPT = PARENT_AT - EXCERPT_AT
_FIELDS = struct.Struct("<Q5B3xqqqqQQqH")
_PARENT = struct.Struct("<Q")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class MetaBlock:
    """The meta of one entry. Times are unix seconds, `ttl` is seconds; None means never.

    `problems` lists the values that `unpack` replaced, an unknown class for instance. It is not packed and not compared.
    """

    id: int
    entry_class: EntryClass = "normal"
    source: Source = "default"
    saved: bool = False
    reused: bool = False
    created_at: int = 0
    last_used: int = 0
    expires_at: int | None = None
    ttl: int | None = None
    hits: int = 0
    family: int = 0
    n_input: int = 0
    excerpt: str = ""
    parent: int | None = None
    problems: tuple[str, ...] = field(default=(), compare=False)

    def pack(self) -> bytes:
        """The block, 512 bytes; the excerpt is cleaned and truncated. Raises InvalidInputError if a value is out of range."""
        if self.entry_class not in CLASSES:
            raise InvalidInputError(f"class {self.entry_class!r} must be one of {', '.join(CLASSES)}")
        if self.source not in SOURCES:
            raise InvalidInputError(f"source {self.source!r} must be one of {', '.join(SOURCES)}")
        if self.id == 0 or self.parent == 0:
            raise InvalidInputError("an id must not be 0")
        excerpt = clean_excerpt(self.excerpt).encode()
        block = bytearray(BLOCK_BYTES)
        _FIELDS.pack_into(
            block,
            0,
            check_int(self.id, "id", 0, U64),
            CLASSES.index(self.entry_class),
            SOURCES.index(self.source),
            bool(self.saved),
            bool(self.reused),
            self.parent is not None,
            check_int(self.created_at, "created_at", -I64 - 1, I64),
            check_int(self.last_used, "last_used", -I64 - 1, I64),
            check_int(self.expires_at or 0, "expires_at", -I64 - 1, I64),
            check_int(self.ttl or 0, "ttl", -I64 - 1, I64),
            check_int(self.hits, "hits", 0, U64),
            check_int(self.family, "family", 0, U64),
            check_int(self.n_input, "n_input", -I64 - 1, I64),
            len(excerpt),
        )
        block[EXCERPT_AT : EXCERPT_AT + len(excerpt)] = excerpt
        if self.parent is not None:
            _PARENT.pack_into(block, PARENT_AT, check_int(self.parent, "parent", 0, U64))
        return bytes(block)

    @classmethod
    def unpack(cls, block: Blob) -> MetaBlock:
        """Reads a block (bytes-like). Raises MetaBlockError if it is not 512 bytes, and no other error."""
        data = bytes(memoryview(block))
        if len(data) != BLOCK_BYTES:
            raise MetaBlockError(f"a meta block has 512 bytes, this one has {len(data)}", size=len(data))
        problems = []
        (
            id,
            class_byte,
            source_byte,
            saved,
            reused,
            has_parent,
            created,
            used,
            expires,
            ttl,
            hits,
            family,
            n_input,
            n,
        ) = _FIELDS.unpack_from(data)
        if id == 0:
            problems.append("its id is 0")
        if class_byte >= len(CLASSES):
            problems.append(f"unknown class {class_byte}: now normal")
        if source_byte >= len(SOURCES):
            problems.append(f"unknown source {source_byte}: now default")
        if has_parent > 1:
            problems.append(f"the parent flag is {has_parent}: taken as none")
        parent = None
        room = BLOCK_BYTES - EXCERPT_AT
        if has_parent == 1:
            room = MAX_EXCERPT
            parent = int(_PARENT.unpack_from(data, PARENT_AT)[0])
            if parent == 0:
                problems.append("its parent's id is 0")
        return cls(
            id=id,
            entry_class=CLASSES[class_byte] if class_byte < len(CLASSES) else "normal",
            source=SOURCES[source_byte] if source_byte < len(SOURCES) else "default",
            saved=saved != 0,
            reused=reused != 0,
            created_at=created,
            last_used=used,
            expires_at=expires or None,
            ttl=ttl or None,
            hits=hits,
            family=family,
            n_input=n_input,
            excerpt=_clean(data[EXCERPT_AT : EXCERPT_AT + min(n, room)].decode("utf-8", "replace")),
            parent=parent,
            problems=tuple(problems),
        )


def clean_excerpt(text_or_bytes: str | Blob, limit: int = MAX_EXCERPT) -> str:
    """The text as an excerpt: at most `limit` bytes of valid UTF-8, cut between characters.

    Invalid bytes become U+FFFD, control characters become spaces.
    """
    if isinstance(text_or_bytes, str):
        text = text_or_bytes[:limit]
    else:
        # 4 bytes more, so that a character truncated here lies beyond the limit.
        text = bytes(memoryview(text_or_bytes)[: limit + 4]).decode("utf-8", "replace")
    return _clean(text).encode()[:limit].decode("utf-8", "ignore")


def _clean(text: str) -> str:
    return _CONTROL.sub(" ", _SURROGATE.sub("\ufffd", text))
