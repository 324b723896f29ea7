"""The proxy as an ASGI application: forwarding, the key, and the pages under /kvstore/."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import operate
from ...errors import KVStoreError
from ...store import Store
from ...types import Stats
from .cache import TAIL_BYTES, Cache
from .http_client import Answer, HttpError
from .metrics import Metrics
from .page import PAGE, SHOWN, tree
from .prompt import GENERATES, parse
from .saver import Saver
from .server import Server, Settings
from .upstream import Upstream, UpstreamError, end_to_end

log = logging.getLogger("kvstore.proxy")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# A page of another origin must not read these through a name that resolves to this host.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# Of the server's own paths these may change what it computes, or use a slot.
_READS_ONLY = ("/tokenize", "/detokenize", "/apply-template")


# llama-server answers these without a key: its health, and the files of its page.
_OPEN = re.compile(
    rb"/(?:(?:v1/)?health|index\.html|build\.json|sw\.js|manifest\.webmanifest|[\w-]+\.(?:ico|svg|png)"
    rb"|(?:_app|recommended-mcp)/(?:[\w-]+[./])*[\w-]+)?"
)


# Of a refused request's body so much is read: a connection closed before that may take the answer with it.
_DRAINED, _DRAIN_SECONDS = 16 << 20, 10.0


async def _drain(scope: Scope, receive: Receive) -> None:
    names = {name.lower() for name, _ in scope["headers"]}
    if b"expect" in names or not names & {b"content-length", b"transfer-encoding"}:
        return  # a client that asks before it sends is told now

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
    """As llama-server writes errors: the body of the OpenAI API, readable by pages of any origin, and a closed connection,
    since the request may not have been read to its end."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    origin = next((value for name, value in scope["headers"] if name == b"origin"), b"").decode("latin-1")
    cors = {"Access-Control-Allow-Origin": origin, "Connection": "close"}
    headers = {"Content-Type": "application/json; charset=utf-8", **cors, **(headers or {})}
    return JSONResponse(body, status_code=status, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"the proxy failed: {type(error).__name__}", "server_error", request.scope)


class KeyGuard:
    """A request needs the key: as a bearer token, as X-Api-Key, or as the password of HTTP Basic (for a browser).

    As with llama-server, OPTIONS (a browser asks without the key) and some paths need none. Such a request passes without
    the server's key.
    """

    def __init__(self, app: ASGIApp, key: str | None, listen_host: str) -> None:
        self.app = app
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
                elif own or not (scope["method"] == "OPTIONS" or _OPEN.fullmatch(_target(scope))):
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
    """Who sent a request: the body as it arrives, and the end of the connection."""

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
                await asyncio.Event().wait()  # until the request is cancelled: it must not look whole to the server
            if not message.get("more_body"):
                self.sent_all.set()
            if message.get("body"):
                yield message["body"]

    async def drain(self) -> None:
        """Reads what is left of a body that nobody wants."""
        if self.sent_all.is_set():
            return
        # What sends the body to the server may still read it as well.
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
    """Everything but the proxy's own pages."""

    def __init__(self, upstream: Upstream, server: Server, cache: Cache, metrics: Metrics, *, keyed: bool) -> None:
        self.upstream = upstream
        self.server = server
        self.cache = cache
        self.metrics = metrics
        # The proxy's own key is not the server's business.
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
            with self.server.slots.passing(body=body):
                await self._send_on(scope, headers, body, send)
            return
        status: int | None = None
        tail = b""
        try:
            status, tail = await self._send_on(scope, headers, lease.body, send)
        finally:
            # Also where the client went away: this task is being cancelled then.
            await asyncio.shield(lease.finish(status, tail))

    def _cacheable(self, scope: Scope) -> bool:
        return not any(name.lower() == b"content-encoding" for name, _ in scope["headers"])

    async def _pass(self, scope: Scope, client: _Client, send: Send) -> None:
        content = client.body()
        if scope["method"] == "POST" and scope["path"] not in _READS_ONLY:
            try:
                with self.server.slots.passing(scope["path"]):
                    await self._send_on(scope, scope["headers"], content, send, client)
            finally:
                if scope["path"].startswith("/lora-adapters"):
                    self.server.forget()
            return
        await self._send_on(scope, scope["headers"], content, send, client)

    async def _send_on(
        self, scope: Scope, headers: Any, content: Any, send: Send, client: _Client | None = None
    ) -> tuple[int | None, bytes]:
        """Status and the end of the body, once all is sent; without a status where the server broke off."""
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
            self.server.suspect()
            if begun:
                # The answer stays without its end, and the connection is closed: the client sees a broken answer.
                log.warning("llama-server broke off: %s", error)
                return None, b""
            log.warning("llama-server cannot be reached: %s", error)
            if client is not None:
                await client.drain()
            problem = _error(502, f"llama-server cannot be reached: {error}", "upstream_error", scope)
            await problem(scope, _nothing, send)
            return 502, b""


async def _relay(answer: Answer, send: Send, client: _Client | None) -> bytes:
    """Sends an answer on as it arrives; the end of its body."""
    headers = end_to_end(answer.headers)
    if answer.status in (204, 304):  # there is no body, whatever length is told
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


_Shown: TypeAlias = tuple[Stats | None, list[dict[str, Any]]]


class Pages:
    """What the proxy says of itself."""

    def __init__(self, server: Server, metrics: Metrics, upstream: Upstream, *, private: bool) -> None:
        self.server = server
        self.metrics = metrics
        self.upstream = upstream
        self.private = private
        self._look: asyncio.Task[_Shown] | None = None

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=_HEADERS)

    async def _stats(self) -> _Shown:
        """Of the store, None where that is not open, or busy for long. Those who ask at once share one look."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read())
        return await asyncio.shield(self._look)

    async def _read(self) -> _Shown:
        store = self.server.store
        if store is None:
            return None, []

        def read(store: Store) -> _Shown:
            return store.stats(), tree(operate.listing(store, order="used", limit=SHOWN), private=self.private)

        try:
            return await self.server.run_page(read, store)
        except KVStoreError as error:
            log.warning("the page shows nothing of the store: %s", error.message)
            return None, []

    async def stats(self, request: Request) -> Response:
        self.server.look_again()
        store, prefixes = await self._stats()
        identity = self.server.identity
        rates = self.server.slots.rates
        body = {
            "upstream": self.upstream.url,
            "caching": not self.server.off,
            "private": self.private,
            "off": self.server.off or None,
            "model": None if identity is None else identity.model,
            "fingerprint": None if identity is None else identity.fingerprint,
            "probed": None if identity is None else identity.probed,
            **self.metrics.as_dict(private=self.private),
            "slots": [
                {"id": s.id, "busy": s.busy, "tokens": s.n_total, "stored_tokens": s.stored, "saving": s.putting > 0}
                for s in self.server.slots.all
            ],
            "rates": {
                "prefill_tokens_per_second": None if rates.prefill is None else round(1 / rates.prefill, 1),
                "restore_bytes_per_second": round(1 / max(rates.restore_byte, 1e-12)),
                "save_bytes_per_second": round(1 / max(rates.save_byte, 1e-12)),
            },
            "store": None if store is None else store.as_dict(),
            "prefixes": prefixes,
        }
        return JSONResponse(body, headers=_HEADERS)

    async def metrics_text(self, request: Request) -> Response:
        """The proxy's, and after them the server's own where it has them."""
        text = self.metrics.prometheus((await self._stats())[0])
        with contextlib.suppress(UpstreamError):
            own = {} if self.private else {n: v for n, v in request.headers.items() if n == "authorization"}
            text += await self.upstream.text("/metrics", own)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4", headers=_HEADERS)


def create_app(
    url: str,
    settings: Settings,
    *,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    listen_host: str = "127.0.0.1",
) -> Starlette:
    """The application; its lifespan opens and closes the store."""
    metrics = Metrics()
    upstream = Upstream(url, api_key=upstream_api_key)
    server = Server(upstream, settings, metrics)
    saver = Saver(server, metrics)
    cache = Cache(server, saver, metrics)
    pages = Pages(server, metrics, upstream, private=api_key is not None)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for name in server.files.remove_stale():
            log.info("removed %s, left by a proxy that was killed", name)
        watching, saving = asyncio.create_task(server.watch()), asyncio.create_task(saver.run())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await saver.last(saving)
            await server.close()

    forwarder = Forwarder(upstream, server, cache, metrics, keyed=api_key is not None)
    app = Starlette(
        routes=[
            Route("/kvstore", pages.page),
            Route("/kvstore/", pages.page),
            Route("/kvstore/stats", pages.stats),
            Route("/metrics", pages.metrics_text),
            Mount("/", app=forwarder),
        ],
        middleware=[Middleware(KeyGuard, key=api_key, listen_host=listen_host)],
        exception_handlers={Exception: _failed},
        lifespan=lifespan,
    )
    app.state.server, app.state.metrics = server, metrics
    return app
