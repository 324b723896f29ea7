"""`kvstore serve`: a caching proxy in front of an unmodified llama-server.

    llama-server -m model.gguf --slot-save-path DIR
    python -m kvstore.engines.proxy --upstream http://127.0.0.1:8080 --slot-dir DIR --store cache.db

OpenAI clients point at the proxy and keep their code. Before a request the proxy restores the state of its prompt into a
slot, where the store has more of it than the slot; afterwards it saves the slot. What it cannot cache, and whatever
fails of the cache, passes through as if it were not there.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidInputError, KVStoreError, extra
from ...store import Store
from ...util import units
from ...util.printable import Formatter, printable
from .server import Settings

DEFAULT_LISTEN = "127.0.0.1:8081"


def parse_address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port", "[::1]:port" or ":port". Raises InvalidInputError."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise InvalidInputError(f"{listen!r} is not an address to listen on", hint="give host:port, such as 127.0.0.1:8081")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name is taken for what it resolves to, all of it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInputError(f"{host!r} cannot be resolved: {error}") from None
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)


def _config(
    *,
    upstream: str,
    slot_dir: str | os.PathLike[str],
    store: str | os.PathLike[str],
    listen: str = DEFAULT_LISTEN,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    cache_ram_mib: float = 1024,
    cache_disk_mib: float = -1,
    min_saved_mib: float | None = None,
    min_tokens: int = 16,
    idle_seconds: float = 0.15,
    key: str | None = None,
) -> Any:
    try:
        import uvicorn

        from .app import create_app
    except ImportError as error:
        raise InvalidInputError(f"the proxy needs {error.name}", hint=extra("proxy")) from error
    if urlsplit(upstream).scheme not in ("http", "https") or not urlsplit(upstream).hostname:
        raise InvalidInputError(f"{upstream!r} is not the address of a server", hint="such as http://127.0.0.1:8080")
    folder = Path(slot_dir)
    if not folder.is_dir():
        hint = "give the directory of llama-server's --slot-save-path"
        raise InvalidInputError(f"the directory {folder} does not exist", hint=hint)
    host, port = parse_address(listen)
    if not api_key and not is_loopback(host):
        raise InvalidInputError(
            f"{host} is reached from other machines: that needs an API key", hint="give --api-key, or set KVSTORE_API_KEY"
        )
    if min_tokens < 1 or idle_seconds < 0:
        raise InvalidInputError("min_tokens is at least 1, idle_seconds at least 0")
    options: dict[str, Any] = {
        "cache_ram_mib": cache_ram_mib,
        "cache_disk_mib": cache_disk_mib,
        "min_saved_mib": min_saved_mib,
        "key": key,
    }
    # What is wrong with the file is said at once, not when the first server is there.
    Store(store, **options).close()
    settings = Settings(folder, os.fspath(store), options, min_tokens, idle_seconds)
    app = create_app(upstream, settings, api_key=api_key or None, upstream_api_key=upstream_api_key or None, listen_host=host)
    return uvicorn.Config(
        app,
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


def serve(
    *,
    upstream: str,
    slot_dir: str | os.PathLike[str],
    store: str | os.PathLike[str],
    listen: str = DEFAULT_LISTEN,
    api_key: str | None = None,
    upstream_api_key: str | None = None,
    cache_ram_mib: float = 1024,
    cache_disk_mib: float = -1,
    min_saved_mib: float | None = None,
    min_tokens: int = 16,
    idle_seconds: float = 0.15,
    key: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    upstream: address of llama-server. slot_dir: the directory it got as --slot-save-path. store: the file of states.
    listen: host:port; another address than loopback needs api_key, which every request must then carry.
    upstream_api_key: llama-server's own --api-key; without it the clients' Authorization is passed on, unless api_key is
    set. cache_ram_mib, cache_disk_mib, min_saved_mib, key: as of `Store`. min_tokens: a restore or save that gains fewer
    is left out. idle_seconds: how long the server must be idle before slots are saved.

    Raises InvalidInputError, and what `Store` raises.
    """
    options = dict(locals())
    config = _config(**options)
    import uvicorn

    uvicorn.Server(config).run()


@contextmanager
def running(**options: Any) -> Iterator[str]:
    """The proxy in a thread of this process, for the time of the context; gives its address. Takes what `serve` takes;
    port 0 is a free one."""
    import uvicorn

    config = _config(**options)
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
            host, port = listener.getsockname()[:2]
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join()


def _mib(text: str) -> float:
    try:
        return units.mib(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        return units.seconds(text, bare=1)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="kvstore serve", description=about, allow_abbrev=False)
    parser.add_argument("--upstream", required=True, metavar="URL", help="address of llama-server")
    parser.add_argument("--slot-dir", required=True, metavar="DIR", help="what llama-server got as --slot-save-path")
    parser.add_argument("--store", required=True, metavar="FILE", help="the file of states")
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"default: {DEFAULT_LISTEN}")
    parser.add_argument("--api-key", help="clients must send it (better: the environment variable KVSTORE_API_KEY)")
    parser.add_argument("--upstream-api-key", help="llama-server's own (KVSTORE_UPSTREAM_API_KEY)")
    size: dict[str, Any] = {"type": _mib, "metavar": "SIZE"}
    parser.add_argument("--cache-ram-mib", **size, default=1024, help="states kept in RAM: 1024 (MiB), 8G (default: 1024)")
    parser.add_argument("--cache-disk-mib", **size, default=-1, help="bound of the store's file (default: none)")
    parser.add_argument("--min-saved-mib", **size, help="share a prefix that saves this much (1/8 of a state)")
    parser.add_argument("--min-tokens", type=int, default=16, help="a restore or save must gain at least this many (16)")
    parser.add_argument(
        "--idle-seconds", type=_seconds, default=0.15, metavar="TIME", help="idle time before a slot is saved (0.15)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log every restore and save")
    options = vars(parser.parse_args(argv))
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if options.pop("verbose") else logging.INFO, handlers=[handler])
    # Other users of the machine can read a command line, but not the environment.
    options["api_key"] = options["api_key"] or os.environ.get("KVSTORE_API_KEY")
    options["upstream_api_key"] = options["upstream_api_key"] or os.environ.get("KVSTORE_UPSTREAM_API_KEY")
    try:
        serve(**options)
    except KVStoreError as error:
        print(f"kvstore serve: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
