"""Puts an entry: a request is planned in one read, encoded, staged where it is large, and published in one transaction."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import BusyError, DiskFullError, KVStoreError
from ..storage import blobs, geometry, policy, queries, queries_blobs, queries_chains, queries_maintenance, writers
from ..storage.db import Connection
from ..storage.disk import free_bytes
from ..storage.entry_reader import Damaged
from ..types import Entry, hex_id
from . import entry_codec
from .core import TRIES, StoreCore
from .disk_budget import Dropped
from .entry_codec import Encoded, Part, PendingCacheInsert
from .put_plan import Findings, PutPlan, StalePlan, look, make_plan
from .put_request import PutRequest
from .update import keep_children, replace_parts, stage

log = logging.getLogger("kvstore")
# A larger put checkpoints each time it has written this much, which keeps its log smaller than the put.
LOG_BYTES = 512 << 20
RESERVE_FROM = 8 << 20


def put(
    core: StoreCore, request: PutRequest, *, owned: bool = False, release: Callable[[], None] | None = None
) -> Entry:
    """Stores a request. `owned` arrays may be kept; `release` is called just before the RAM layer takes them."""
    with core.counted_put(), core.workers.lend():
        request.digests.begin(core.workers)
        request.samples.begin(core.workers)
        try:
            return core.past_damage(_put, core, request, owned, release)
        finally:
            request.digests.cancel()
            request.samples.cancel()


def _put(core: StoreCore, request: PutRequest, owned: bool, release: Callable[[], None] | None) -> Entry:
    started = time.perf_counter()
    made_room = False
    for _ in range(TRIES):
        plan = make_plan(core, request, owned=owned)
        if plan.identical is not None and request.base:
            return plan.identical
        if plan.identical is not None:
            refreshed = _refresh(core, plan.identical, request)
            if refreshed is not None:
                return refreshed
            continue
        plan, encoded = plan.encode(core)
        pending = None if owned else entry_codec.begin_cache_insert(core.ram, encoded.parts, plan.base_id, core.workers)
        try:
            entry, version = _write(core, plan, encoded)
        except BaseException as error:
            if pending is not None:
                pending.cancel()
            if isinstance(error, StalePlan):
                continue
            if isinstance(error, DiskFullError) and not made_room and _make_room(core, encoded.stored):
                made_room = True
                continue
            raise
        break
    else:
        path = core.db.path
        raise BusyError(f"{path}: other processes changed what this put relies on, again and again", path=path)
    core.last_write = time.monotonic()
    if release is not None:
        release()
    if owned:
        pending = entry_codec.begin_cache_insert(core.ram, encoded.parts, entry.parent, None)
    _finish(core, plan, entry, version, pending)
    if plan.base is not None:
        log_shared(entry, plan.base.n_tokens, plan.base.id, started)
    return entry


def _finish(
    core: StoreCore, plan: PutPlan, entry: Entry, version: tuple[int, ...], pending: PendingCacheInsert | None
) -> None:
    """After the commit of a put: updates the RAM layer and the counters."""
    request = plan.request
    if pending is not None:
        pending.commit(request.id, version)
    core.counters.count("puts")
    core.counters.count("shared_puts" if plan.base is not None else f"whole_{plan.why_whole}")
    if request.entry_class == "normal":
        core.note_family(request.family)


def log_shared(entry: Entry, n_tokens: int, base: int, started: float) -> None:
    log.info(
        "shared %s: %d tokens, %d of them from %s, %.1f MiB instead of %.1f MiB, %.3f s",
        entry.hex_id, entry.n_tokens, n_tokens, hex_id(base), entry.stored / policy.MIB, entry.size / policy.MIB,
        time.perf_counter() - started,
    )  # fmt: skip


def _refresh(core: StoreCore, same: Entry, request: PutRequest) -> Entry | None:
    """A put of an entry that is already stored: only its meta changes. None if the entry was dropped meanwhile."""
    now = core.now()
    with core.transaction() as (c, _):
        found = queries.entry(c, same.id, None)
        if found is None:
            return None
        new = request.entry_class, request.source
        entry_class, source = policy.merged_class((found.entry_class, found.source), new)
        if entry_class == "learned" and found.parent is not None:
            found = _mended(core, c, found, request)
        entry = dataclasses.replace(
            request.entry(now, found.stored, found.parent),
            id=found.id,
            hits=found.hits,
            entry_class=entry_class,
            source=source,
            created_at=found.created_at,
        )
        queries.update_meta(c, entry)
        queries_chains.touch(c, entry.id, 0, entry.last_used)
        if request.head != queries.head(c, entry.id):
            queries.set_head(c, entry.id, request.head)
    return entry


def _mended(core: StoreCore, c: Connection, entry: Entry, request: PutRequest) -> Entry:
    """A delta that others will be stored against: where its bytes are damaged, it is stored whole from those of the put."""
    try:
        core.reader.read(c, entry)
    except Damaged as error:
        log.warning("entry %s is written anew: %s", entry.hex_id, error.reason)
        whole = entry_codec.encode_entry(core.reader, request.states, request.digests, request.samples, None, 0)
        return replace_parts(core, c, entry, whole.parts, None)
    return entry


def _make_room(core: StoreCore, n_bytes: int) -> bool:
    """Frees disk space on a full disk (empties the log, gives back free pages); True if n_bytes can now be put.

    A put needs room in the log, and again in the file.
    """
    if core.db.memory:
        return False
    need = 2 * n_bytes + (geometry.LOG_PAGES + geometry.NEW_PAGES) * core.budget.page_size
    with suppress(KVStoreError):
        core.db.checkpoint(truncate=True)
        core.freeing(lambda: core.budget.shrink_all(need))
    return free_bytes(core.db.path) >= need


def _write(core: StoreCore, plan: PutPlan, encoded: Encoded) -> tuple[Entry, tuple[int, ...]]:
    """Writes what is to be stored: in one transaction, or staged in batches and published by the last one."""
    total = encoded.stored
    need = total + 3 * len(plan.request.key)
    if total >= RESERVE_FROM and not core.budget.limited:  # with a budget the log is emptied after each batch
        core.db.reserve_log(min(blobs.log_bytes(total), LOG_BYTES))
    if total > core.budget.batch_bytes():
        return _write_staged(core, plan, encoded, need)
    with core.budget.reserve(need, need, plan.base_id) as (c, dropped):
        return _publish(core, c, plan, encoded, None, dropped)


def _write_staged(core: StoreCore, plan: PutPlan, encoded: Encoded, need: int) -> tuple[Entry, tuple[int, ...]]:
    batch = core.budget.batch_bytes()
    with _staging(core) as writer:
        with core.budget.reserve(need, batch, plan.base_id, durable=False) as (c, _):
            staged = stage(c, encoded.parts, writer)
        _write_batches(core, encoded.parts, staged, need, plan.base_id, writer)
        left = need - encoded.stored
        with core.budget.reserve(left, left, plan.base_id) as (c, dropped):
            for blob, part in zip(staged, encoded.parts, strict=True):
                if queries_blobs.chunk_total(c, blob)[1] != part.data.size:
                    raise StalePlan
            return _publish(core, c, plan, encoded, staged, dropped)


def _write_batches(
    core: StoreCore,
    parts: list[Part],
    staged: list[int],
    need: int,
    protect: int | None,
    writer: str,
) -> None:
    batch, chunk = core.budget.batch_bytes(), core.budget.chunk_bytes()
    count = max(1, batch // chunk)
    sync_every = blobs.SYNC_USED_LOG if core.db.wal_bytes() >= need else blobs.SYNC_NEW_LOG
    logged = unsynced = 0
    with core.db.sync_ahead(core.workers) as kick:
        for blob, part in zip(staged, parts, strict=True):
            seq = 0
            while seq >= 0:
                left = need - seq * chunk
                with core.budget.reserve(left, min(left, batch), protect, durable=False) as (c, _):
                    if queries_blobs.blob_writer(c, blob) != writer:
                        raise StalePlan
                    seq = blobs.write(c, blob, part.data, chunk, seq, count)
                logged += count * chunk
                unsynced += count * chunk
                if unsynced >= sync_every:
                    kick()
                    unsynced = 0
                if logged > LOG_BYTES and not core.budget.limited:
                    core.db.checkpoint()
                    logged = 0
            need -= part.data.size


@contextmanager
def _staging(core: StoreCore) -> Iterator[str]:
    """The name of a writer, for blobs that are committed before they belong to an entry.

    Where the put fails the blobs are deleted: the disk may be full because of them. Where even that fails, the maintenance
    tries again.
    """
    writer = writers.Writer(core.file)
    try:
        yield writer.name
    except BaseException:
        writer.close()
        with suppress(KVStoreError):
            core.delete_abandoned_blobs()
        raise
    finally:
        writer.close()


def _publish(
    core: StoreCore, c: Connection, plan: PutPlan, encoded: Encoded, staged: list[int] | None, dropped: Dropped
) -> tuple[Entry, tuple[int, ...]]:
    """Makes staged blobs an entry, and removes what it replaces and contains. Raises StalePlan.

    staged=None: writes the blobs too.
    """
    request = plan.request
    fingerprint = queries.add_fingerprint(c, core.fingerprint)
    found = look(core, c, fingerprint, request, publishing=True)
    if not plan.still_valid(c, found):
        raise StalePlan
    entry = request.entry(core.now(), encoded.stored, plan.base_id)
    if request.base:
        _insert(core, c, plan, encoded, staged, entry, fingerprint)
        queries_chains.set_base(c, entry.id, True)
        queries_maintenance.mark_unswept(c)  # it goes where nothing comes that needs it
        return entry, queries_blobs.version(c, entry.id)
    entry = _with_class(core, entry, found)
    with _same_id_dropped(core, c, plan, entry, found, dropped):
        _insert(core, c, plan, encoded, staged, entry, fingerprint)
    # What the new one replaces and contains goes after it came: it may be stored against one of them, or need the same base.
    for id, _ in found.same:
        if id != entry.id:
            core.retire(c, id, "replaced", dropped)
    for id in found.contained(core, c, request):
        core.retire(c, id, "contained", dropped)
    if entry.parent is not None:
        queries_chains.touch(c, entry.id, 0, entry.last_used)
    queries.count_family(c, entry.family, 1, 0)
    return entry, queries_blobs.version(c, entry.id)


def _insert(
    core: StoreCore,
    c: Connection,
    plan: PutPlan,
    encoded: Encoded,
    staged: list[int] | None,
    entry: Entry,
    fingerprint: int,
) -> None:
    """Writes the rows of a new entry, and gives it its blobs, or writes these too. Raises StalePlan where one is gone."""
    request, cuts = plan.request, plan.request.cuts
    queries.insert_entry(c, entry, fingerprint, request.key, cuts.any, request.head, saved=not request.base)
    if not cuts.any:
        queries.insert_cuts(c, entry.id, fingerprint, request.key, cuts.counts)
    if staged is None:
        chunk = core.budget.chunk_bytes()
        for p in encoded.parts:
            blob = queries_blobs.add_blob(c, p.name, p.kind, p.size, p.data.size, entry.id, p.digest, p.sample)
            blobs.write(c, blob, p.data, chunk)
    for blob, part in zip(staged or (), encoded.parts, strict=staged is not None):
        if not queries_blobs.finish_blob(c, blob, entry.id, part.digest, part.sample):
            raise StalePlan
    if plan.base is not None:
        plan.base.record_samples(c)
        if plan.base.was_base:
            queries_chains.set_base(c, plan.base.id, True)  # an entry again while room was made, see `DiskBudget`


def _with_class(core: StoreCore, entry: Entry, found: Findings) -> Entry:
    """The new entry, of the class that it takes from those of the same tokens."""
    for _, old in found.same:
        if old is not None and not core.is_expired(old):
            entry_class, source = policy.merged_class((old.entry_class, old.source), (entry.entry_class, entry.source))
            entry = dataclasses.replace(entry, entry_class=entry_class, source=source)
    return entry


@contextmanager
def _same_id_dropped(
    core: StoreCore, c: Connection, plan: PutPlan, entry: Entry, found: Findings, dropped: Dropped
) -> Iterator[None]:
    """Drops an entry of the same tokens and the very id of the new one; what is stored against it stays without it.

    The base of the new entry stays too, even if it was only there for the one that goes.
    """
    if all(id != entry.id for id, _ in found.same):
        yield
        return
    base = plan.base_id
    held = base is not None and queries_chains.is_base(c, base)
    if base is not None and held:
        queries_chains.set_base(c, base, False)
    keep_children(core, c, queries_chains.children(c, entry.id), dropped, entry.stored)
    core.drop(c, entry.id, "replaced", dropped)
    yield
    if base is not None and held:
        queries_chains.set_base(c, base, True)
