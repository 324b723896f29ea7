"""Each part of the benchmarks runs to its end, at its smallest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOLS = Path(__file__).resolve().parent.parent / "tools"
PARTS = {
    "codec": "--mib 64 --runs 1",
    "store": "--mib 1 --runs 1 --entries 100",
    "small": "--puts 5 --runs 1",
    "turn": "--quick",
    "peers": "--no-real --tokens 40 --runs 1",
    "caches": "--entries 20 --runs 3",
    "processes": "--mib 1 --puts 2 --runs 1",
    "server": "--tokens 300 --runs 1",
    "fleet": "--mib 1 --runs 1 --names 1000 --no-s3",
}


def test_every_part_is_tried() -> None:
    assert {path.stem.removeprefix("bench_") for path in TOOLS.glob("bench_*.py")} == set(PARTS)


@pytest.mark.skipif(sys.platform != "linux", reason="the account of the kernel in /proc")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part: str, tmp_path: Path) -> None:
    words = [sys.executable, TOOLS / "bench.py", part, *PARTS[part].split(), "--dir", tmp_path]
    if part in ("codec", "peers"):
        del words[-2:]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    assert not list(tmp_path.glob("bench-*"))
