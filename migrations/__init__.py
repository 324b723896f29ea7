"""The steps from each schema version to the next, and how they are run.

The step to version N is the folder `vN` here, whose `STEP` says what it does; it is found by its name, so a new version
adds a folder and changes nothing else. A step is frozen when it is released: it has its own schema and helpers, since
the rest of kvstore follows the newest version (tests/test_migrations_frozen.py lists what a step may import).

A step that rebuilds writes a new file beside the old one (see `files`). Other steps change the file in place, after a copy
unless they say that they need none.
Each step commits together with its version number, so a process killed at any moment leaves a complete store.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

from kvstore.errors import MigrationError
from kvstore.storage import sqlite
from kvstore.storage.db import Connection, Database

from . import files
from .base import Outcome, Plan, Progress, Record, Report, Step

__all__ = ["Outcome", "Plan", "Progress", "Record", "Report", "Step", "dry_run", "plan", "run", "steps"]


def steps() -> list[Step]:
    """All steps, in order."""
    names = (module.name for module in pkgutil.iter_modules(__path__) if re.fullmatch(r"v\d+", module.name))
    found: list[Step] = [importlib.import_module(f"{__name__}.{name}").STEP for name in names]
    return sorted(found, key=lambda step: step.number)


def plan(c: Connection, version: int) -> list[Step]:
    """The steps for a file of this version, without running them. Raises MigrationError if the file cannot take them."""
    ahead = [step for step in steps() if step.number > version]
    if ahead:
        _require(ahead[0], c)
    return ahead


def _require(step: Step, c: Connection) -> None:
    """Raises MigrationError if the file cannot take the step."""
    if (problem := step.precondition(c)) is not None:
        raise MigrationError(f"step {step.number}, {step.name}: {problem}", version=step.number - 1)


def dry_run(database: Database, version: int) -> Plan:
    """The plan that `run` would follow for this file, which may be open read-only."""
    path = os.path.realpath(database.path)
    ahead = [step for step in steps() if step.number > version]
    outcome, needed, problem = Outcome(0), 0, None
    free = files.free_bytes(path)
    with database.read() as c:
        if ahead:
            problem = ahead[0].precondition(c)
        if ahead and problem is None:
            outcome, needed = ahead[0].examine(c), _room(ahead, c, path)
    if problem is None and needed > free:
        problem = f"{needed} bytes are needed on the disk, but only {free} are free"
    return Plan(
        path=database.path,
        from_version=version,
        to_version=ahead[-1].number if ahead else version,
        steps=tuple(ahead),
        entries=outcome.entries,
        records=outcome.records,
        backup=files.backup_name(path, version) if ahead and _keeps(ahead) else None,
        needed=needed,
        free=free,
        problem=problem,
    )


def run(database: Database, version: int, progress: Progress | None = None, *, backup: bool = True) -> Report | None:
    """Upgrades the file to the newest version and reopens `database`. None if another process has just done it.

    backup=False: do not keep the old file. Raises MigrationError, DiskFullError or BusyError. The store is then as it was,
    or of a version in between if a later step that writes a new file failed.
    """
    newest = max(step.number for step in steps())
    report = _run_some(database, version, progress, backup=backup)
    while report is not None and report.to_version < newest:
        more = _run_some(database, report.to_version, progress, backup=False)
        if more is None:
            break
        report = replace(
            report,
            to_version=more.to_version,
            entries=more.entries,
            records=report.records + more.records,
            seconds=report.seconds + more.seconds,
        )
    return report


def _run_some(database: Database, version: int, progress: Progress | None, *, backup: bool) -> Report | None:
    """Takes the steps up to the next one that writes a new file; that one needs this file on the disk, and locked."""
    started = time.monotonic()
    tell = progress or (lambda done, total: None)
    path = os.path.realpath(database.path)
    try:
        with files.locked(database) as c:
            version = sqlite.user_version(c)
            ahead = plan(c, version)
            if not ahead:
                return None
            taken = ahead[:1] + list(takewhile(lambda step: not step.rebuilds, ahead[1:]))
            files.check_room(path, _room(taken, c, path))
            kept = files.backup_name(path, version) if backup and _keeps(taken) else None
            if taken[0].rebuilds:
                outcomes = _rebuild(database, path, c, taken, kept, tell)
            else:
                outcomes = _in_place(database, c, taken, kept, tell)
    finally:
        database.reopen()
    return Report(
        path=database.path,
        from_version=version,
        to_version=taken[-1].number,
        entries=outcomes[-1].entries,
        records=tuple(record for outcome in outcomes for record in outcome.records),
        backup=kept,
        seconds=time.monotonic() - started,
    )


def _keeps(steps: list[Step]) -> bool:
    """Whether the old file is kept when these steps are taken."""
    return any(step.copies for step in steps)


def _room(steps: list[Step], c: Connection, path: str) -> int:
    """The bytes that must be free on the disk: for the new file; or for the copy, and as much for changes in place."""
    first = steps[0]
    return first.room(c) if first.room is not None else 2 * os.stat(path).st_size


def _rebuild(
    database: Database, path: str, old: Connection, steps: list[Step], backup: str | None, progress: Progress
) -> list[Outcome]:
    """Takes the steps in a new file; the first step reads the old file. The new file then replaces the old one."""
    new = path + files.UPGRADING
    outcomes: list[Outcome] = []

    def take(step: Step, c: Connection) -> None:
        if outcomes:
            _require(step, c)
        try:
            outcomes.append(step.apply(c if outcomes else old, c, progress))
        except sqlite.MalformedError as error:  # of the old file: the new one was just written
            raise sqlite.translate(error, path, connection=old) from error
        c.pragma("user_version", step.number)

    files.build(database, new, [partial(take, step) for step in steps])
    old_file = files.identity(path)
    made = False
    try:
        if backup is not None:
            made = files.keep(path, backup, old, database)
        files.replace(new, path, old)
    except BaseException:
        if files.identity(path) == old_file:  # else the new file has the name, and only the backup has the old content
            files.remove(new)
            if made and backup is not None:
                with suppress(OSError):
                    os.unlink(backup)
        raise
    return outcomes


def _in_place(
    database: Database, c: Connection, steps: list[Step], backup: str | None, progress: Progress
) -> list[Outcome]:
    """Takes the steps in the file itself, each in its own transaction. The first transaction is the one of the lock."""
    if backup is not None:
        files.copy(c, backup, database)
    outcomes: list[Outcome] = []
    for step in steps:
        if outcomes:
            c.execute("BEGIN EXCLUSIVE")
            _require(step, c)
        outcomes.append(step.apply(c, c, progress))
        c.pragma("user_version", step.number)
        c.execute("COMMIT")
    return outcomes
