"""Every exception of kvstore, as one table.

Each class has a stable `code` (for JSON and logs), a process `exit_code` (for the command), `retry` (whether the same
call may succeed later without any change) and a default `hint` that says what to do. Facts are keyword
arguments and become attributes. A miss is not an error: it is `None`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KVStoreError(Exception):
    """Base of all errors of kvstore."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retry: ClassVar[bool] = False
    hint: str = ""

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: code, message, hint, retry and the facts."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "retry": self.retry, **self.facts}


class InvalidInputError(KVStoreError, ValueError):
    """An invalid argument: an empty state, tokens that do not fit int32, an unknown class."""

    code, exit_code = "invalid_input", 2


class NotFoundError(KVStoreError, LookupError):
    """No entry has this id. Only calls that need an entry raise this; `get` and `entry` return None."""

    code, exit_code = "not_found", 3


class LayoutError(KVStoreError, ValueError):
    """The layout of a state is not understood, or does not allow what was asked."""

    code, exit_code = "layout", 4


class DeltaError(KVStoreError, ValueError):
    """A delta that cannot be decoded; the message is one of the format's (see `kvstore.bkvd`)."""

    code, exit_code = "delta", 5


class SlotFileError(KVStoreError, ValueError):
    """The file is not a slot, sequence or session file of llama.cpp, or is truncated."""

    code, exit_code = "slot_file", 6


class MetaBlockError(KVStoreError, ValueError):
    """The meta block is not 512 bytes."""

    code, exit_code = "meta_block", 7


class BusyError(KVStoreError):
    """Another connection held the write lock for longer than the timeout."""

    code, exit_code, retry = "busy", 10, True
    hint = "another process is writing to this store: try again"


class DiskFullError(KVStoreError):
    """The file system has no room; the call left the store as it was."""

    code, exit_code, retry = "disk_full", 11, True
    hint = "free some space on the disk, or give the store a smaller cache_disk_mib"


class OverBudgetError(KVStoreError):
    """The entry cannot fit in cache_disk_mib even if everything else were dropped (facts: missing, in bytes)."""

    code, exit_code = "over_budget", 12
    hint = "raise cache_disk_mib, or delete learned or pinned entries"


class ReadOnlyError(KVStoreError):
    """A write to a store that was opened read-only, or to a file or directory without permission to write."""

    code, exit_code = "read_only", 13


class NotAStoreError(KVStoreError):
    """The file is not a kvstore: it belongs to another program, or is not an SQLite file. It was not changed."""

    code, exit_code = "not_a_store", 14
    hint = "give the path of a kvstore file, or of a file that does not exist yet"


class NewerStoreError(KVStoreError):
    """The file was written by a newer kvstore. It was not changed."""

    code, exit_code = "newer_store", 15
    hint = "upgrade kvstore, or use another file"


class CorruptStoreError(KVStoreError):
    """The file is damaged."""

    code, exit_code = "corrupt", 16
    hint = "`kvstore verify` names what is damaged, `kvstore repair --salvage` copies what can be read"


class UnsafeFilesystemError(KVStoreError):
    """The file is on a network file system, where SQLite's write-ahead log is unsafe."""

    code, exit_code = "unsafe_filesystem", 17
    hint = "keep the store on a local disk"


class MigrationError(KVStoreError):
    """The upgrade failed; the old store is as it was."""

    code, exit_code = "migration", 18


class WrongKeyError(KVStoreError):
    """The key does not open the file, the file is not encrypted, or this SQLite has no cipher."""

    code, exit_code = "wrong_key", 19


class WriteBehindError(KVStoreError):
    """A put in write-behind mode failed after it had returned (facts: ids). Those entries are lost.

    Raised once, by the next call that is not `get`, `match` or `entry`.
    """

    code, exit_code = "write_behind", 20


class ClosedError(KVStoreError):
    """The store was used after `close`."""

    code, exit_code = "closed", 21
    hint = "open a new Store"


class ForkedError(KVStoreError):
    """The store was opened before this process was forked; connections of SQLite do not survive a fork."""

    code, exit_code = "forked", 22
    hint = "open the Store in the child, after the fork"


class StoreIOError(KVStoreError, OSError):
    """The operating system refused a read or write of the store's file."""

    code, exit_code = "io", 23


class RemoteError(KVStoreError):
    """The object store of a fleet cannot be reached, or does not do what it was asked. The local store goes on without it."""

    code, exit_code, retry = "remote", 24, True
    hint = "check the address of the remote and the network; the local store works without it"


class RemoteKeyError(KVStoreError, ValueError):
    """The key of the fleet is missing, or is not a key."""

    code, exit_code = "remote_key", 25


class RemoteDeniedError(KVStoreError):
    """The object store refuses the credentials, or they lack a permission."""

    code, exit_code = "remote_denied", 26
    hint = "check the credentials of the object store and what they may do: docs/fleet.md names the permissions"


def extra(name: str) -> str:
    """The hint that says how to install an optional part."""
    return f"in a checkout of kvstore: pip install '.[{name}]' (once it is published: 'llama-kvstore[{name}]')"
