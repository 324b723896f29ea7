"""What an administrator does with the object store of a fleet: look, check, delete by age, remove. No local store is needed."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InvalidInputError, NotFoundError, RemoteError
from . import contents
from .contents import PublishedState
from .index import Indexed, row_id
from .names import VERSION, Names, ObjectName, parse_path
from .object_store import GoneError, ObjectStore
from .options import DAY, RemoteOptions
from .sealing import RefusedError
from .transfer import Progress, fetch

T = TypeVar("T")
MIN_ID = 4  # characters of a state that name objects
ORPHAN_SECONDS = 3600.0  # a delta whose parent is not listed may be younger than the listing
DELETED_AT_ONCE = 500
ABANDONED = re.compile(r"#\d+\Z")  # how obstore names a file of an upload into a folder that has not ended


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object of the listing."""

    name: ObjectName
    size: int
    modified: int

    def as_dict(self, now: float) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "id": self.name.state,
            "path": self.name.path,
            "fp": self.name.fp,
            "class": self.name.entry_class,
            "n_tokens": self.name.n_tokens,
            "bytes": self.size,
            "parent": self.name.parent if self.name.is_delta else None,
            "cuttable": self.name.cuttable,
            "modified": self.modified,
            "age_seconds": max(0, int(now - self.modified)),
        }


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a gc deleted: objects past their lifetime, for a size, deltas without a parent, and files of uploads cut off."""

    expired: list[RemoteObject]
    for_size: list[RemoteObject]
    orphans: list[RemoteObject]
    abandoned: int

    @property
    def objects(self) -> list[RemoteObject]:
        return [*self.expired, *self.for_size, *self.orphans]


class FleetAdmin:
    """The object store of a fleet. Every call makes requests; each raises RemoteError or RemoteDeniedError where they fail."""

    def __init__(self, options: RemoteOptions, *, create: bool = False) -> None:
        self.options = options
        self.store = ObjectStore(options.url, options.store_options, create=create)
        self.ignored = 0

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    # -- look

    def objects(self) -> list[RemoteObject]:
        """Every object, the youngest first; counts other files in `ignored`."""
        return self._run(self._objects())

    async def _objects(self) -> list[RemoteObject]:
        found: list[RemoteObject] = []
        self.ignored = 0
        async for page in self.store.pages(VERSION):
            for item in page:
                name = parse_path(item.path)
                if name is None:
                    self.ignored += 1
                else:
                    found.append(RemoteObject(name, item.size, item.modified))
        return sorted(found, key=lambda each: (-each.modified, each.name.path))

    def probe(self) -> float:
        """Writes, lists, reads and deletes a small object: what a fleet needs. Gives the clock of the object store.

        Raises RemoteError, RemoteDeniedError.
        """
        return self._run(self._probe())

    async def _probe(self) -> float:
        async with self._written(b"probe") as path:
            if bytes(await self.store.get_range(path, 0, 5)) != b"probe":
                raise RemoteError(f"{self.store.url} gives other bytes than were written", url=self.store.url)
            listed = [item.path async for page in self.store.pages(VERSION) for item in page]
            if path not in listed:
                raise RemoteError(f"{self.store.url} does not list what was written", url=self.store.url)
            return float(await self.store.modified(path))

    async def _clock(self) -> float:
        """The time by the clock of the object store: ages are by this clock alone."""
        async with self._written(b"clock") as path:
            return float(await self.store.modified(path))

    @asynccontextmanager
    async def _written(self, word: bytes) -> AsyncIterator[str]:
        """The path of a small object that holds a word; it is deleted afterwards."""
        path = f"{VERSION}/{word.decode()}-{secrets.token_hex(8)}"
        await self.store.put(path, len(word), iter([word]))
        try:
            yield path
        finally:
            await self.store.delete([path])

    # -- delete

    def gc(self, *, max_bytes: int | None = None, dry_run: bool = False) -> Deleted:
        """Deletes objects older than their lifetime; with max_bytes also the oldest, until the rest has at most that size.

        Deltas whose parent is gone go too. Any number of machines may run this at once.
        """
        return self._run(self._gc(max_bytes, dry_run))

    async def _gc(self, max_bytes: int | None, dry_run: bool) -> Deleted:
        now = await self._clock()
        objects = await self._objects()
        expired = [each for each in objects if now - each.modified > self.options.lifetime]
        gone = {each.name.path for each in expired}
        left = [each for each in objects if each.name.path not in gone]
        for_size: list[RemoteObject] = []
        if max_bytes is not None:
            total = sum(each.size for each in left)
            for each in sorted(left, key=lambda each: (each.modified, each.name.path)):
                if total <= max_bytes:
                    break
                for_size.append(each)
                total -= each.size
            gone = {each.name.path for each in for_size}
            left = [each for each in left if each.name.path not in gone]
        whole = {(each.name.fp, each.name.state) for each in left if not each.name.is_delta}
        orphans = [
            each
            for each in left
            if each.name.is_delta and (each.name.fp, each.name.parent) not in whole and now - each.modified > ORPHAN_SECONDS
        ]
        if not dry_run:
            await self._delete([*expired, *for_size, *orphans])
        return Deleted(expired, for_size, orphans, self._sweep_folder(now, dry_run))

    async def _delete(self, objects: Iterable[RemoteObject]) -> None:
        # Children first: a machine that lists meanwhile sees no delta without its parent.
        paths = [each.name.path for each in sorted(objects, key=lambda each: not each.name.is_delta)]
        for start in range(0, len(paths), DELETED_AT_ONCE):
            await self.store.delete(paths[start : start + DELETED_AT_ONCE])

    def _sweep_folder(self, now: float, dry_run: bool) -> int:
        """Deletes files that uploads into a folder left when their process ended, a day later."""
        folder = self.store.folder
        if folder is None:
            return 0
        n = 0
        for place, _, files in os.walk(folder / VERSION):
            for file in files:
                path = Path(place) / file
                with suppress(OSError):
                    if ABANDONED.search(file) and now - path.stat().st_mtime > DAY:
                        n += 1
                        if not dry_run:
                            path.unlink()
        return n

    def find(self, ids: Sequence[str]) -> list[RemoteObject]:
        """The objects with these ids, which may be shortened, and the deltas against them. Raises NotFoundError."""
        objects = self.objects()
        found: dict[str, RemoteObject] = {}
        for id in ids:
            if not (MIN_ID <= len(id) <= 16 and re.fullmatch("[a-z2-7]+", id)):
                raise InvalidInputError(f"{id!r} is not an id of an object", hint="see `kvstore remote ls URL`")
            states = {each.name.state for each in objects if each.name.state.startswith(id)}
            if not states:
                raise NotFoundError(f"no object {id}", hint="see `kvstore remote ls URL`", id=id)
            if len(states) > 1:
                raise InvalidInputError(f"id {id} is ambiguous ({len(states)} states)", hint="give more characters")
            for each in objects:
                if each.name.state in states or each.name.parent in states:
                    found[each.name.path] = each
        return list(found.values())

    def remove(self, objects: Iterable[RemoteObject]) -> None:
        """Deletes objects. Machines that fetched them keep their copies."""
        self._run(self._delete(objects))

    # -- check

    def verify(self, seen: Callable[[int, int], None] | None = None) -> list[tuple[RemoteObject, str]]:
        """Fetches, opens and decodes every object; those that must not be served, and why. Deletes nothing."""
        return self._run(self._verify(seen))

    async def _verify(self, seen: Callable[[int, int], None] | None) -> list[tuple[RemoteObject, str]]:
        objects = await self._objects()
        bad: list[tuple[RemoteObject, str]] = []
        whole = {(each.name.fp, each.name.state): each for each in objects if not each.name.is_delta}
        last: tuple[str, PublishedState] | None = None  # deltas of one parent come one after another
        for number, each in enumerate(sorted(objects, key=lambda o: (o.name.fp, o.name.parent)), 1):
            try:
                parent: PublishedState | None = None
                if each.name.is_delta:
                    if last is None or last[0] != each.name.fp + each.name.parent:
                        found = whole.get((each.name.fp, each.name.parent))
                        if found is None:
                            raise RefusedError("its parent is not there")
                        last = each.name.fp + each.name.parent, await self._opened(found, None)
                    parent = last[1]
                await self._opened(each, parent)
            except RefusedError as error:
                bad.append((each, str(error)))
            except GoneError:
                pass  # deleted meanwhile
            if seen is not None:
                seen(number, len(objects))
        return bad

    async def _opened(self, each: RemoteObject, parent: PublishedState | None) -> PublishedState:
        names, plain = await self._plain(each)
        opened = contents.read_head(plain, each.name, names)
        return contents.decode(opened, plain, parent, each.name.parent)

    async def _plain(self, each: RemoteObject) -> tuple[Names, Any]:
        """The names of an object's fingerprint, which it tells itself, and its plain bytes. Tries every key."""
        error = RefusedError("there is no key")
        indexed = Indexed(row_id(each.name.path), each.name, each.size, each.modified)
        for key in self.options.keys:
            try:
                _, plain = await fetch(self.store, indexed, Names(key, ""), Progress(), check=False)
                names = Names(key, contents.fingerprint_in(plain))
            except RefusedError as failure:
                error = failure
                continue
            if names.fp != each.name.fp:
                raise RefusedError("its fingerprint is not that of its name")
            return names, plain
        raise error

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each folder, as its smallest readable object tells it."""
        return self._run(self._fingerprints())

    async def _fingerprints(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in sorted(await self._objects(), key=lambda each: each.size):
            if each.name.fp not in found:
                with suppress(RefusedError, GoneError):
                    names, _ = await self._plain(each)
                    found[each.name.fp] = names.fingerprint
        return found

