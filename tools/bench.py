"""Benchmarks: `python tools/bench.py codec [--mib 256]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path


def main() -> int:
    here = Path(__file__).resolve().parent
    parts = sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description="Benchmarks of kvstore; each part prints a table.")
    parser.add_argument("part", choices=parts)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the part (try --help)")
    args = parser.parse_args()
    sys.path.insert(0, str(here))
    result: int = importlib.import_module(f"bench_{args.part}").main(args.rest)
    return result


if __name__ == "__main__":
    sys.exit(main())
