"""The proxy as an ASGI application: forwarding, the key guard, and the routes of its own pages."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .backend_link import BackendLink, Settings
from .cache import TAIL_BYTES, Cache
from .http_client import Answer, HttpError
from .llama_backend import LlamaServerBackend
from .metrics import Metrics
from .pages import Pages
from .prompt import GENERATES, parse
from .saver import Saver
from .slot_memory import SlotMemory
from .upstream import Upstream, end_to_end

log = logging.getLogger("kvstore.proxy")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# The bytes and seconds spent on reading the body of a refused request: if the connection is closed with unread data, the
# client may never see the answer.
_DRAINED, _DRAIN_SECONDS = 16 << 20, 10.0


async def _drain(scope: Scope, receive: Receive) -> None:
    names = {name.lower() for name, _ in scope["headers"]}
    if b"expect" in names or not names & {b"content-length", b"transfer-encoding"}:
        return  # a client that waits for permission to send gets the answer at once

    async def read() -> None:
        total = 0
        while total < _DRAINED:
            message = await receive()
            total += len(message.get("body", b""))
            if not message.get("more_body"):
                return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), _DRAIN_SECONDS)


def _target(scope: Scope) -> bytes:
    """The path as the client wrote it."""
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    return target


def _error(status: int, message: str, kind: str, scope: Scope, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as llama-server writes it: the body of the OpenAI API, readable by pages of any origin. The connection is
    closed, since the request may not have been read to its end."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    origin = next((value for name, value in scope["headers"] if name == b"origin"), b"").decode("latin-1")
    cors = {"Access-Control-Allow-Origin": origin, "Connection": "close"}
    headers = {"Content-Type": "application/json; charset=utf-8", **cors, **(headers or {})}
    return JSONResponse(body, status_code=status, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"the proxy failed: {type(error).__name__}", "server_error", request.scope)


class KeyGuard:
    """Refuses requests without the key: as a bearer token, as X-Api-Key, or as the password of HTTP Basic (for a browser).

    As with llama-server, OPTIONS (browsers send it without the key) and some paths need no key. Such a request is
    forwarded without the server's key.
    """

    def __init__(self, app: ASGIApp, key: str | None, listen_host: str, is_open: Callable[[bytes], bool]) -> None:
        self.app = app
        self.is_open = is_open
        self.key = None if key is None else key.encode()
        self.hosts = {*LOOPBACK_NAMES, listen_host}

    def _given(self, headers: Mapping[str, str]) -> bytes:
        value = headers.get("authorization", "")
        kind, _, token = value.partition(" ")
        if kind.lower() == "bearer":
            return token.strip().encode("latin-1")
        if kind.lower() == "basic":
            with contextlib.suppress(binascii.Error, ValueError):
                return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
        return headers.get("x-api-key", "").encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            own = scope["path"].startswith("/kvstore") or (scope["path"] == "/metrics" and scope["method"] != "OPTIONS")
            response: Response | None = None
            if self.key is not None:
                if hmac.compare_digest(self._given(request.headers), self.key):
                    scope["with_key"] = True
                elif own or not (scope["method"] == "OPTIONS" or self.is_open(_target(scope))):
                    asks = {"WWW-Authenticate": 'Basic realm="kvstore"'} if own else {}
                    response = _error(401, "Invalid API Key", "authentication_error", scope, asks)
            elif own and (request.url.hostname or "") not in self.hosts:
                message = "ask for this page by the address that the proxy listens on"
                response = _error(403, message, "permission_error", scope)
            else:
                scope["with_key"] = True
            if response is not None:
                await _drain(scope, receive)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _Client:
    """The sender of a request: the body as it arrives, and the end of the connection."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self.sent_all = asyncio.Event()
        self._left = False
        names = {name.lower() for name, _ in scope["headers"]}
        self._has_body = bool(names & {b"content-length", b"transfer-encoding"})

    def body(self) -> AsyncIterator[bytes] | None:
        if not self._has_body:
            self.sent_all.set()
            return None
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while not self.sent_all.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left = True
                self.sent_all.set()
                await asyncio.Event().wait()  # until the request is cancelled: it must not look complete to the server
            if not message.get("more_body"):
                self.sent_all.set()
            if message.get("body"):
                yield message["body"]

    async def drain(self) -> None:
        """Reads and discards the rest of the body."""
        if self.sent_all.is_set():
            return
        # The task that sends the body to the server may still be reading it too.
        tasks = {asyncio.create_task(_drain(self._scope, self._receive)), asyncio.create_task(self.sent_all.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def gone(self) -> None:
        """Returns when the client has left."""
        await self.sent_all.wait()
        while not self._left and (await self._receive())["type"] != "http.disconnect":
            pass


class Forwarder:
    """Answers all requests but those for the proxy's own pages."""

    def __init__(self, upstream: Upstream, link: BackendLink, cache: Cache, metrics: Metrics, *, keyed: bool) -> None:
        self.upstream = upstream
        self.link = link
        self.cache = cache
        self.metrics = metrics
        # The server must not see the proxy's own key.
        self.keep_authorization = not keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        client = _Client(scope, receive)
        if scope["method"] == "POST" and scope["path"] in GENERATES:
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return
            client.sent_all.set()
            work = asyncio.create_task(self._generate(scope, body, send))
        else:
            work = asyncio.create_task(self._pass(scope, client, send))
        gone = asyncio.create_task(client.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
            else:
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()

    async def _generate(self, scope: Scope, body: bytes, send: Send) -> None:
        headers = [(n, v) for n, v in scope["headers"] if n.lower() != b"content-length"]
        prompt = parse(scope["path"], body) if self._cacheable(scope) else None
        lease = None if prompt is None else await self.cache.lease(scope["path"], prompt)
        if lease is None:
            self.metrics.count("passed")
            with self.link.slots.passing(taints=self.link.backend.taints(body)):
                await self._send_on(scope, headers, body, send)
            return
        status: int | None = None
        tail = b""
        try:
            status, tail = await self._send_on(scope, headers, lease.body, send)
        finally:
            # Also runs when the client went away: then this task is being cancelled.
            await asyncio.shield(lease.finish(status, tail))

    def _cacheable(self, scope: Scope) -> bool:
        return not any(name.lower() == b"content-encoding" for name, _ in scope["headers"])

    async def _pass(self, scope: Scope, client: _Client, send: Send) -> None:
        content = client.body()
        backend, path = self.link.backend, scope["path"]
        if scope["method"] == "POST" and not backend.only_reads(path):
            try:
                with self.link.slots.passing(slot_id=backend.slot_of(path)):
                    await self._send_on(scope, scope["headers"], content, send, client)
            finally:
                if backend.changes_adapters(path):
                    self.link.invalidate()
            return
        await self._send_on(scope, scope["headers"], content, send, client)

    async def _send_on(
        self, scope: Scope, headers: Any, content: Any, send: Send, client: _Client | None = None
    ) -> tuple[int | None, bytes]:
        """Status and the end of the body, after all of it was sent; status None where the server broke off."""
        target = _target(scope)
        if scope.get("query_string"):
            target += b"?" + scope["query_string"]
        begun = False
        try:
            async with self.upstream.forward(
                scope["method"],
                target,
                headers,
                content,
                keep_authorization=self.keep_authorization,
                with_key=scope.get("with_key", False),
            ) as answer:
                begun = True
                return answer.status, await _relay(answer, send, client)
        except HttpError as error:
            self.link.mark_unverified()
            if begun:
                # The answer is not completed and the connection is closed: the client sees a broken answer.
                log.warning("llama-server broke off: %s", error)
                return None, b""
            log.warning("llama-server cannot be reached: %s", error)
            if client is not None:
                await client.drain()
            problem = _error(502, f"llama-server cannot be reached: {error}", "upstream_error", scope)
            await problem(scope, _nothing, send)
            return 502, b""


async def _relay(answer: Answer, send: Send, client: _Client | None) -> bytes:
    """Forwards an answer as it arrives; returns the end of its body."""
    headers = end_to_end(answer.headers)
    if answer.status in (204, 304):  # there is no body, whatever the length says
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    if any(name.lower() == b"connection" and b"close" in value.lower() for name, value in answer.headers):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    tail = b""
    async for chunk in answer.chunks():
        tail = (tail + chunk)[-TAIL_BYTES:] if len(chunk) < TAIL_BYTES else chunk[-TAIL_BYTES:]
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    if client is not None and answer.status >= 400:
        await client.drain()
    await send({"type": "http.response.body", "body": b""})
    return tail


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def create_app(
    url: str,
    slot_dir: str | os.PathLike[str],
    settings: Settings,
    *,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    listen_host: str = "127.0.0.1",
    slot_memory: int | None = None,
) -> Starlette:
    """The application; its lifespan opens and closes the store. `slot_memory` is in bytes, None: the default."""
    metrics = Metrics()
    upstream = Upstream(url, api_key=upstream_api_key)
    backend = LlamaServerBackend(upstream, slot_dir, memory=SlotMemory(slot_memory), count=metrics.count)
    link = BackendLink(backend, settings, metrics)
    saver = Saver(link, metrics)
    cache = Cache(link, saver, metrics)
    pages = Pages(link, metrics, private=api_key is not None)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for name in backend.remove_stale():
            log.info("removed %s, left by a proxy that was killed", name)
        watching, saving = asyncio.create_task(link.watch()), asyncio.create_task(saver.run())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await saver.last(saving)
            await link.close()
            await upstream.close()

    forwarder = Forwarder(upstream, link, cache, metrics, keyed=api_key is not None)
    app = Starlette(
        routes=[
            Route("/kvstore", pages.page),
            Route("/kvstore/", pages.page),
            Route("/kvstore/stats", pages.stats),
            Route("/metrics", pages.metrics_text),
            Mount("/", app=forwarder),
        ],
        middleware=[Middleware(KeyGuard, key=api_key, listen_host=listen_host, is_open=backend.is_open)],
        exception_handlers={Exception: _failed},
        lifespan=lifespan,
    )
    app.state.link, app.state.metrics = link, metrics
    return app
