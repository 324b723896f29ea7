"""The slot files that the proxy and llama-server hand to each other: complete, for their owner alone, and never left."""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from .. import slotfile
from ..errors import SlotFileError

_NAME = re.compile(r"\.?kvstore-(\d+)-[0-9a-f]{16}\.(?:bin|tmp)")
# A process id is used again one day; no file is in use for so long.
OLD_SECONDS = 3600.0


def _alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill would end it there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class SlotFiles:
    """Temporary files in the directory of llama-server's --slot-save-path."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def remove_stale(self) -> list[str]:
        """Removes the files of proxies that were killed; their names."""
        gone = []
        for path in self.folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found is None:
                continue
            with suppress(OSError):
                ours = int(found[1]) == os.getpid()
                if ours or not _alive(int(found[1])) or time.time() - path.stat().st_mtime > OLD_SECONDS:
                    path.unlink()
                    gone.append(path.name)
        return gone

    def _new_name(self) -> str:
        return f"kvstore-{os.getpid()}-{secrets.token_hex(8)}"

    def for_save(self) -> Path:
        """An empty file that the server may write into: so it gets our mode, not what the server's umask gives."""
        path = self.folder / f"{self._new_name()}.bin"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return path

    def read(self, path: Path, n_written: int) -> slotfile.SlotFile:
        """A file that the server says to have written with so many bytes. Raises SlotFileError."""
        size = path.stat().st_size
        if size != n_written:
            raise SlotFileError(f"{path} has {size} bytes, the server wrote {n_written}")
        return slotfile.read(path)

    def write(self, file: slotfile.SlotFile) -> Path:
        """The file for a restore. Unlike slotfile.write it is not synced: it does not outlive a power cut, nor need to."""
        name = self._new_name()
        temporary, path = self.folder / f".{name}.tmp", self.folder / f"{name}.bin"
        head = slotfile.head_bytes(file.kind, file.version, file.tokens, file.packed, file.media, file.padding)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            try:
                for part in (head, file.state.data):
                    left = memoryview(part)
                    while left:
                        left = left[os.write(fd, left) :]
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return path
