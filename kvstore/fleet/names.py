"""Names of objects: what a name says of a state, to those who have the key of the fleet.

    1/<fp>/<YYYYMMDD>/<HHMMSS>-<kind>-<n>-<self>-<state>-<parent>-<pn>-<marks>

    fp             the fingerprint, 16 characters
    day, time      UTC, by the publisher's clock, when its upload began
    kind           l learned, n normal, p pinned; as a capital: the state cannot be cut, so it serves as a whole only
    n, pn          tokens of the state, and of its parent (0: it is stored whole)
    self           hash of all its tokens
    state, parent  which bytes: hash of the digests of the state, and of its parent's (0: none)
    marks          40-bit hashes of the first L tokens, for each L of `mark_lengths(n, pn)`

All hashes are BLAKE2b keyed with a key derived from the fleet's, in base 32 in lower case: safe on file systems that
ignore case. The part behind the time is called the facts; the seal of an object covers fp and facts.
"""

from __future__ import annotations

import base64
import calendar
import hashlib
import re
import time
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..types import EntryClass, Tokens

BLOCK = 64  # tokens; marks lie on its multiples
MIN_TOKENS = BLOCK  # a shorter state has no mark, so it is not published
FIRST_MARK = 256
MARKS = 10  # of either kind, so at most 20 in a name: 242 bytes of the 255 that a file name may have
MARK_CHARACTERS = 8
MAX_TOKENS = (1 << 31) - 1
VERSION = "1"
KINDS: dict[EntryClass, str] = {"learned": "l", "normal": "n", "pinned": "p"}
CLASSES: dict[str, EntryClass] = {kind: name for name, kind in KINDS.items()}
_NAME = re.compile(
    r"(\d{6})-([lnpLNP])-([1-9]\d{1,9})-([a-z2-7]{16})-([a-z2-7]{16})-(0|[a-z2-7]{16})-(0|[1-9]\d{0,9})-((?:[a-z2-7]{8}){1,20})",
    re.ASCII,
)
_DAY = re.compile(r"\d{8}", re.ASCII)
_FINGERPRINT = re.compile(r"[a-z2-7]{16}", re.ASCII)


@lru_cache(maxsize=65536)
def mark_lengths(n: int, pn: int, *, whole_only: bool = False) -> tuple[int, ...]:
    """Token counts at which a state has marks: close together at its end, where chats part, and doubling from its start."""
    top = n // BLOCK * BLOCK
    if not top:
        return ()
    if whole_only:
        return (top,)
    ends = {top - BLOCK * ((1 << k) - 1) for k in range(MARKS)}
    starts = {FIRST_MARK << k for k in range(MARKS)}
    return tuple(sorted({top} | {L for L in ends | starts if pn < L <= top}))


def _b32(data: bytes) -> str:
    return base64.b32encode(data).decode().lower()


@dataclass(frozen=True)
class ObjectName:
    """The name of one object."""

    fp: str
    day: str
    time: str
    kind: str
    n_tokens: int
    whole: str
    state: str
    parent: str
    parent_tokens: int
    marks: tuple[str, ...]

    @property
    def facts(self) -> str:
        return (
            f"{self.kind}-{self.n_tokens}-{self.whole}-{self.state}-{self.parent}-{self.parent_tokens}-{''.join(self.marks)}"
        )

    @property
    def sealed_name(self) -> str:
        """What the seal covers: a copy in another day's folder opens, an object under another name does not."""
        return f"{self.fp}/{self.facts}"

    @property
    def path(self) -> str:
        return f"{VERSION}/{self.fp}/{self.day}/{self.time}-{self.facts}"

    @property
    def cuttable(self) -> bool:
        return self.kind.islower()

    @property
    def entry_class(self) -> EntryClass:
        return CLASSES[self.kind.lower()]

    @property
    def is_delta(self) -> bool:
        return self.parent != "0"

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return mark_lengths(self.n_tokens, self.parent_tokens, whole_only=not self.cuttable)

    @property
    def top(self) -> int:
        return self.n_tokens // BLOCK * BLOCK

    @property
    def named_at(self) -> int:
        """Unix seconds of day and time, by the publisher's clock."""
        return calendar.timegm(time.strptime(self.day + self.time, "%Y%m%d%H%M%S"))

    def renamed(self, at: float) -> ObjectName:
        """The same object, published again at another time."""
        day, clock = day_of(at), time_of(at)
        return ObjectName(
            self.fp, day, clock, self.kind, self.n_tokens, self.whole, self.state, self.parent, self.parent_tokens, self.marks
        )


def parse_path(path: str) -> ObjectName | None:
    """The name of a path below the root; None for what is not a name."""
    parts = path.split("/")
    if len(parts) != 4 or parts[0] != VERSION or not _FINGERPRINT.fullmatch(parts[1]) or not _DAY.fullmatch(parts[2]):
        return None
    found = _NAME.fullmatch(parts[3])
    if found is None:
        return None
    clock, kind, n_text, whole, state, parent, pn_text, marks = found.groups()
    if not _is_time(parts[2], clock):
        return None
    n, pn = int(n_text), int(pn_text)
    if not MIN_TOKENS <= n <= MAX_TOKENS or pn >= n or (parent == "0") != (pn == 0):
        return None
    split = tuple(marks[i : i + MARK_CHARACTERS] for i in range(0, len(marks), MARK_CHARACTERS))
    name = ObjectName(parts[1], parts[2], clock, kind, n, whole, state, parent, pn, split)
    return name if len(split) == len(name.lengths) else None


def _is_time(day: str, clock: str) -> bool:
    return _is_day(day) and clock[:2] < "24" and clock[2:4] < "60" and clock[4:] < "60"


@lru_cache(maxsize=1024)
def _is_day(day: str) -> bool:
    try:
        time.strptime(day, "%Y%m%d")
    except ValueError:
        return False
    return True


def day_of(at: float) -> str:
    return time.strftime("%Y%m%d", time.gmtime(at))


def time_of(at: float) -> str:
    return time.strftime("%H%M%S", time.gmtime(at))


class Chain:
    """The chained hashes of a token sequence, at every multiple of 64 tokens. `at[k]` is that of the first 64 k tokens."""

    __slots__ = ("at", "n_tokens", "tail")

    def __init__(self, hasher: Hasher, tokens: Tokens) -> None:
        data = np.ascontiguousarray(tokens, "<i4").tobytes()
        self.n_tokens = len(tokens)
        self.at = [bytes(16)]
        step = 4 * BLOCK
        for start in range(0, len(data) - step + 1, step):
            self.at.append(hasher.hash(self.at[-1] + data[start : start + step], 16))
        self.tail = data

    def mark(self, length: int) -> str:
        return _b32(self.at[length // BLOCK][:5])

    def whole(self, hasher: Hasher, n: int) -> str:
        """`self` of the first n tokens."""
        top = n // BLOCK * BLOCK
        return _b32(hasher.hash(b"w" + self.at[top // BLOCK] + self.tail[4 * top : 4 * n], 10))


class Hasher:
    """BLAKE2b under the key for names: without the key its values say nothing."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(b"names", key=key).digest()

    def hash(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=size).digest()


class Names:
    """The names of one fingerprint under one key."""

    def __init__(self, key: bytes, fingerprint: str) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.hasher = Hasher(key)
        self.fp = _b32(self.hasher.hash(b"f" + fingerprint.encode(), 10))
        self.prefix = f"{VERSION}/{self.fp}"

    def chain(self, tokens: Tokens) -> Chain:
        return Chain(self.hasher, tokens)

    def state(self, digests: tuple[bytes, ...]) -> str:
        """Which bytes: of the XXH3-128 of main, and of draft where there is one."""
        return _b32(self.hasher.hash(b"s" + b"".join(digests), 10))

    def name(
        self, chain: Chain, *, at: float, entry_class: EntryClass, cuttable: bool, state: str, parent: ObjectName | None
    ) -> ObjectName:
        """The name of a state of all tokens of the chain, published now."""
        n, pn = chain.n_tokens, 0 if parent is None else parent.n_tokens
        kind = KINDS[entry_class] if cuttable else KINDS[entry_class].upper()
        marks = tuple(chain.mark(L) for L in mark_lengths(n, pn, whole_only=not cuttable))
        return ObjectName(
            self.fp, day_of(at), time_of(at), kind, n, chain.whole(self.hasher, n), state,
            "0" if parent is None else parent.state, pn, marks,
        )  # fmt: skip

    def fits(self, name: ObjectName, chain: Chain) -> bool:
        """Whether a name says the truth of the tokens of a chain."""
        return (
            name.fp == self.fp
            and name.n_tokens == chain.n_tokens
            and name.whole == chain.whole(self.hasher, chain.n_tokens)
            and name.marks == tuple(chain.mark(L) for L in name.lengths)
        )

    def index_key(self, length: int, mark: str) -> int:
        """A mark as the local index holds it: a signed 64-bit number."""
        return int.from_bytes(self.hasher.hash(f"{self.fp}{length}{mark}".encode(), 8), "big", signed=True)

    def state_key(self, state: str) -> int:
        """Which bytes, as the local index holds it."""
        return int.from_bytes(self.hasher.hash(f"{self.fp}={state}".encode(), 8), "big", signed=True)
