"""Version 2 to 3: entries may be stored against entries that are deltas themselves, and stay as bases of others.

The file is changed in place, in one transaction, and no state is read or written: what is stored against a whole entry is
already a chain. The samples of states are computed when the first delta against each needs one.

Frozen: `step_v3.sql` is version 3's own, whatever later versions make of the schema.
"""

from __future__ import annotations

from importlib import resources

from kvstore.storage.db import Connection

from ..base import Outcome, Progress, Step, count_entries

TABLES = {"fingerprints", "entries", "cuts", "meta", "blobs", "chunks", "families", "counters", "totals"}
ENTRY_BYTES = 1024  # of an entry's rows in indexes, beside its tokens


def sql() -> str:
    """The statements of the step."""
    return (resources.files(__package__) / "step_v3.sql").read_text(encoding="utf-8")


def missing_tables(c: Connection) -> str | None:
    there = {row[0] for row in c.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    missing = sorted(TABLES - there)
    return f"the table {missing[0]} is missing" if missing else None


def room(c: Connection) -> int:
    """What the new indexes, and the journal of the old ones, take at most."""
    n, n_bytes = c.execute("SELECT count(*), coalesce(sum(4 * n_tokens), 0) FROM entries").fetchone() or (0, 0)
    return int(4 * n_bytes + ENTRY_BYTES * n + (8 << 20))


def apply(old: Connection, new: Connection, progress: Progress) -> Outcome:
    for _ in new.execute(sql()):
        pass
    return Outcome(count_entries(new))


STEP = Step(
    number=3,
    name="chains of deltas",
    description="An entry may be stored against one that is a delta itself. Columns and indexes are added in the file; no "
    "state is rewritten, and no copy of the file is made.",
    precondition=missing_tables,
    apply=apply,
    room=room,
    copies=False,
)
