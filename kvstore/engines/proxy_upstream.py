"""The proxy's client of llama-server: its own small requests, and the forwarding of a client's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from ..errors import KVStoreError

# RFC 9110, 7.6.1: these are between two neighbours and are not passed on.
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
CONNECT_SECONDS = 10.0
RawHeaders = list[tuple[bytes, bytes]]


class UpstreamError(KVStoreError):
    """llama-server cannot be reached, or refused a request of the proxy's own (fact: status, None if unreachable)."""

    code, exit_code, retry = "upstream", 31, True
    status: int | None = None


def end_to_end(headers: Iterable[tuple[bytes, bytes]], without: Iterable[bytes] = ()) -> RawHeaders:
    """The headers that a proxy passes on: not hop by hop, not named by Connection, not those in `without`."""
    headers = [(name.lower(), value) for name, value in headers]
    drop = {name.encode() for name in HOP_BY_HOP} | set(without)
    for name, value in headers:
        if name == b"connection":
            drop |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in drop]


class Upstream:
    """One llama-server. `api_key` goes with every request, in place of what a client sent."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=2.0)
        timeout = httpx.Timeout(60.0, connect=CONNECT_SECONDS)
        self._own = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=timeout, trust_env=False)
        # A kept connection that the server closes at the same moment would fail a request that cannot be sent twice.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._forward = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        for name in ("accept", "accept-encoding", "user-agent"):
            del self._forward.headers[name]

    async def close(self) -> None:
        await self._own.aclose()
        await self._forward.aclose()

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
        content = json.dumps(body).encode() if isinstance(body, Mapping) else body
        sent = {"Content-Type": "application/json", **(headers or {}), **self.authorization}
        try:
            try:
                response = await self._own.request(method, path, content=content, headers=sent, timeout=timeout)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # The server closed a kept connection; what is asked here may be asked twice.
                response = await self._own.request(method, path, content=content, headers=sent, timeout=timeout)
        except httpx.HTTPError as error:
            raise UpstreamError(f"{method} {path}: {error or type(error).__name__}") from error
        try:
            answer = json.loads(response.content) if response.content else None
        except ValueError:
            answer = response.text[:200]
        if not response.is_success:
            detail = answer.get("error", answer) if isinstance(answer, dict) else answer
            message = detail.get("message", detail) if isinstance(detail, dict) else detail
            raise UpstreamError(f"{method} {path}: {response.status_code}: {message}", status=response.status_code)
        return answer

    async def text(self, path: str, headers: Mapping[str, str]) -> str:
        """A page of the server's, as it is. Raises UpstreamError."""
        try:
            response = await self._own.get(path, headers={**headers, **self.authorization}, timeout=5.0)
        except httpx.HTTPError as error:
            raise UpstreamError(f"GET {path}: {error or type(error).__name__}") from error
        if not response.is_success:
            raise UpstreamError(f"GET {path}: {response.status_code}", status=response.status_code)
        return response.text

    async def forward(
        self, method: str, target: bytes, headers: RawHeaders, content: Any, *, keep_authorization: bool
    ) -> httpx.Response:
        """A client's request, sent as it came; the answer's body is not read yet. Raises httpx.HTTPError.

        `target` is path and query as the client wrote them. `headers` have no Host and, where `content` is bytes, no
        length.
        """
        without = [b"host"]
        if self.api_key or not keep_authorization:
            without += [b"authorization", b"x-api-key"]
        sent: RawHeaders = end_to_end(headers, without)
        sent += [(name.lower().encode(), value.encode()) for name, value in self.authorization.items()]
        url = httpx.URL(self.url)
        url = url.copy_with(raw_path=url.raw_path.rstrip(b"/") + target)
        request = self._forward.build_request(method, url, headers=sent, content=content)
        return await self._forward.send(request, stream=True)
