"""A small file system of its own, for tests that fill it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(point: Path, mib: int) -> Iterator[Path]:
    """A file system of this size, mounted at a new folder; skips the test where none can be mounted."""
    point.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(point)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)
