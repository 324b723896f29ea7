"""Benchmarks: `python tools/bench.py [PART] [options of the part]`; without a part, all of them."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path


def main() -> int:
    here = Path(__file__).resolve().parent
    parts = sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description="Benchmarks of kvstore; each part prints a table.")
    parser.add_argument("part", nargs="?", choices=parts, help="default: all")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the part (try --help)")
    args = parser.parse_args()
    sys.path.insert(0, str(here))
    chosen = parts if args.part is None else [args.part]
    return max(int(importlib.import_module(f"bench_{part}").main(args.rest)) for part in chosen)


if __name__ == "__main__":
    sys.exit(main())
