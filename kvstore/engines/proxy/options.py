"""The options of the proxy, and what is wrong with them before anything starts."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import InvalidInputError

DEFAULT_LISTEN = "127.0.0.1:8081"


@dataclass(frozen=True)
class ProxyOptions:
    """The options of `serve`, `running` and `kvstore serve`.

    upstream: the address of llama-server. slot_dir: the directory of its --slot-save-path. store: the file of states.
    listen: host:port; an address other than loopback needs api_key, which every request must then carry.
    upstream_api_key: llama-server's own --api-key; without it the proxy passes the clients' Authorization on, unless
    api_key is set. cache_ram_mib, cache_disk_mib, min_saved_mib, key: as in `Store`. min_tokens: a restore or save that
    gains fewer tokens is left out. idle_seconds: how long the server must be idle before slots are saved. slot_memory: MiB
    of memory that states may take on their way to and from llama-server, None: a quarter of the RAM, 0: they take the disk.
    warm_start: restore the states most likely to be wanted into the empty slots of a new server process.
    remote, remote_key, publish, remote_options: the fleet's object store, as in `Store`. remote_min_tokens: a fetch that
    saves fewer tokens is left out. prefetch_gib: bytes of new learned prefixes that are fetched before they are asked for.
    """

    upstream: str
    slot_dir: str | os.PathLike[str]
    store: str | os.PathLike[str]
    listen: str = DEFAULT_LISTEN
    api_key: str | None = None
    upstream_api_key: str | None = None
    cache_ram_mib: float = 1024
    cache_disk_mib: float = -1
    min_saved_mib: float | None = None
    min_tokens: int = 16
    idle_seconds: float = 0.15
    key: str | None = None
    slot_memory: float | None = None
    warm_start: bool = True
    remote: str | None = None
    remote_key: Any = field(default=None, repr=False)
    publish: str = "learned"
    prefetch_gib: float = 0.0
    remote_min_tokens: int = 512
    remote_options: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def store_options(self) -> dict[str, Any]:
        names = ("cache_ram_mib", "cache_disk_mib", "min_saved_mib", "key")
        options = {name: getattr(self, name) for name in names}
        if self.remote:
            own = {"prefetch_gib": self.prefetch_gib, "min_tokens": self.remote_min_tokens}
            options |= {name: getattr(self, name) for name in ("remote", "remote_key", "publish")}
            options["remote_options"] = {**own, **(self.remote_options or {})}
        return options

    @property
    def slot_memory_bytes(self) -> int | None:
        return None if self.slot_memory is None else int(self.slot_memory * (1 << 20))

    def address(self) -> tuple[str, int]:
        """The host and port to listen on. Raises InvalidInputError where an option is wrong."""
        if urlsplit(self.upstream).scheme not in ("http", "https") or not urlsplit(self.upstream).hostname:
            raise InvalidInputError(
                f"{self.upstream!r} is not the address of a server", hint="give one such as http://127.0.0.1:8080"
            )
        if not Path(self.slot_dir).is_dir():
            raise InvalidInputError(
                f"{os.fspath(self.slot_dir)} is not a directory", hint="give the directory of llama-server's --slot-save-path"
            )
        host, port = parse_address(self.listen)
        if not self.api_key and not is_loopback(host):
            raise InvalidInputError(
                f"other machines reach {host}: that needs an API key", hint="give --api-key, or set KVSTORE_API_KEY"
            )
        if self.min_tokens < 1 or self.idle_seconds < 0:
            raise InvalidInputError("min_tokens must be at least 1, idle_seconds at least 0")
        if self.slot_memory is not None and not 0 <= self.slot_memory < float("inf"):
            raise InvalidInputError(f"slot_memory is {self.slot_memory}", hint="give a number of MiB of at least 0")
        return host, port


def parse_address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port", "[::1]:port" or ":port". Raises InvalidInputError."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise InvalidInputError(f"{listen!r} is not an address to listen on", hint="give host:port, such as 127.0.0.1:8081")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. Of a name, every address that it resolves to counts."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInputError(f"{host!r} cannot be resolved: {error}") from None
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)
