"""What the rooms of the application share: the target of a request, the rest of its body, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope

# The bytes and seconds spent on reading the body of a refused request: if the connection is closed with unread data, the
# client may never see the answer.
_DRAINED, _DRAIN_SECONDS = 16 << 20, 10.0


async def drain(scope: Scope, receive: Receive) -> None:
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


def target(scope: Scope) -> bytes:
    """The path as the client wrote it."""
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    return target


def error_answer(status: int, message: str, kind: str, scope: Scope, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as llama-server writes it: the body of the OpenAI API, readable by pages of any origin. The connection is
    closed, since the request may not have been read to its end."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    origin = next((value for name, value in scope["headers"] if name == b"origin"), b"").decode("latin-1")
    cors = {"Access-Control-Allow-Origin": origin, "Connection": "close"}
    headers = {"Content-Type": "application/json; charset=utf-8", **cors, **(headers or {})}
    return JSONResponse(body, status_code=status, headers=headers)
