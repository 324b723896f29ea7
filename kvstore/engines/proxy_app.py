"""The proxy as an ASGI application: forwarding, the key, and the pages under /kvstore/."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..records import Stats
from ..store import Store
from .proxy_cache import TAIL_BYTES, Cache
from .proxy_metrics import Metrics
from .proxy_page import PAGE, tree
from .proxy_prompt import GENERATES, parse
from .proxy_saver import Saver
from .proxy_server import Server, Settings
from .proxy_upstream import Upstream, UpstreamError, end_to_end

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


def _error(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """As the OpenAI API and llama-server write errors."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


class KeyGuard:
    """Every request needs the key: as a bearer token, as X-Api-Key, or as the password of HTTP Basic (for a browser)."""

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
            own = scope["path"] == "/metrics" or scope["path"].startswith("/kvstore")
            response: Response | None = None
            if self.key is not None:
                if not hmac.compare_digest(self._given(request.headers), self.key):
                    asks = {"WWW-Authenticate": 'Basic realm="kvstore"'} if own else {}
                    response = _error(401, "Invalid API Key", "authentication_error", asks)
            elif own and (request.url.hostname or "") not in self.hosts:
                response = _error(403, "ask for this page by the address that the proxy listens on", "permission_error")
            if response is not None:
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


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
        path: str = scope["path"]
        body_done = asyncio.Event()
        if scope["method"] == "POST" and path in GENERATES:
            body = await Request(scope, receive).body()
            body_done.set()
            work = asyncio.create_task(self._generate(scope, body, send))
        else:
            work = asyncio.create_task(self._pass(scope, self._body(scope, receive, body_done), send))
        gone = asyncio.create_task(self._disconnected(receive, body_done))
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

    async def _disconnected(self, receive: Receive, body_done: asyncio.Event) -> None:
        await body_done.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    def _body(self, scope: Scope, receive: Receive, done: asyncio.Event) -> AsyncIterator[bytes] | None:
        names = {name.lower() for name, _ in scope["headers"]}
        if not names & {b"content-length", b"transfer-encoding"}:
            done.set()
            return None

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise httpx.ReadError("the client went away")
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    done.set()
                    return

        return chunks()

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

    async def _pass(self, scope: Scope, content: AsyncIterator[bytes] | None, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] not in _READS_ONLY:
            try:
                with self.server.slots.passing(scope["path"]):
                    await self._send_on(scope, scope["headers"], content, send)
            finally:
                if scope["path"].startswith("/lora-adapters"):
                    self.server.forget()
            return
        await self._send_on(scope, scope["headers"], content, send)

    async def _send_on(self, scope: Scope, headers: Any, content: Any, send: Send) -> tuple[int | None, bytes]:
        """Status and the end of the body, once all is sent; without a status where the server broke off."""
        target: bytes = scope.get("raw_path") or scope["path"].encode()
        if scope.get("query_string"):
            target += b"?" + scope["query_string"]
        try:
            response = await self.upstream.forward(
                scope["method"], target, headers, content, keep_authorization=self.keep_authorization
            )
        except httpx.HTTPError as error:
            self.server.suspect()
            log.warning("llama-server cannot be reached: %s", error or type(error).__name__)
            problem = _error(502, f"llama-server cannot be reached: {type(error).__name__}", "upstream_error")
            await problem(scope, _nothing, send)
            return 502, b""
        tail = b""
        try:
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": end_to_end(response.headers.raw)})
            async for chunk in response.aiter_raw():
                tail = (tail + chunk)[-TAIL_BYTES:] if len(chunk) < TAIL_BYTES else chunk[-TAIL_BYTES:]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx.HTTPError as error:
            # The body stays without its end, so the client knows; there is no other way to say it any more.
            self.server.suspect()
            log.warning("llama-server broke off: %s", error or type(error).__name__)
            return None, b""
        finally:
            await response.aclose()
        return response.status_code, tail


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


class Pages:
    """What the proxy says of itself."""

    def __init__(self, server: Server, metrics: Metrics, upstream: Upstream, *, private: bool) -> None:
        self.server = server
        self.metrics = metrics
        self.upstream = upstream
        self.private = private

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=_HEADERS)

    async def _stats(self) -> tuple[Stats | None, list[dict[str, Any]]]:
        store = self.server.store
        if store is None:
            return None, []

        def read(store: Store) -> tuple[Stats, list[dict[str, Any]]]:
            return store.stats(), tree(store.entries(), private=self.private)

        return await self.server.run(read, store)

    async def stats(self, request: Request) -> Response:
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
        store = self.server.store
        text = self.metrics.prometheus(None if store is None else await self.server.run(store.stats))
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

    app = Starlette(
        routes=[
            Route("/kvstore", pages.page),
            Route("/kvstore/", pages.page),
            Route("/kvstore/stats", pages.stats),
            Route("/metrics", pages.metrics_text),
            Mount("/", app=Forwarder(upstream, server, cache, metrics, keyed=api_key is not None)),
        ],
        middleware=[Middleware(KeyGuard, key=api_key, listen_host=listen_host)],
        lifespan=lifespan,
    )
    app.state.server, app.state.metrics = server, metrics
    return app
