"""The steps from each schema version to the next, and how they are run.

A step that rebuilds writes a new file beside the old one (see `files`); the others change the file in place, after a copy.
Each commits together with its version number, so a process killed at any moment leaves a store that is whole.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial

from kvstore import db
from kvstore.db import Connection, Database
from kvstore.errors import MigrationError

from . import files, step_2
from .base import Outcome, Plan, Progress, Record, Report, Step

STEPS: tuple[Step, ...] = (step_2.STEP,)

__all__ = ["STEPS", "Outcome", "Plan", "Progress", "Record", "Report", "Step", "dry_run", "plan", "run"]


def plan(c: Connection, version: int) -> list[Step]:
    """The steps that a file of this version would take, without running them. Raises MigrationError where it can not."""
    steps = [step for step in STEPS if step.number > version]
    if steps and (problem := steps[0].precondition(c)) is not None:
        raise MigrationError(f"step {steps[0].number}, {steps[0].name}: {problem}", version=version)
    return steps


def dry_run(database: Database, version: int) -> Plan:
    """What `run` would do with this file, which may be open read-only."""
    path = os.path.realpath(database.path)
    steps = [step for step in STEPS if step.number > version]
    outcome, needed, problem = Outcome(0), 0, None
    free = files.free_bytes(path)
    with database.read() as c:
        if steps:
            problem = steps[0].precondition(c)
        if steps and problem is None:
            outcome, needed = steps[0].examine(c), _room(steps, c, path)
    if problem is None and needed > free:
        problem = f"{needed} bytes are needed on the disk, {free} are free"
    return Plan(
        path=database.path,
        from_version=version,
        to_version=steps[-1].number if steps else version,
        steps=tuple(steps),
        entries=outcome.entries,
        records=outcome.records,
        backup=files.backup_name(path, version) if steps else None,
        needed=needed,
        free=free,
        problem=problem,
    )


def run(database: Database, version: int, progress: Progress | None = None, *, backup: bool = True) -> Report | None:
    """Brings the file to the newest version; None where another process has just done it. `database` is open on it then.

    backup=False does not keep the old file. Raises MigrationError, DiskFullError, BusyError; the old store is then as it was.
    """
    started = time.monotonic()
    tell = progress or (lambda done, total: None)
    path = os.path.realpath(database.path)
    try:
        with files.locked(database) as c:
            version = db.user_version(c)
            steps = plan(c, version)
            if not steps:
                return None
            files.check_room(path, _room(steps, c, path))
            kept = files.backup_name(path, version) if backup else None
            if steps[0].rebuilds:
                outcomes = _rebuild(database, path, c, steps, kept, tell)
            else:
                outcomes = _in_place(database, c, steps, kept, tell)
    finally:
        database.reopen()
    return Report(
        path=database.path,
        from_version=version,
        to_version=steps[-1].number,
        entries=outcomes[-1].entries,
        records=tuple(record for outcome in outcomes for record in outcome.records),
        backup=kept,
        seconds=time.monotonic() - started,
    )


def _room(steps: list[Step], c: Connection, path: str) -> int:
    """The bytes that the disk must have free: the new file, or the copy and as much again for what the steps write."""
    first = steps[0]
    return first.room(c) if first.room is not None else 2 * os.stat(path).st_size


def _rebuild(
    database: Database, path: str, old: Connection, steps: list[Step], backup: str | None, progress: Progress
) -> list[Outcome]:
    """Takes the steps in a new file, the first one out of the old file; the new one then takes the old one's name."""
    new = path + files.UPGRADING
    outcomes: list[Outcome] = []

    def take(step: Step, c: Connection) -> None:
        outcomes.append(step.apply(c if outcomes else old, c, progress))
        c.pragma("user_version", step.number)

    files.build(database, new, [partial(take, step) for step in steps])
    old_file = files.identity(path)
    made = False
    try:
        if backup is not None:
            made = files.keep(path, backup, old, database)
        files.replace(new, path, old)
    except BaseException:
        if files.identity(path) == old_file:  # else the new file has the name, and the backup is all there is of the old one
            files.remove(new)
            if made and backup is not None:
                with suppress(OSError):
                    os.unlink(backup)
        raise
    return outcomes


def _in_place(
    database: Database, c: Connection, steps: list[Step], backup: str | None, progress: Progress
) -> list[Outcome]:
    """Takes the steps in the file itself, each in its own transaction; the first one is that of the lock."""
    if backup is not None:
        files.copy(c, backup, database)
    outcomes: list[Outcome] = []
    for step in steps:
        if outcomes:
            c.execute("BEGIN EXCLUSIVE")
        outcomes.append(step.apply(c, c, progress))
        c.pragma("user_version", step.number)
        c.execute("COMMIT")
    return outcomes
