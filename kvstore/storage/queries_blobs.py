"""The SQL of blobs and their chunks, and of the pages that they fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CorruptStoreError
from ..types import Bytes
from . import geometry
from .db import Connection
from .queries import I63, checked_int, damaged_row, shown, signed, unsigned
from .sqlite import zeroblob

PARTS = ("main", "draft")
KINDS = ("full", "bkvd")


@dataclass(frozen=True, slots=True)
class BlobRow:
    """One state of an entry as it lies in the file; `kind` is 'full' or 'bkvd', `stored` the bytes in chunks.

    `sample` is the hash that a delta against this state records; None in files of an older program, until it is needed.
    """

    id: int
    part: str
    kind: str
    size: int
    stored: int
    digest: bytes
    sample: int | None = None


BLOB = "b.id, b.part, b.kind, b.size, b.stored, b.digest, b.sample"


def blobs(c: Connection, id: int) -> list[BlobRow]:
    """The states of an entry; none where the entry is gone and its blobs were left behind."""
    sql = f"""SELECT {BLOB} FROM blobs b WHERE entry = ?1
 AND EXISTS (SELECT 1 FROM entries e JOIN meta m ON m.entry = e.id WHERE e.id = ?1) ORDER BY part DESC"""
    return [blob_row(id, row) for row in c.execute(sql, (signed(id),))]


def blob_row(id: int, row: Sequence[Any]) -> BlobRow:
    """A row of blobs that anything may have written. Raises CorruptStoreError."""
    if row[1] not in PARTS or row[2] not in KINDS:
        raise damaged_row(id, f"it has a {shown(row[1])} state of the kind {shown(row[2])}")
    if not isinstance(row[5], bytes) or len(row[5]) != 16:
        raise damaged_row(id, f"the digest of its {row[1]} state is {shown(row[5])}")
    size = checked_int(id, f"size of its {row[1]} state", row[3], 1)
    stored = checked_int(id, f"stored of its {row[1]} state", row[4], 1)
    sample = None if row[6] is None else unsigned(checked_int(id, f"sample of its {row[1]} state", row[6], -I63))
    return BlobRow(checked_int(id, "a blob's id", row[0], -I63), row[1], row[2], size, stored, row[5], sample)


def version(c: Connection, id: int) -> tuple[int, ...]:
    """The version of a stored entry: its blob ids, main first. Empty if the entry is gone. A blob id is never used again."""
    return tuple(row.id for row in blobs(c, id))


def stage_blob(c: Connection, part: str, kind: str, size: int, stored: int, writer: str) -> int:
    """Inserts a blob that does not belong to an entry yet; gives its id."""
    c.execute(
        "INSERT INTO blobs(part, kind, size, stored, writer) VALUES(?,?,?,?,?)", (part, kind, size, stored, writer)
    )
    return c.last_insert_rowid()


def add_blob(
    c: Connection, part: str, kind: str, size: int, stored: int, id: int, digest: bytes, sample: int | None
) -> int:
    """A blob of an entry that is there, in the transaction that also writes its chunks; gives its id."""
    c.execute(
        "INSERT INTO blobs(part, kind, size, stored, entry, digest, sample) VALUES(?,?,?,?,?,?,?)",
        (part, kind, size, stored, signed(id), digest, None if sample is None else signed(sample)),
    )
    return c.last_insert_rowid()


def finish_blob(c: Connection, blob: int, id: int, digest: bytes, sample: int | None) -> bool:
    """Hands a staged blob to its entry; False where the blob is gone."""
    values = signed(id), digest, None if sample is None else signed(sample), blob
    c.execute("UPDATE blobs SET entry = ?, digest = ?, sample = ?, writer = NULL WHERE id = ?", values)
    return c.changes() == 1


def insert_chunk(c: Connection, blob: int, seq: int, data: Bytes | bytes) -> None:
    # Binding 256 MiB in chunks took 0.23-0.55 s (two copies, fresh pages each time); zeroblob + blob write takes 0.19 s.
    sql = "INSERT INTO chunks(blob, seq, data) VALUES(?,?,?)"
    if len(data) <= geometry.IN_PLACE_BYTES:
        c.execute(sql, (blob, seq, data))
        return
    c.execute(sql, (blob, seq, zeroblob(len(data))))
    with c.blob_open("main", "chunks", "data", c.last_insert_rowid(), True) as handle:
        handle.write(data)


def chunk_sizes(c: Connection, blob: int) -> list[tuple[int, int, int]]:
    """(rowid, seq, bytes) of a blob's chunks, in order."""
    sql = "SELECT id, seq, length(data) FROM chunks WHERE blob = ? ORDER BY seq"
    rows = [(r[0], r[1], r[2]) for r in c.execute(sql, (blob,))]
    if not all(isinstance(n, int) for row in rows for n in row):
        raise CorruptStoreError(f"blob {blob} has damaged chunks")
    return rows


def chunks_of(c: Connection, blobs: Sequence[int]) -> dict[int, list[tuple[int, int, int]]]:
    """`chunk_sizes` of several blobs, by blob."""
    sql = """SELECT k.blob, k.id, k.seq, length(k.data) FROM json_each(?) j CROSS JOIN chunks k ON k.blob = j.value
 ORDER BY j.key, k.seq"""
    found: dict[int, list[tuple[int, int, int]]] = {blob: [] for blob in blobs}
    for blob, *row in c.execute(sql, ("[" + ",".join(map(str, blobs)) + "]",)):
        if not all(isinstance(n, int) for n in row):
            raise CorruptStoreError(f"blob {blob} has damaged chunks")
        found[blob].append((row[0], row[1], row[2]))
    return found


def chunk_total(c: Connection, blob: int) -> tuple[int, int]:
    """Number and bytes of a blob's chunks."""
    row = c.execute("SELECT count(*), coalesce(sum(length(data)), 0) FROM chunks WHERE blob = ?", (blob,)).fetchone()
    return (0, 0) if row is None else (row[0], row[1])


def delete_blob(c: Connection, blob: int) -> None:
    # Taken from its entry first: an entry that loses its main state by DELETE is one that someone damaged by hand.
    c.execute("UPDATE blobs SET entry = NULL, writer = '' WHERE id = ? AND entry IS NOT NULL", (blob,))
    c.execute("DELETE FROM blobs WHERE id = ?", (blob,))


def blob_writer(c: Connection, blob: int) -> str | None:
    """The writer of a staged blob; None if the blob is gone or published."""
    row = c.execute("SELECT writer FROM blobs WHERE id = ?", (blob,)).fetchone()
    return None if row is None else row[0]


def staged(c: Connection) -> list[tuple[int, str]]:
    """(blob, writer) of every blob that is being written, or was when its writer died. The writer may be any text."""
    rows = c.execute("SELECT id, CAST(coalesce(writer, '') AS BLOB) FROM blobs WHERE entry IS NULL")
    return [(r[0], r[1].decode("utf-8", "replace")) for r in rows]


def delete_staged(c: Connection, blob: int) -> bool:
    """Deletes a blob that does not belong to an entry yet."""
    c.execute("DELETE FROM blobs WHERE id = ? AND entry IS NULL", (blob,))
    return c.changes() == 1


def detach_blobs(c: Connection, id: int) -> None:
    """Leaves the blobs of an entry, and of those stored against it, staged by nobody: the entry can go without them."""
    sql = """UPDATE blobs SET entry = NULL, writer = '' WHERE entry IN (WITH RECURSIVE down(id) AS (
 SELECT ?1 UNION SELECT m.entry FROM down d CROSS JOIN meta m ON m.parent = d.id) SELECT id FROM down)"""
    c.execute(sql, (signed(id),))


def delete_last_chunks(c: Connection, blob: int, n: int) -> bool:
    """Deletes up to n chunks of a blob without an entry; False if it has none."""
    sql = """DELETE FROM chunks WHERE id IN (SELECT k.id FROM chunks k JOIN blobs b ON b.id = k.blob
 WHERE k.blob = ? AND b.entry IS NULL ORDER BY k.seq DESC LIMIT ?)"""
    c.execute(sql, (blob, n))
    return c.changes() > 0


def pages(c: Connection) -> tuple[int, int, int]:
    """(page size, pages in the file, free pages among them)."""
    return int(c.pragma("page_size")), int(c.pragma("page_count")), int(c.pragma("freelist_count"))


def incremental_vacuum(c: Connection, n_pages: int) -> None:
    """Gives up to n_pages free pages back to the file system, at the next checkpoint."""
    for _ in c.execute(f"PRAGMA incremental_vacuum({int(n_pages)})"):
        pass
