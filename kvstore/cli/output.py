"""Output for a terminal: tables, sizes, ages, progress. Data is written to stdout, everything else to stderr."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from .. import Entry
from ..meta import clean_excerpt
from ..util.printable import json_text, printable

MIB = 1 << 20
GAP = 2  # between columns
MIN_TEXT = 16  # the least width of a column that is shortened
WIDE = 4000  # for a pipe: nothing is cut off
AHEAD = 60  # seconds by which two clocks may differ
UNITS = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))


def mib(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.2f}"


def duration(seconds: float) -> str:
    """In words, in the largest unit only: "3 hours"."""
    for size, name in UNITS:
        if seconds >= size:
            n = int(seconds // size)
            return f"{n} {name}{'' if n == 1 else 's'}"
    n = max(0, int(seconds))
    return f"{n} second{'' if n == 1 else 's'}"


def age(then: int) -> str:
    seconds = time.time() - then
    if seconds < -AHEAD:
        return "in the future"  # written while the clock was ahead
    return "just now" if seconds < 5 else f"{duration(seconds)} ago"


def expiry(entry: Entry) -> str:
    if entry.expires_at is None:
        return "never"
    left = math.ceil(entry.expires_at - time.time())
    if left <= 0:
        return "expired"
    ahead = entry.ttl is not None and left > entry.ttl + AHEAD
    return f"in {duration(left)}" + (" (the clock was ahead)" if ahead else "")


def date(then: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then))
    except (OverflowError, OSError, ValueError):  # a file may hold any number
        return f"{then} s since 1970"


def plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def excerpt(text: str) -> str:
    """An excerpt that is safe to print: another program may have written anything into the file."""
    return printable(clean_excerpt(text))


def data(value: Any) -> None:
    """JSON to stdout."""
    click.echo(json_text(value))


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def render(item: RenderableType) -> str:
    terminal = sys.stdout.isatty()
    # The terminal wraps a table that is too wide; nothing is cut off.
    width = None if terminal and not isinstance(item, Table) else WIDE
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)
    with console.capture() as captured:
        console.print(item)
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def show(item: RenderableType) -> None:
    click.echo(render(item), nl=False)


def note(text: str) -> None:
    """A note to stderr."""
    click.echo(printable(text, lines=True), err=True)


class Grid:
    """A table; `>name` is a column of numbers, aligned to the right."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[list[Text], str]] = []

    def row(self, *cells: str | Text, style: str = "") -> None:
        texts = [Text(printable(c.plain), c.style) if isinstance(c, Text) else Text(printable(c)) for c in cells]
        self._rows.append((texts, style))

    @property
    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        widths = [
            max([len(column.lstrip(">")), *(cells[i].cell_len for cells, _ in self._rows)])
            for i, column in enumerate(self._columns)
        ]
        if sys.stdout.isatty() and not self._columns[-1].startswith(">"):
            # The last column is text and is shortened to fit the terminal.
            room = terminal_width() - sum(widths[:-1]) - GAP * (len(widths) - 1)
            widths[-1] = min(widths[-1], max(MIN_TEXT, room))
        for column, width in zip(self._columns, widths, strict=True):
            number = column.startswith(">")
            justify: Literal["left", "right"] = "right" if number else "left"
            table.add_column(column.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis", width=width)
        for cells, style in self._rows:
            table.add_row(*cells, style=style)
        return table

    def show(self) -> None:
        show(self.table)


def pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    grid = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    names = max(len(name) for name, _ in rows)
    grid.add_column(no_wrap=True, style="bold", width=names)
    grid.add_column(overflow="fold", max_width=max(MIN_TEXT, terminal_width() - names - GAP) if sys.stdout.isatty() else None)
    for name, value in rows:
        grid.add_row(Text(printable(name)), Text(printable(value)))
    show(grid)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function (bytes done, total bytes) that moves a progress bar. Without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def seconds_since(then: int) -> float:
    return time.time() - then
