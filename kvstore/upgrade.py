"""Creates, upgrades and refuses: what happens to a file between its open and its first use."""

from __future__ import annotations

import logging
from importlib import import_module, resources

from . import db
from .db import APPLICATION_ID, Connection, Database
from .errors import NewerStoreError, NotAStoreError, ReadOnlyError

SCHEMA_VERSION = 2
log = logging.getLogger("kvstore")


def schema_sql() -> str:
    """The schema of an empty store, as SQL."""
    return (resources.files("kvstore") / "schema.sql").read_text(encoding="utf-8")


def version_of(c: Connection, path: str) -> int:
    """The schema version of a file, 0 where it is empty.

    Raises NotAStoreError for another program's file, NewerStoreError for one of a newer kvstore; neither is touched.
    """
    application, version = db.application_id(c), db.user_version(c)
    if application == 0 and version == 0 and db.is_empty(c):
        return 0
    if application != APPLICATION_ID or version < 1:
        raise NotAStoreError(f"{path} is an SQLite database of another program", path=path, application_id=application)
    if version > SCHEMA_VERSION:
        raise NewerStoreError(
            f"{path} has schema version {version}, this kvstore reads up to {SCHEMA_VERSION}", path=path, version=version
        )
    return version


def prepare(database: Database) -> None:
    """Brings the file to the current schema: creates it where it is empty, upgrades it where it is old."""
    with database.exclusive() as c:
        version = version_of(c, database.path)
    if version == SCHEMA_VERSION:
        if not database.readonly:
            database.use_wal()
        return
    if database.readonly:
        raise ReadOnlyError(
            f"{database.path} has to be {'created' if version == 0 else 'upgraded'} first",
            path=database.path,
            hint="open it once without readonly",
        )
    if version == 0:
        database.initialise()
        with database.write() as c:
            if version_of(c, database.path) == 0:  # no other process was faster
                db.run_script(c, schema_sql())
        return
    migrations = import_module("kvstore.migrations")  # built on this module's floor: not at import time
    migrations.run(database, version)
    database.use_wal()
