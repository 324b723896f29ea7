"""The local index of what a fleet has published: fed by listings, asked without a request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..storage import queries_remote
from ..storage.queries_remote import Row
from ..storage.remote_file import RemoteFile
from .names import BLOCK, Chain, Names, ObjectName, parse_path

SAME_MARK = 64  # objects with one mark that a match looks at
SAME_STATE = 1024
ROWS_PER_STEP = 1000
WORST_CHOICES = 8  # objects that one match may offer, one after another


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing gives it; `modified` is in unix seconds, by the clock of the object store."""

    path: str
    size: int
    modified: int


@dataclass(frozen=True, slots=True)
class Indexed:
    """An object of the index."""

    id: int
    name: ObjectName
    size: int
    modified: int

    @property
    def path(self) -> str:
        return self.name.path


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that serves the first n_common tokens of a request."""

    found: Indexed
    n_common: int


def row_id(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big", signed=True)


class RemoteIndex:
    """The names of one or more fingerprints' objects. Safe to use from several threads and processes."""

    def __init__(self, file: RemoteFile, names: Sequence[Names]) -> None:
        self.file = file
        self.names = list(names)
        self._by_fp = {each.fp: each for each in names}

    def names_of(self, name: ObjectName) -> Names:
        return self._by_fp[name.fp]

    def _keys(self, name: ObjectName) -> list[int]:
        names = self._by_fp[name.fp]
        keys = [names.index_key(length, mark) for length, mark in zip(name.lengths, name.marks, strict=True)]
        return [*keys, names.state_key(name.state)]

    # -- listings

    def begin_listing(self, names: Names) -> int:
        """The number of a new full listing."""
        with self.file.write() as c:
            generation = queries_remote.info(c, f"generation {names.fp}") + 1
            queries_remote.set_info(c, f"generation {names.fp}", generation)
        return generation

    def take(self, names: Names, page: Iterable[Listed]) -> tuple[list[Indexed], int]:
        """Takes in a page of a listing: what is new, and how many names are not of ours. One transaction.

        A name counts as seen by the full listing that began last, whichever listing has it: listings may overlap.
        """
        new: list[Indexed] = []
        ignored = 0
        known: list[int] = []
        with self.file.write() as c:
            number = queries_remote.info(c, f"generation {names.fp}")
            for item in page:
                id = row_id(item.path)
                before = queries_remote.known(c, id)
                # A refused object is remembered as such until it is written again.
                if before == (item.size, item.modified):
                    known.append(id)
                    continue
                name = parse_path(item.path)
                if name is None or name.fp != names.fp:
                    ignored += 1
                    continue
                queries_remote.insert(c, Row(id, item.path, item.size, item.modified, False), self._keys(name), number)
                new.append(Indexed(id, name, item.size, item.modified))
            queries_remote.see(c, known, number)
        return new, ignored

    def end_listing(self, names: Names, generation: int, at: int) -> int:
        """Removes what a full listing did not have; how many objects."""
        gone = 0
        while True:
            with self.file.write() as c:
                rows = queries_remote.unseen(c, names.prefix + "/", generation, ROWS_PER_STEP)
                for row in rows:
                    self._delete(row)
                    queries_remote.delete(c, row.id)
                gone += len(rows)
                if len(rows) < ROWS_PER_STEP:
                    queries_remote.set_info(c, f"listed {names.fp}", at)
                    return gone

    def _delete(self, row: Row) -> None:
        name = parse_path(row.path)
        if name is not None and name.fp in self._by_fp:
            queries_remote.delete_marks(self.file.writer, row.id, self._keys(name))

    def listed_at(self, names: Names) -> int:
        """When the last full listing ended; 0 for never."""
        with self.file.read() as c:
            return queries_remote.info(c, f"listed {names.fp}")

    def refuse(self, found: Indexed) -> None:
        """Never offers this object again."""
        with self.file.write() as c:
            queries_remote.refuse(c, found.id)
            queries_remote.delete_marks(c, found.id, self._keys(found.name))

    def forget(self, found: Indexed) -> None:
        """The object is gone."""
        with self.file.write() as c:
            queries_remote.delete_marks(c, found.id, self._keys(found.name))
            queries_remote.delete(c, found.id)

    # -- lookups: none makes a request

    def candidates(self, chains: Sequence[tuple[Names, Chain]], n_least: int) -> Iterator[Candidate]:
        """Objects that serve more than n_least tokens, the one that serves the most first."""
        found: dict[int, Candidate] = {}
        for names, chain in chains:
            for each in self._candidates(names, chain, n_least):
                found.setdefault(each.found.id, each)
        order = sorted(found.values(), key=lambda c: (-c.n_common, c.found.name.is_delta, c.found.size, -c.found.modified))
        yield from order[:WORST_CHOICES]

    def _candidates(self, names: Names, chain: Chain, n_least: int) -> Iterator[Candidate]:
        top = chain.n_tokens // BLOCK
        lengths = [k * BLOCK for k in range(top, 0, -1) if k * BLOCK + BLOCK - 1 > n_least]
        keys = [names.index_key(length, chain.mark(length)) for length in lengths]
        position = 0
        offered = 0
        with self.file.read() as c:
            while offered < WORST_CHOICES:
                hit = queries_remote.first_mark(c, keys, position)
                if hit is None:
                    return
                for row in queries_remote.with_mark(c, keys[hit], SAME_MARK):
                    candidate = self._candidate(names, chain, row, lengths[hit])
                    if candidate is not None and candidate.n_common > n_least:
                        offered += 1
                        yield candidate
                position = hit + 1

    def _candidate(self, names: Names, chain: Chain, row: Row, length: int) -> Candidate | None:
        found = self._indexed(row)
        if found is None or found.name.fp != names.fp:
            return None
        name = found.name
        n = 0
        # The 64 bits of the index may meet by chance: what decides is the name.
        if name.cuttable and (length, chain.mark(length)) in zip(name.lengths, name.marks, strict=True):
            n = length
        if name.top == length and name.n_tokens <= chain.n_tokens and name.whole == chain.whole(names.hasher, name.n_tokens):
            n = name.n_tokens
        return Candidate(found, n) if n else None

    def _indexed(self, row: Row) -> Indexed | None:
        name = parse_path(row.path)
        return None if name is None or name.fp not in self._by_fp else Indexed(row.id, name, row.size, row.modified)

    def of_state(self, names: Names, state: str, *, whole: bool = False) -> Indexed | None:
        """The youngest object that holds these very bytes; with `whole` not as a delta."""
        with self.file.read() as c:
            rows = queries_remote.with_mark(c, names.state_key(state), SAME_STATE)
        found = [each for row in rows if (each := self._indexed(row)) is not None and each.name.state == state]
        found = [each for each in found if each.name.fp == names.fp and not (whole and each.name.is_delta)]
        return max(found, key=lambda each: each.modified, default=None)

    def same_tokens(self, names: Names, chain: Chain) -> Indexed | None:
        """The youngest object of exactly the tokens of a chain."""
        top = chain.n_tokens // BLOCK * BLOCK
        whole = chain.whole(names.hasher, chain.n_tokens)
        with self.file.read() as c:
            rows = queries_remote.with_mark(c, names.index_key(top, chain.mark(top)), SAME_STATE)
        found = [each for row in rows if (each := self._indexed(row)) is not None]
        same = [each for each in found if each.name.whole == whole and each.name.n_tokens == chain.n_tokens]
        return max(same, key=lambda each: each.modified, default=None)

    def whole_prefixes(self, names: Names, chain: Chain) -> list[Indexed]:
        """Objects, not deltas, whose tokens are a proper prefix of the chain's; the longest first."""
        found: dict[str, Indexed] = {}
        tops = [k * BLOCK for k in range(chain.n_tokens // BLOCK, 0, -1)]
        keys = [names.index_key(length, chain.mark(length)) for length in tops]
        start = 0
        with self.file.read() as c:
            while len(found) < WORST_CHOICES and (position := queries_remote.first_mark(c, keys, start)) is not None:
                for row in queries_remote.with_mark(c, keys[position], SAME_MARK):
                    each = self._indexed(row)
                    if each is None or each.name.is_delta or not each.name.n_tokens < chain.n_tokens:
                        continue
                    if each.name.top == tops[position] and each.name.whole == chain.whole(names.hasher, each.name.n_tokens):
                        known = found.get(each.name.state)
                        if known is None or known.modified < each.modified:
                            found[each.name.state] = each
                start = position + 1
        return sorted(found.values(), key=lambda each: -each.name.n_tokens)

    def all(self, names: Names) -> list[Indexed]:
        with self.file.read() as c:
            rows = list(queries_remote.paths(c, names.prefix + "/"))
        return [each for row in rows if not row.refused and (each := self._indexed(row)) is not None]

    def totals(self) -> tuple[int, int, int]:
        """Objects, their bytes, and how many are refused."""
        with self.file.read() as c:
            each = [queries_remote.totals(c, names.prefix + "/") for names in self.names]
        return sum(t[0] for t in each), sum(t[1] for t in each), sum(t[2] for t in each)

    # -- which local entry has which bytes

    def local_entry(self, names: Names, state: str) -> int | None:
        with self.file.read() as c:
            return queries_remote.local_entry(c, names.state_key(state))

    def set_local_entry(self, names: Names, state: str, entry: int) -> None:
        with self.file.write() as c:
            queries_remote.set_local_entry(c, names.state_key(state), entry)

    def forget_local_entry(self, names: Names, state: str) -> None:
        with self.file.write() as c:
            queries_remote.forget_local_entry(c, names.state_key(state))
