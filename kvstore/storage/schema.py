"""Creates, upgrades and refuses: what happens to a file between its open and its first use."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from ..errors import DiskFullError, ReadOnlyError
from ..util.fsutil import MissingFileError
from . import db, peek, queries_maintenance, queries_prefixes, sqlite
from .db import Connection, Database
from .peek import SCHEMA_VERSION
from .sniff import Header

if TYPE_CHECKING:
    from kvstore.migrations import Plan, Report

log = logging.getLogger("kvstore")


def schema_sql() -> str:
    """The schema of an empty store, as SQL."""
    return (resources.files("kvstore") / "schema.sql").read_text(encoding="utf-8")


def version_of(c: Connection, path: str) -> int:
    """The schema version of a file, 0 where it is empty.

    Raises NotAStoreError for another program's file, NewerStoreError for one of a newer kvstore; neither is touched.
    """
    with sqlite.snapshot(c):  # else a file that another process creates just now could look like somebody else's
        found = Header(sqlite.application_id(c), sqlite.user_version(c), sqlite.is_empty(c))
    peek.refuse(path, found)
    return found.user_version


def prepare(
    database: Database, progress: Callable[[int, int], object] | None = None, *, backup: bool = True
) -> Report | None:
    """Brings the file to the current schema: creates it where it is empty, upgrades it where it is old.

    Gives what the upgrade did, None where there was none. Its records are logged as warnings.
    """
    report = _prepare(database, progress, backup)
    database.may_be_replaced()
    return report


def _prepare(database: Database, progress: Callable[[int, int], object] | None, backup: bool) -> Report | None:
    with database.exclusive() as c:
        version = version_of(c, database.path)
    if version == SCHEMA_VERSION:
        if not database.readonly:
            database.use_wal()
            extend(database)
        return None
    if database.readonly and version == 0:
        raise ReadOnlyError(
            f"{database.path} is empty: the store has to be created first",
            path=database.path,
            hint="`kvstore put` makes it a store; or open it once without readonly",
        )
    if database.readonly:
        raise ReadOnlyError(
            f"{database.path} has to be upgraded first",
            path=database.path,
            hint="`kvstore migrate` upgrades it; or open it once without readonly",
        )
    if version == 0:
        database.initialise()
        with database.write() as c:
            if version_of(c, database.path) == 0:  # no other process was faster
                sqlite.run_script(c, schema_sql())
        return None
    from kvstore import migrations

    log.info("upgrading %s from schema version %d to %d", database.path, version, SCHEMA_VERSION)
    report = migrations.run(database, version, progress, backup=backup)
    database.use_wal()
    extend(database)
    if report is not None:
        _tell(report)
    return report


_ADDITIONS = "-- Additions."
_CREATED = re.compile(r"^CREATE (?:TABLE|INDEX|TRIGGER) (?:IF NOT EXISTS )?(\w+)", re.MULTILINE)
LISTED_AT_OPEN = 4096  # entries whose rows of `prefixes` are made at the first open, 0.1 s; the maintenance makes the others


@functools.cache
def _additions() -> tuple[str, frozenset[str]]:
    """What schema.sql has of later date than the first files of this version: the SQL, and the names that it creates."""
    text = schema_sql()
    sql = text[text.index(_ADDITIONS) : text.index("PRAGMA user_version")]
    return sql, frozenset(_CREATED.findall(sql))


@functools.cache
def _views() -> dict[str, str]:
    """The SQL of each view of schema.sql, by its name, as SQLite keeps it."""
    return {m[2]: m[1] for m in re.finditer(r"^(CREATE VIEW (\w+) .*?);$", schema_sql(), re.MULTILINE | re.DOTALL)}


def _renew_views(c: Connection) -> None:
    present = sqlite.views(c)
    for name, sql in _views().items():
        if present.get(name) != sql:
            sqlite.run_script(c, f"DROP VIEW IF EXISTS {name}; {sql}")


def extend(database: Database) -> None:
    """Gives a file of the current version what an older program did not create, or someone dropped by hand."""
    sql, names = _additions()
    with database.exclusive() as c:
        if names <= sqlite.schema_names(c) and _views().items() <= sqlite.views(c).items():
            return
    try:
        with database.write() as c:
            known = sqlite.schema_names(c)
            _renew_views(c)
            if names <= known:
                return
            sqlite.run_script(c, sql)
            queries_maintenance.mark_unswept(c)  # nobody knows what was done while the triggers were not there
            if "prefixes" not in known:
                queries_prefixes.begin_list(c)
                if queries_prefixes.continue_list(c, LISTED_AT_OPEN):
                    queries_prefixes.continue_list(c, LISTED_AT_OPEN)  # where all were listed it says so
    except DiskFullError as error:  # what is stored can still be read
        log.warning("%s: %s; it is used without its newer indexes", database.path, error.message)


def _tell(report: Report) -> None:
    for record in report.records:
        log.warning("upgrade of %s: entry %s", report.path, record)
    log.info(
        "upgraded %s from schema version %d to %d: %d entries in %.1f s; the old file is %s",
        report.path, report.from_version, report.to_version, report.entries, report.seconds,
        report.backup or "gone",
    )  # fmt: skip


def upgrade(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], object] | None = None,
    *,
    backup: bool = True,
    key: str | None = None,
    timeout: float = 30.0,
) -> Report | None:
    """Upgrades a file; None where it is of the current version already.

    progress(done, total) is called for each entry. backup=False does not keep the old file. Raises MigrationError,
    DiskFullError, BusyError and what opening a store raises; the old store is then as it was.
    """
    database = _open(path, key, timeout, readonly=False)
    try:
        return prepare(database, progress, backup=backup)
    finally:
        database.close()


def dry_run(path: str | os.PathLike[str], *, key: str | None = None, timeout: float = 30.0) -> Plan:
    """What `upgrade` would do with a file, which is only read."""
    from kvstore import migrations

    database = _open(path, key, timeout, readonly=True)
    try:
        with database.read() as c:
            version = version_of(c, database.path)
        return migrations.dry_run(database, version)
    finally:
        database.close()


def _open(path: str | os.PathLike[str], key: str | None, timeout: float, readonly: bool) -> Database:
    name = os.fspath(path)
    if not os.path.exists(name):
        raise MissingFileError(name)
    db.refuse_network_filesystem(name)
    return Database(name, readonly=readonly, timeout=timeout, key=key)
