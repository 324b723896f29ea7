"""Keys of encrypted files: checks of a key, and the errors for a wrong key or an SQLite without a cipher.

No message, log line or repr contains a key, or a part of one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import metadata
from typing import Any

from ..errors import InvalidInputError, KVStoreError, NotAStoreError, WrongKeyError
from ..util.validate import is_text

PLAIN = "apsw>=3.46,!=3.54.0.0"
CIPHERS = "apsw-sqlite3mc>=3.46,!=3.54.0.0"
# SQLite's smallest page: the size of a database file is a multiple of it.
_SMALLEST_PAGE = 512


def install(requirement: str) -> str:
    """The commands that install one of the two packages over the other: pip takes both for independent."""
    return (
        f'run `pip install --force-reinstall --no-deps "{requirement}"` '
        f'(with uv: `uv pip install --reinstall --no-deps "{requirement}"`)'
    )


def check(key: Any) -> None:
    """Raises InvalidInputError where `key` cannot be a key."""
    if not isinstance(key, str):
        raise InvalidInputError(f"key must be a str, not {type(key).__name__}", hint="give the key as text")
    if not key:  # SQLite would take it for "not encrypted"
        raise InvalidInputError(
            "key is empty", hint="give at least one character; without a key the store is not encrypted"
        )
    if "\0" in key:
        raise InvalidInputError("key contains a NUL character", hint="give a key of other characters")
    if not is_text(key):
        raise InvalidInputError("key is not valid text: it has lone surrogates", hint="give a key that UTF-8 can encode")


def no_cipher(path: str) -> WrongKeyError:
    """A key was given, and the SQLite that `apsw` has cannot encrypt."""
    why = "encryption needs the package apsw-sqlite3mc, which is not installed"
    with suppress(metadata.PackageNotFoundError):
        metadata.version("apsw-sqlite3mc")
        why = "apsw-sqlite3mc is installed, but the package apsw, which shares its folder, was written over it"
    return WrongKeyError(
        f"{path} was opened with a key, and the SQLite of this Python has no cipher: {why}",
        path=path,
        hint=install(CIPHERS) + ", then start Python again",
    )


def not_encrypted(path: str) -> WrongKeyError:
    """A key was given for a plain store."""
    return WrongKeyError(
        f"{path} is not encrypted, but a key was given", path=path, hint="open it without key= or --key-file"
    )


def refused(path: str) -> KVStoreError:
    """SQLite cannot decrypt the first page of a file."""
    with suppress(OSError):
        size = os.stat(path).st_size
        if size % _SMALLEST_PAGE:
            return NotAStoreError(f"{path} is not a kvstore, encrypted or not: no database has {size} bytes", path=path)
    return WrongKeyError(
        f"the key does not open {path}",
        path=path,
        hint="give the key it was created with; the same is said of a file that is not a store, or damaged at its start",
    )


def damaged_installation() -> str:
    """What to do where the package `apsw` has lost its files."""
    return (
        "the package apsw is incomplete: apsw and apsw-sqlite3mc share one folder, and removing one removes files of the "
        f"other. For a store without encryption, {install(PLAIN)}. For an encrypted one, {install(CIPHERS)}."
    )
