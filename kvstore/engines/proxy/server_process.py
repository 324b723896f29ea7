"""Notices that the server's process has ended, without asking the server anything: it may sleep.

Linux tells which process of the same user listens on a port, and a pidfd tells when it ends. Elsewhere, and for a server on
another machine, of another user or in a container, a new process shows only when the next request meets it.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

_LISTENS = "0A"
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")


def _inodes(port: int) -> set[str]:
    """The sockets that listen on a port of this machine."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{name}", encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                words = line.split()
                if len(words) > 9 and words[3] == _LISTENS and words[1].endswith(f":{port:04X}"):
                    found.add(f"socket:[{words[9]}]")
    return found


def listener(url: str) -> int | None:
    """The id of the process that listens at the address of a server on this machine; None where that does not show."""
    parts = urlsplit(url)
    if sys.platform != "linux" or not _LOOPBACK.fullmatch(parts.hostname or ""):
        return None
    wanted = _inodes(parts.port or (443 if parts.scheme == "https" else 80))
    for name in os.listdir("/proc") if wanted else ():
        if not name.isdecimal():
            continue
        with suppress(OSError), os.scandir(f"/proc/{name}/fd") as descriptors:
            for each in descriptors:
                with suppress(OSError):  # closed meanwhile
                    if os.readlink(each.path) in wanted:
                        return int(name)
    return None


class ProcessWatch:
    """Calls `ended` when the process that listens at `url` ends. `begin` looks for the process, anew each time."""

    def __init__(self, url: str, ended: Callable[[], None]) -> None:
        self._url = url
        self._ended = ended
        self._fd = -1

    async def begin(self) -> None:
        self.close()
        loop = asyncio.get_running_loop()
        pid = await loop.run_in_executor(None, listener, self._url)
        if pid is None or sys.platform != "linux":
            return
        try:
            self._fd = os.pidfd_open(pid)
            loop.add_reader(self._fd, self._end)
        except (OSError, NotImplementedError):  # an old kernel, a sandbox, another event loop
            self.close()

    def _end(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(NotImplementedError, RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
