"""The proxy's HTTP client: its own small requests, and clients' requests that pass through unchanged."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

CONNECT_SECONDS = 10.0
KEEP_SECONDS = 2.0  # llama-server closes after 5
MAX_ANSWER = 256 << 20
RawHeaders = list[tuple[bytes, bytes]]
# Headers that aiohttp would add.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))).replace("#", "")


class HttpError(Exception):
    """The server cannot be reached, its answer is not HTTP, or the answer ended early."""

    late = False


class HttpTimeout(HttpError):
    """The server did not answer in time."""

    late = True


class Answer:
    """An answer whose body is not read yet."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: RawHeaders = list(response.raw_headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, not decoded. Raises HttpError where it ends early."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise _failure(error) from error


class HttpClient:
    """Requests to one server. Redirects, cookies and the environment's proxies are ignored; certificates are checked
    against SSL_CERT_FILE or the system's authorities."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        # aiohttp creates its own context at import, possibly before a caller has set SSL_CERT_FILE.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._kept: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        for session in (self._kept, self._fresh):
            if session is not None:
                await session.close()

    def _session(self, **connector: Any) -> aiohttp.ClientSession:
        """A session belongs to the event loop that runs when it is created."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls, **connector),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=_NOT_ADDED,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )

    def _url(self, target: bytes) -> URL:
        return URL(self._base + quote(target, safe=_PRINTABLE), encoded=True)

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout: float
    ) -> tuple[int, bytes]:
        """Status and body, over a connection that is kept open for a while. Where the server closed that connection, the
        request is sent a second time. Raises HttpError."""
        if self._kept is None:
            self._kept = self._session(keepalive_timeout=KEEP_SECONDS)
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS))
        again = True
        while True:
            try:
                async with self._kept.request(
                    method, self._url(path.encode()), headers=headers, data=body or None, timeout=limit, allow_redirects=False
                ) as response:
                    return response.status, await _whole(response)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
                if isinstance(error, aiohttp.ClientConnectorError) or not again:
                    raise _failure(error) from error
                again = False
            except asyncio.TimeoutError:
                raise HttpTimeout(f"no answer within {timeout:g} s") from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _failure(error) from error

    @asynccontextmanager
    async def stream(
        self, method: str, target: bytes, headers: RawHeaders, content: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        """A client's request, sent once, over a connection of its own: the server may close a kept connection at the same
        moment, and this request cannot be sent twice. Leaving the context closes the connection.

        `headers` have no Host. Raises HttpError.
        """
        if self._fresh is None:
            self._fresh = self._session(force_close=True)
        # Otherwise aiohttp asks the server to close, and the answer does not show whether the server itself wants that.
        sent = [("Connection", "keep-alive"), *((name.decode("latin-1"), _text(value)) for name, value in headers)]
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._fresh.request(
                method, self._url(target), headers=sent, data=content, timeout=limit, allow_redirects=False
            )
        except asyncio.TimeoutError:
            raise HttpTimeout(f"no connection within {CONNECT_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error) from error
        try:
            yield Answer(response)
        finally:
            response.close()


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    total = 0
    async for chunk in response.content.iter_any():
        total += len(chunk)
        if total > MAX_ANSWER:
            response.close()
            raise HttpError(f"an answer of more than {MAX_ANSWER >> 20} MiB")
        parts.append(chunk)
    return b"".join(parts)


def _failure(error: BaseException) -> HttpError:
    kind = HttpTimeout if isinstance(error, asyncio.TimeoutError) else HttpError
    if isinstance(error, aiohttp.ClientResponseError):
        return kind(f"not an HTTP answer: {error.message.splitlines()[0]}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return kind(f"{error}; for a private authority, set SSL_CERT_FILE to its certificate and start the proxy again")
    return kind(f"{error or type(error).__name__}")


def _text(value: bytes) -> str:
    """A header value for aiohttp, which writes UTF-8. Bytes that are not UTF-8 become their Latin-1 characters."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
