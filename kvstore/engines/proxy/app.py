"""The proxy as an ASGI application: its parts, its lifespan, and the routes of its own pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from .asgi import error_answer
from .auth import KeyGuard
from .backend_link import BackendLink
from .cache import Cache
from .forward import Forwarder
from .llama_backend import LlamaServerBackend
from .metrics import Metrics
from .options import ProxyOptions
from .pages import Pages
from .rates import Rates
from .saver import Saver
from .slot_memory import SlotMemory
from .slots import SlotTable
from .tokenizer import Tokenizer
from .upstream import Upstream
from .warm_start import WarmStart

log = logging.getLogger("kvstore.proxy")


async def _failed(request: Request, error: Exception) -> Response:
    return error_answer(500, f"the proxy failed: {type(error).__name__}", "server_error", request.scope)


def create_app(options: ProxyOptions, listen_host: str) -> Starlette:
    """The application; its lifespan opens and closes the store."""
    api_key = options.api_key or None
    metrics = Metrics()
    upstream = Upstream(options.upstream, api_key=options.upstream_api_key or None)
    memory = SlotMemory(options.slot_memory_bytes)
    backend = LlamaServerBackend(upstream, options.slot_dir, memory=memory, count=metrics.count)
    slots, tokenizer = SlotTable(Rates(), options.min_tokens, metrics.count), Tokenizer(backend)
    link = BackendLink(backend, slots, options, metrics, on_new_model=tokenizer.reset)
    saver = Saver(link, slots, tokenizer, metrics)
    warm = WarmStart(link, slots, metrics)
    cache = Cache(link, slots, tokenizer, saver, metrics)
    pages = Pages(link, slots, tokenizer.shapes, metrics, private=api_key is not None)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for name in backend.remove_stale():
            log.info("removed %s, left by a proxy that was killed", name)
        watching, saving = [asyncio.create_task(link.watch())], asyncio.create_task(saver.run())
        if options.warm_start:
            watching.append(asyncio.create_task(warm.run()))
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await saver.last(saving)
            await link.close()
            await upstream.close()

    forwarder = Forwarder(upstream, link, slots, cache, metrics, keyed=api_key is not None)
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
