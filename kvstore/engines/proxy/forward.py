"""Requests of clients on their way to the server, in a leased slot or without the cache, and their answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .asgi import drain, error_answer, target
from .backend_link import BackendLink
from .cache import KEPT_BYTES, Cache
from .http_client import Answer, HttpError
from .metrics import Metrics
from .prompt import GENERATES, parse
from .slots import SlotTable
from .upstream import Upstream, end_to_end

log = logging.getLogger("kvstore.proxy")


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
        tasks = {asyncio.create_task(drain(self._scope, self._receive)), asyncio.create_task(self.sent_all.wait())}
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

    def __init__(
        self, upstream: Upstream, link: BackendLink, slots: SlotTable, cache: Cache, metrics: Metrics, *, keyed: bool
    ) -> None:
        self.upstream = upstream
        self.link = link
        self.slots = slots
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
            with self.slots.passing(taints=self.link.backend.taints(body)):
                await self._send_on(scope, headers, body, send)
            return
        status: int | None = None
        head = tail = b""
        try:
            with lease.under_way():
                status, head, tail = await self._send_on(scope, headers, lease.body, send)
        finally:
            # Also runs when the client went away: then this task is being cancelled.
            await asyncio.shield(lease.finish(status, head, tail))

    def _cacheable(self, scope: Scope) -> bool:
        return not any(name.lower() == b"content-encoding" for name, _ in scope["headers"])

    async def _pass(self, scope: Scope, client: _Client, send: Send) -> None:
        content = client.body()
        backend, path = self.link.backend, scope["path"]
        if scope["method"] == "POST" and not backend.only_reads(path):
            try:
                with self.slots.passing(slot_id=backend.slot_of(path)):
                    await self._send_on(scope, scope["headers"], content, send, client)
            finally:
                if backend.changes_adapters(path):
                    self.link.invalidate()
            return
        await self._send_on(scope, scope["headers"], content, send, client)

    async def _send_on(
        self, scope: Scope, headers: Any, content: Any, send: Send, client: _Client | None = None
    ) -> tuple[int | None, bytes, bytes]:
        """Status, and the beginning and the end of the body, after all of it was sent; status None where the server broke
        off."""
        path = target(scope)
        if scope.get("query_string"):
            path += b"?" + scope["query_string"]
        begun = False
        try:
            async with self.upstream.forward(
                scope["method"],
                path,
                headers,
                content,
                keep_authorization=self.keep_authorization,
                with_key=scope.get("with_key", False),
            ) as answer:
                begun = True
                return (answer.status, *await _relay(answer, send, client))
        except HttpError as error:
            self.link.mark_unverified()
            if begun:
                # The answer is not completed and the connection is closed: the client sees a broken answer.
                log.warning("llama-server broke off: %s", error)
                return None, b"", b""
            log.warning("llama-server cannot be reached: %s", error)
            if client is not None:
                await client.drain()
            problem = error_answer(502, f"llama-server cannot be reached: {error}", "upstream_error", scope)
            await problem(scope, _nothing, send)
            return 502, b"", b""


async def _relay(answer: Answer, send: Send, client: _Client | None) -> tuple[bytes, bytes]:
    """Forwards an answer as it arrives; returns the beginning and the end of its body."""
    headers = end_to_end(answer.headers)
    if answer.status in (204, 304):  # there is no body, whatever the length says
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    if any(name.lower() == b"connection" and b"close" in value.lower() for name, value in answer.headers):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    head = tail = b""
    async for chunk in answer.chunks():
        if len(head) < KEPT_BYTES:
            head += chunk[: KEPT_BYTES - len(head)]
        tail = (tail + chunk)[-KEPT_BYTES:] if len(chunk) < KEPT_BYTES else chunk[-KEPT_BYTES:]
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    if client is not None and answer.status >= 400:
        await client.drain()
    await send({"type": "http.response.body", "body": b""})
    return head, tail


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
