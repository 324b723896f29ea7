"""`kvstore serve`: a caching proxy in front of an unmodified llama-server.

    llama-server -m model.gguf --slot-save-path DIR
    kvstore serve --upstream http://127.0.0.1:8080 --slot-dir DIR --store cache.db

OpenAI clients point at the proxy and keep their code. Before a request, the proxy restores the state of its prompt into a
slot if the store has more of the prompt than the slot; afterwards it saves the slot. Requests that it cannot cache, and
requests for which the cache fails, pass through as if there were no cache.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError, KVStoreError, extra
from ...store import Store
from .options import DEFAULT_LISTEN, ProxyOptions, is_loopback, parse_address

if TYPE_CHECKING:
    import uvicorn

__all__ = ["DEFAULT_LISTEN", "ProxyOptions", "is_loopback", "main", "parse_address", "running", "serve"]


def _config(options: ProxyOptions) -> uvicorn.Config:
    try:
        import uvicorn

        from .app import create_app
    except ImportError as error:
        raise InvalidInputError(f"the proxy needs {error.name}", hint=extra("proxy")) from error
    host, port = options.address()
    # Opened now, so that what is wrong with the file shows before the first server is there.
    Store(options.store, **options.store_options).close()
    return uvicorn.Config(
        create_app(options, host),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )


def _url(listener: Any) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(*, started: Callable[[str], None] | None = None, **options: Any) -> None:
    """Serve until SIGINT or SIGTERM. Takes the options of `ProxyOptions`; `started` is called with the address when the
    proxy listens.

    Raises InvalidInputError, and what `Store` raises.
    """
    config = _config(ProxyOptions(**options))
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if started is not None and self.started:
                started(_url(self.servers[0].sockets[0]))

    Server(config).run()


@contextmanager
def running(**options: Any) -> Iterator[str]:
    """The proxy in a thread of this process, for the time of the context; yields its address. Takes the options of
    `ProxyOptions`; port 0 means a free one."""
    config = _config(ProxyOptions(**options))
    import uvicorn

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio turns Nagle's delay of 40 ms off only where the protocol is named.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind((config.host, config.port))
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listener]}, name="kvstore-proxy", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        if not server.started:
            raise KVStoreError("the proxy did not start, see the log")
        try:
            yield _url(listener)
        finally:
            server.should_exit = True
            thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    """`kvstore serve` with these arguments; the exit code."""
    from ...cli import main as command

    words = ["serve", *(sys.argv[1:] if argv is None else argv)]
    return int(command.main(words, standalone_mode=False) or 0)


if __name__ == "__main__":
    sys.exit(main())
