"""The proxy as an ASGI application: its parts, its lifespan, and the routes of its own pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from .asgi import error_answer
from .auth import KeyGuard
from .backend_link import BackendLink, Settings
from .cache import Cache
from .forward import Forwarder
from .llama_backend import LlamaServerBackend
from .metrics import Metrics
from .pages import Pages
from .saver import Saver
from .upstream import Upstream

log = logging.getLogger("kvstore.proxy")


async def _failed(request: Request, error: Exception) -> Response:
    return error_answer(500, f"the proxy failed: {type(error).__name__}", "server_error", request.scope)


def create_app(
    url: str,
    slot_dir: str | os.PathLike[str],
    settings: Settings,
    *,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    listen_host: str = "127.0.0.1",
) -> Starlette:
    """The application; its lifespan opens and closes the store."""
    metrics = Metrics()
    upstream = Upstream(url, api_key=upstream_api_key)
    backend = LlamaServerBackend(upstream, slot_dir)
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
