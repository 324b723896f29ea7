"""kvstore keeps LLM sequence states (the KV cache of a prompt, as llama.cpp serialises it) in one SQLite file.

A state that continues a stored prefix is kept as a byte-exact delta against it. See `Store`.
"""

from importlib.metadata import PackageNotFoundError, version

from . import bkvd, layout, meta, operate, slotfile
from .errors import (
    BusyError,
    ClosedError,
    CorruptStoreError,
    DeltaError,
    DiskFullError,
    ForkedError,
    InvalidInputError,
    KVStoreError,
    LayoutError,
    MetaBlockError,
    MigrationError,
    NewerStoreError,
    NotAStoreError,
    NotFoundError,
    OverBudgetError,
    ReadOnlyError,
    RemoteDeniedError,
    RemoteError,
    RemoteKeyError,
    SlotFileError,
    StoreIOError,
    UnsafeFilesystemError,
    WriteBehindError,
    WrongKeyError,
)
from .store.store import Store
from .store.verify import Problem
from .types import Entry, FamilyStats, Match, RemoteMatch, SavedState, Stats

try:
    __version__ = version("llama-kvstore")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BusyError",
    "ClosedError",
    "CorruptStoreError",
    "DeltaError",
    "DiskFullError",
    "Entry",
    "FamilyStats",
    "ForkedError",
    "InvalidInputError",
    "KVStoreError",
    "LayoutError",
    "Match",
    "MetaBlockError",
    "MigrationError",
    "NewerStoreError",
    "NotAStoreError",
    "NotFoundError",
    "OverBudgetError",
    "Problem",
    "ReadOnlyError",
    "RemoteDeniedError",
    "RemoteError",
    "RemoteKeyError",
    "RemoteMatch",
    "SavedState",
    "SlotFileError",
    "Stats",
    "Store",
    "StoreIOError",
    "UnsafeFilesystemError",
    "WriteBehindError",
    "WrongKeyError",
    "bkvd",
    "layout",
    "meta",
    "operate",
    "slotfile",
]
