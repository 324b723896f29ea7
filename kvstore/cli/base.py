"""Shared by all commands: reporting errors, opening a store, reading ids and values from the command line."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import numpy as np
from click.shell_completion import CompletionItem

from .. import Entry, InvalidInputError, KVStoreError, NotFoundError, Store, StoreIOError, operate
from ..util import fsutil, units
from ..util.printable import Formatter, json_text
from . import output

F = TypeVar("F", bound=Callable[..., Any])
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell sees SIGINT and SIGPIPE
MAX_CANDIDATES = 10
MAX_COUNTED = 1000
MAX_KEY_BYTES = 64 << 10


class _PipeClosed(Exception):
    """The reader of our output has exited. Not an OSError, because click would exit at once."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that SIGINT sets, beside raising KeyboardInterrupt. Ends quietly when interrupted.

    Python drops an exception that a signal raises inside a finalizer, so an endless loop must look at the event too.
    """
    stop = threading.Event()

    def interrupt(signum: int, frame: object) -> None:
        stop.set()
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        yield stop
    except KeyboardInterrupt:
        return
    finally:
        if main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


class Commands(click.Group):
    """The group of commands, listed in the order in which they were added. Errors exit with the codes of kvstore.errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            raise _PipeClosed from error

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(Formatter())
        code: int | None
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal may not know every character of a prompt
        try:
            code = super().main(words, prog_name or "kvstore", standalone_mode=False, **extra)
        except KVStoreError as error:
            code = error.exit_code
            _report("--json" in words, error.as_dict(), error.message, error.hint)
        except click.ClickException as error:
            code = error.exit_code
            if "--json" in words:
                _report(True, {"code": "usage", "message": error.format_message()}, "", "")
            else:
                _show(error)
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
            output.note("interrupted")
        except _PipeClosed:
            code = BROKEN_PIPE
            # The interpreter flushes stdout at exit: send the rest of the buffer nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            code = StoreIOError.exit_code
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            _report("--json" in words, {"code": StoreIOError.code, "message": message}, message, "")
        except MemoryError:
            code = 1
            _report("--json" in words, {"code": "memory", "message": "not enough memory"}, "not enough memory", "")
        if not standalone_mode:
            return code
        sys.exit(code or 0)


class Subcommands(click.Group):
    """A command with commands of its own, listed in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _show(error: click.ClickException) -> None:
    """Shows an error as click does, with unsafe characters escaped."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(f"{context.get_usage()}\nTry '{context.command_path} -h' for help.\n", err=True)
    output.note(f"Error: {error.format_message()}")


def _report(as_json: bool, facts: dict[str, Any], message: str, hint: str) -> None:
    if as_json:
        click.echo(json_text({"error": facts}, indent=None), err=True)
        return
    output.note(f"kvstore: {message}")
    if hint:
        output.note(f"hint: {hint}")


def example(*lines: str) -> str:
    """The example at the end of a command's help."""
    return "\b\nExample:\n" + "\n".join("  " + line for line in lines)


def _complete_store(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def complete_id(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        with open_store(ctx.params["store"], ctx.params.get("key_file")) as store:
            latest = operate.listing(store, order="used", limit=200)
            found = operate.find(store, incomplete, 200) if incomplete else list(latest)
    except (KVStoreError, KeyError, OSError):
        return []
    return [CompletionItem(e.hex_id, help=f"{e.n_tokens} tokens  {output.excerpt(e.excerpt)[:60]}") for e in found]


key_file_option = click.option(
    "--key-file", type=click.Path(dir_okay=False), help="File that contains the key of an encrypted store."
)


def common_options(function: F) -> F:
    """Adds the argument STORE and the options --key-file and --json."""
    function = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)
    function = key_file_option(function)
    return click.argument("store", type=click.Path(), shell_complete=_complete_store)(function)


def key_of(key_file: str | None) -> str | None:
    """The key in a file, which is read once per run: it may be a pipe."""
    if key_file is None:
        return None
    context = click.get_current_context(silent=True)
    known: dict[str, Any] = {} if context is None else context.meta
    name = f"{__name__}.key:{key_file}"
    if name not in known:
        known[name] = _read_key(key_file)
    return str(known[name])


def _read_key(key_file: str) -> str:
    """The text of a key file without its trailing line ends. No error quotes the text."""
    try:
        with open(key_file, "rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"the key file {key_file} cannot be read: {error.strerror}") from None
    if len(data) > MAX_KEY_BYTES:
        raise InvalidInputError(
            f"the key file {key_file} is larger than {MAX_KEY_BYTES >> 10} KiB", hint="give a file that contains only the key"
        )
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError:
        raise InvalidInputError(f"the key file {key_file} is not UTF-8 text", hint="save it as UTF-8") from None
    key = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
    if not key:
        raise InvalidInputError(f"the key file {key_file} is empty", hint="write the key into it")
    if "\0" in key:
        raise InvalidInputError(f"the key file {key_file} contains a NUL character", hint="save it as UTF-8 text")
    return key


def open_store(path: str, key_file: str | None = None, *, create: bool = False, readonly: bool = True, **more: Any) -> Store:
    if not create and not os.path.exists(path):
        raise fsutil.MissingFileError(path)
    return Store(path, readonly=readonly, cache_ram_mib=more.pop("cache_ram_mib", 0), key=key_of(key_file), **more)


def find(store: Store, wanted: Sequence[str], *, bases: bool | None = False) -> list[Entry]:
    """The entries with these ids, which may be shortened to a unique prefix. Raises NotFoundError, InvalidInputError.

    bases: as `operate.listing` takes it.
    """
    prefixes = [w.lower() for w in wanted]
    for text in prefixes:
        if not re.fullmatch("[0-9a-f]{1,16}", text):
            raise InvalidInputError(f"{text!r} is not an id", hint="ids are 1 to 16 hex digits: see `kvstore ls`")
    found = ((prefix, operate.find(store, prefix, MAX_COUNTED + 1, bases=bases)) for prefix in dict.fromkeys(prefixes))
    return [_only(prefix, entries) for prefix, entries in found]


def _only(prefix: str, found: list[Entry]) -> Entry:
    if not found:
        raise NotFoundError(f"no entry {prefix}", hint="see `kvstore ls`", id=prefix)
    if len(found) > 1:
        lines = [f"\n  {e.hex_id}  {e.n_tokens:,} tokens  {output.excerpt(e.excerpt)[:50]}".rstrip() for e in found]
        many = len(found) > MAX_COUNTED
        found = found[:MAX_COUNTED]
        more = f"\n  and {len(found) - MAX_CANDIDATES}{' or' * many} more" if len(found) > MAX_CANDIDATES else ""
        number = f"{'more than ' * many}{len(found)}"
        raise InvalidInputError(
            f"id prefix {prefix} is ambiguous ({number} entries):" + "".join(lines[:MAX_CANDIDATES]) + more,
            hint="give more digits of the id",
            candidates=[e.hex_id for e in found],
        )
    return found[0]


def id_width(entries: Sequence[Entry]) -> int:
    """The number of digits, at least 8, that make these ids unique."""
    ids = {e.hex_id for e in entries}
    for width in range(8, 16):
        if len({id[:width] for id in ids}) == len(ids):
            return width
    return 16


class Duration(click.ParamType[int]):
    """An integer with a unit, as seconds; "never" is 0. The unit is required: a bare number could be seconds or days."""

    name = "duration"

    def __init__(self, never: bool = False) -> None:
        self._never = never

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value == "never" and self._never:
            return 0
        try:
            found = units.seconds(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)
        if found < 1 or not value.strip()[0].isdecimal() or "." in value or "e" in value.lower():
            self.fail(f"{value!r} is not a duration: give an integer of at least 1 and a unit: {units.DURATIONS}", param, ctx)
        return int(found)


class Number(click.ParamType[float]):
    """A number with an optional unit of time or size."""

    def __init__(self, name: str, parse: Callable[[str], float], unit: str, low: float, high: float) -> None:
        self.name, self._parse, self._unit, self._low, self._high = name, parse, unit, low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return value
        try:
            found = self._parse(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)
        if not self._low <= found <= self._high:
            most = "" if self._high == float("inf") else f" and at most {self._high:g} {self._unit}"
            self.fail(f"{value!r} is out of range: give at least {self._low:g} {self._unit}{most}", param, ctx)
        return found


def size(low: float = 0, high: float = float("inf"), *, bare: bool = True) -> Number:
    """A size in MiB. bare: a number without a unit is MiB; False: the unit is required."""
    return Number("size", partial(units.mib, bare=bare), "MiB", low, high)


def seconds(low: float = 0) -> Number:
    """A duration; a bare number is seconds."""
    return Number("duration", lambda text: units.seconds(text, bare=1), "s", low, float("inf"))


yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(yes: bool, what: str) -> None:
    """Returns if --yes was given or the user agrees, else exits. Without a terminal, a missing --yes is a usage error."""
    if yes:
        return
    if not sys.stdin.isatty():
        usage(f"{what}: this needs --yes. Nothing was changed")
    if not click.confirm(f"{what}. Continue?", err=True):
        output.note("nothing was changed")
        raise click.exceptions.Exit(1)


def tokens_of(text: str) -> Any:
    """Token ids from a JSON list, or from a file that contains one ("-": stdin)."""
    try:
        if not text.lstrip().startswith("["):
            text = sys.stdin.read() if text == "-" else Path(text).read_text(encoding="utf-8")
        values = json.loads(text if text.lstrip().startswith("[") else "[" + ",".join(text.split()) + "]")
        tokens = np.array(values)
    except FileNotFoundError:
        raise fsutil.MissingFileError(text, "give --tokens a JSON list, or a file that contains one") from None
    except (OSError, ValueError) as error:
        hint = "give a JSON list, or a file that contains one"
        raise InvalidInputError(f"--tokens is not a list of token ids: {error}", hint=hint) from None
    return tokens


def usage(message: str) -> NoReturn:
    raise click.UsageError(message, click.get_current_context())


def missing(path: str) -> KVStoreError:
    return fsutil.MissingFileError(path, "check the path")


def is_stdout(path: str) -> bool:
    return path == "-" or fsutil.descriptor_of(path) == 1


def binary_stdout() -> Any:
    """stdout for bytes. Refuses a terminal."""
    if sys.stdout.isatty():
        usage("the data is binary and stdout is a terminal: give a file, or redirect stdout")
    try:
        # With PYTHONUNBUFFERED, Python's own stdout is unbuffered and may write less than it is given.
        return open(sys.stdout.fileno(), "wb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdout.buffer
