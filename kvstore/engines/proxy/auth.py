"""Who may come in: the key guard before the application."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .asgi import drain, error_answer, target

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


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
                elif own or not (scope["method"] == "OPTIONS" or self.is_open(target(scope))):
                    asks = {"WWW-Authenticate": 'Basic realm="kvstore"'} if own else {}
                    response = error_answer(401, "Invalid API Key", "authentication_error", scope, asks)
            elif own and (request.url.hostname or "") not in self.hosts:
                message = "ask for this page by the address that the proxy listens on"
                response = error_answer(403, message, "permission_error", scope)
            else:
                scope["with_key"] = True
            if response is not None:
                await drain(scope, receive)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
