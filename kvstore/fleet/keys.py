"""The key of a fleet: who has it can read and publish states, and derive names."""

from __future__ import annotations

import os
import re
import secrets

from ..errors import InvalidInputError, RemoteKeyError
from ..util import fsutil

MIN_BYTES, MAX_BYTES = 16, 64  # BLAKE2b takes a key of at most 64 bytes
NEW_BYTES = 32
_HEX = re.compile(rb"[0-9a-fA-F]{64}")
_TEXT = re.compile(rb"[\x20-\x7e]+\r?\n")
HINT = "`kvstore remote init URL --remote-key FILE` makes a key; copy that file to every machine of the fleet"


def load_keys(given: object) -> list[bytes]:
    """The keys of a fleet, the current one first: bytes, the path of a key file, or a list of these. Raises RemoteKeyError."""
    if given is None:
        raise RemoteKeyError("a remote needs the key of its fleet", hint=f"give remote_key; {HINT}")
    if isinstance(given, list | tuple):
        keys = [_load(each) for each in given]
        if not keys:
            raise RemoteKeyError("remote_key is an empty list", hint=HINT)
        return list(dict.fromkeys(keys))
    return [_load(given)]


def _load(given: object) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return _checked(bytes(given), "remote_key")
    if isinstance(given, str | os.PathLike):
        return _read(os.fspath(given))
    raise RemoteKeyError(f"remote_key is {type(given).__name__}", hint="give bytes, or the path of a key file")


def _read(path: str | bytes) -> bytes:
    shown = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            data = file.read(4096)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RemoteKeyError(f"the key file {shown} cannot be read: {reason}", hint=HINT) from None
    if _TEXT.fullmatch(data):
        data = data.rstrip(b"\r\n")
    if _HEX.fullmatch(data):
        return bytes.fromhex(data.decode())
    return _checked(data, f"the key file {shown}")


def _checked(key: bytes, what: str) -> bytes:
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise RemoteKeyError(f"{what} holds {len(key)} bytes, not {MIN_BYTES} to {MAX_BYTES}", hint=HINT)
    return key


def create_key_file(path: str | os.PathLike[str]) -> None:
    """Writes a new random key as 64 hex digits to a file that only its owner can read. Raises where the file exists."""
    shown = os.fspath(path)
    try:
        descriptor = os.open(shown, os.O_CREAT | os.O_EXCL | os.O_WRONLY, fsutil.PRIVATE)
    except FileExistsError:
        raise InvalidInputError(f"{shown} exists already", hint="give the name of a new file") from None
    except OSError as error:
        raise fsutil.error_of(error, shown, "create") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(NEW_BYTES).hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
