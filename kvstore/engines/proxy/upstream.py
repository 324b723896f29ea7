"""The connection to the server: the proxy's own small requests, and the forwarding of clients' requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from ...errors import KVStoreError
from .http_client import Answer, HttpClient, HttpError, RawHeaders

# RFC 9110, 7.6.1: these concern one connection and are not forwarded.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class UpstreamError(KVStoreError):
    """llama-server cannot be reached, or it refused a request of the proxy's own.

    Facts: status, None if the server cannot be reached; late, whether it runs and did not answer in time.
    """

    code, exit_code, retry = "upstream", 31, True
    status: int | None = None
    late: bool = False


def end_to_end(headers: Iterable[tuple[bytes, bytes]], without: Iterable[bytes] = ()) -> RawHeaders:
    """The headers that a proxy forwards: not hop-by-hop, not named by Connection, not in `without`."""
    headers = [(name.lower(), value) for name, value in headers]
    drop = {name.encode() for name in HOP_BY_HOP} | set(without)
    for name, value in headers:
        if name == b"connection":
            drop |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in drop]


class Upstream:
    """One llama-server. `api_key` goes with every request, in place of the client's own key."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._client = HttpClient(self.url)

    async def close(self) -> None:
        await self._client.close()

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request of the proxy's own; the JSON of the answer. Raises UpstreamError."""
        content = json.dumps(body).encode() if isinstance(body, Mapping) else body or b""
        status, data = await self._send(method, path, content, headers or {}, timeout)
        try:
            answer = json.loads(data) if data else None
        except ValueError:
            answer = data[:200].decode("utf-8", "replace")
        if not 200 <= status < 300:
            detail = answer.get("error", answer) if isinstance(answer, dict) else answer
            message = detail.get("message", detail) if isinstance(detail, dict) else detail
            raise UpstreamError(f"{method} {path}: {status}: {message}", status=status)
        return answer

    async def _send(
        self, method: str, path: str, content: bytes, headers: Mapping[str, str], timeout: float
    ) -> tuple[int, bytes]:
        sent = {"Content-Type": "application/json", **headers, **self.authorization}
        try:
            return await self._client.request(method, path, sent, content, timeout)
        except HttpError as error:
            raise UpstreamError(f"{method} {path}: {error}", late=error.late) from error

    async def text(self, path: str, headers: Mapping[str, str]) -> str:
        """A text of the server, unchanged. Raises UpstreamError."""
        status, data = await self._send("GET", path, b"", headers, 5.0)
        if status != 200:
            raise UpstreamError(f"GET {path}: {status}", status=status)
        return data.decode("utf-8", "replace")

    def forward(
        self,
        method: str,
        target: bytes,
        headers: RawHeaders,
        content: bytes | AsyncIterator[bytes] | None,
        *,
        keep_authorization: bool,
        with_key: bool = True,
    ) -> AbstractAsyncContextManager[Answer]:
        """Forwards a client's request unchanged; the answer's body is not read yet. Raises HttpError.

        `target` is path and query as the client wrote them. `headers` have no length where `content` is bytes.
        Without `with_key`, the server's key is not sent.
        """
        without = [b"host", b"expect"]  # the body has already arrived
        if self.api_key or not keep_authorization:
            without += [b"authorization", b"x-api-key"]
        sent = end_to_end(headers, without)
        if with_key:
            sent += [(name.lower().encode(), value.encode()) for name, value in self.authorization.items()]
        return self._client.stream(method, target, sent, content)
