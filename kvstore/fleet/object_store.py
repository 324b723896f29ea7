"""The object store of a fleet, as obstore gives it: the only module that imports obstore.

Every request is counted, and every failure leaves as RemoteError, RemoteDeniedError or GoneError. No request is conditional,
and no text that is logged or raised holds a credential.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import InvalidInputError, RemoteDeniedError, RemoteError, extra
from .index import Listed
from .sealing import PIECE

try:
    import obstore
    from obstore import exceptions as failures
    from obstore import store as stores
except ImportError as _error:
    raise InvalidInputError("a remote needs obstore", hint=extra("remote")) from _error

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
NAMES_PER_PAGE = 1000
UPLOADS_AT_ONCE = 4
# The defaults of obstore are 10 retries in 3 minutes: too long for something that can be computed instead.
CLIENT_OPTIONS = {"connect_timeout": "1s", "timeout": "20s"}
RETRY_CONFIG: dict[str, Any] = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=8),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}
_MEMORY: dict[str, Any] = {}
_MEMORY_LOCK = threading.Lock()
_SECRET_NAMES = re.compile(r"secret|token|password|key|sas|credential|authorization", re.IGNORECASE)
_DENIED = re.compile(r"status code: 40[13]\b")
MAX_REASON = 200


class GoneError(Exception):
    """There is no object of this name."""


class ObjectStore:
    """One root in an object store. All calls but `blocking` ones are for an event loop, and can be cancelled."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, create: bool = True) -> None:
        """Makes no request. Raises InvalidInputError for an address or options that cannot be right.

        create: a folder that does not exist is made.
        """
        self.url = url
        self._create = create
        self.requests: Counter[str] = Counter()
        given = dict(options or {})
        self._secrets = _secrets(given)
        self._store = self._build(given)

    def _build(self, options: dict[str, Any]) -> Any:
        if not isinstance(self.url, str) or "://" not in self.url:
            raise InvalidInputError(f"remote is {self.url!r}", hint=f"give an address: {', '.join(SCHEMES)}://...")
        parts = urlsplit(self.url)
        if parts.scheme not in SCHEMES:
            raise InvalidInputError(f"remote has the scheme {parts.scheme!r}", hint=f"give one of {', '.join(SCHEMES)}")
        if parts.password or (parts.username and not parts.scheme.startswith("abfs")) or parts.query:
            self.url = f"{parts.scheme}://{parts.hostname}{parts.path}"
            raise InvalidInputError(
                f"the address of the remote {self.url} holds credentials", hint="credentials come from the environment"
            )
        try:
            if parts.scheme == "memory":
                with _MEMORY_LOCK:
                    return _MEMORY.setdefault(self.url, stores.MemoryStore())
            if parts.scheme == "file":
                return _folder(parts.netloc, parts.path, options, self._create)
            if not parts.netloc:
                raise InvalidInputError(f"remote {self.url} names no bucket", hint=f"give {parts.scheme}://BUCKET/PREFIX")
            client = {**CLIENT_OPTIONS, **_mapping(options.pop("client_options", None), "client_options")}
            retry = {**RETRY_CONFIG, **_mapping(options.pop("retry_config", None), "retry_config")}
            if _endpoint(options).startswith("http://"):
                client.setdefault("allow_http", True)
            make: Any = stores.from_url
            return make(self.url, client_options=client, retry_config=retry, **options)
        except (failures.BaseError, ValueError, TypeError, OSError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(
                f"the remote {self.url} cannot be used: {self._reason(error)}", hint="check the address and remote_options"
            ) from None

    # -- requests

    async def pages(self, prefix: str, offset: str | None = None) -> AsyncIterator[list[Listed]]:
        """The objects below a prefix, in the order of their paths, a page at a time."""
        first = True
        self.requests["LIST"] += 1
        with self._translated("list"):
            async for page in obstore.list(self._store, prefix, offset=offset, chunk_size=NAMES_PER_PAGE):
                self.requests["LIST"] += not first
                first = False
                yield [Listed(o["path"], int(o["size"]), int(o["last_modified"].timestamp())) for o in page]
                await asyncio.sleep(0)

    async def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly below a prefix."""
        with self._translated("list"):
            self.requests["LIST"] += 1
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])

    async def get_range(self, path: str, start: int, length: int) -> memoryview:
        with self._translated("get", path):
            self.requests["GET"] += 1
            data = memoryview(await obstore.get_range_async(self._store, path, start=start, length=length)).cast("B")
        return data

    async def put(self, path: str, size: int, pieces: Iterator[bytes | bytearray]) -> None:
        """One put; in parts where it is large. Nobody sees the object before all of it is there."""
        with self._translated("put", path):
            self.requests["PUT"] += 1
            if size <= PIECE:
                data = await asyncio.get_running_loop().run_in_executor(None, b"".join, pieces)
                await obstore.put_async(self._store, path, data, use_multipart=False)
            else:
                await obstore.put_async(
                    self._store, path, _beside(pieces), use_multipart=True, chunk_size=PIECE, max_concurrency=UPLOADS_AT_ONCE
                )

    async def copy(self, source: str, target: str) -> None:
        """A copy inside the object store: no bytes pass through here."""
        with self._translated("copy", source):
            self.requests["COPY"] += 1
            if self.folder is not None:
                # obstore makes a hard link, which keeps the time of the old file: the copy would be as old.
                await asyncio.get_running_loop().run_in_executor(None, _copy_file, self.folder / source, self.folder / target)
            else:
                await obstore.copy_async(self._store, source, target)

    async def delete(self, paths: list[str]) -> None:
        """Objects that are gone already are no failure."""
        try:
            with self._translated("delete"):
                self.requests["DELETE"] += 1
                await obstore.delete_async(self._store, paths)
        except GoneError:
            if len(paths) > 1:
                for path in paths:
                    await self.delete([path])

    async def modified(self, path: str) -> int:
        """When the object was written, by the clock of the object store."""
        with self._translated("head", path):
            self.requests["HEAD"] += 1
            found = await obstore.head_async(self._store, path)
        return int(found["last_modified"].timestamp())

    # -- failures

    @contextmanager
    def _translated(self, what: str, path: str = "") -> Iterator[None]:
        try:
            yield
        except (failures.NotFoundError, FileNotFoundError) as error:
            if what == "list":  # a folder that was never written to
                return
            raise GoneError(path) from error
        except (failures.PermissionDeniedError, failures.UnauthenticatedError, PermissionError) as error:
            raise RemoteDeniedError(f"{self.url} denies to {what}", url=self.url, operation=what) from error
        except (failures.BaseError, OSError, ValueError) as error:
            # obstore has a class for this where it reads and writes, and none where it lists.
            if _DENIED.search(str(error)):
                raise RemoteDeniedError(f"{self.url} denies to {what}", url=self.url, operation=what) from error
            raise RemoteError(f"{self.url} failed to {what}: {self._reason(error)}", url=self.url, operation=what) from error

    def _reason(self, error: BaseException) -> str:
        """What obstore says, without credentials and signatures."""
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = re.sub(r"(https?://[^/\s]+)/[^\s]*", r"\1/...", text)
        text = text.split("Debug source:")[0].strip()
        return text[:MAX_REASON] or type(error).__name__

    @property
    def folder(self) -> Path | None:
        """The folder of a `file://` store; None for others."""
        prefix = getattr(self._store, "prefix", None)
        return Path(prefix) if isinstance(self._store, stores.LocalStore) and prefix is not None else None


def _copy_file(source: Path, target: Path) -> None:
    """Nobody sees the copy before all of it is there: listings leave names out that end so."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}#{secrets.randbelow(1 << 30)}")
    try:
        shutil.copyfile(source, part)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


async def _beside(pieces: Iterator[bytes | bytearray]) -> AsyncIterator[bytes | bytearray]:
    """Pieces that are made by another thread, so that the loop stays free."""
    loop = asyncio.get_running_loop()
    while (piece := await loop.run_in_executor(None, next, pieces, None)) is not None:
        yield piece


def _folder(host: str, path: str, options: Mapping[str, Any], create: bool) -> Any:
    if host not in ("", "localhost"):
        raise InvalidInputError(f"remote file://{host}{path} names a host", hint="give file:///FOLDER")
    if options:
        raise InvalidInputError(f"a folder has no option {sorted(options)[0]!r}", hint="leave it out of remote_options")
    folder = unquote(path)
    if os.name == "nt":
        folder = folder.lstrip("/")
    if not folder.strip("/"):
        raise InvalidInputError("remote file:// names no folder", hint="give file:///FOLDER")
    if not create and not os.path.isdir(folder):
        raise InvalidInputError(f"{folder} is not a folder", hint="check the address: file:///FOLDER")
    return stores.LocalStore(folder, mkdir=True)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{what} in remote_options is {type(value).__name__}, not a dict")
    return dict(value)


def _endpoint(options: Mapping[str, Any]) -> str:
    """The address that requests go to, where it is not the usual one of the service."""
    for name, value in options.items():
        if name.lower().endswith(("endpoint", "endpoint_url")):
            return str(value)
    found = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    return next((value for value in found if value), "")


def _secrets(options: Mapping[str, Any]) -> list[str]:
    """Values that no text may show."""
    found = [str(value) for name, value in options.items() if _SECRET_NAMES.search(name) and isinstance(value, str)]
    clouds = ("AWS_", "GOOGLE_", "AZURE_")
    found += [value for name, value in os.environ.items() if name.startswith(clouds) and _SECRET_NAMES.search(name)]
    return sorted({value for value in found if len(value) >= 4}, key=len, reverse=True)
