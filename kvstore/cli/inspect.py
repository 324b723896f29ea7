"""Commands that inspect a store: ls, show, tree, stats. They only read, and work while other processes write."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from .. import Entry, LayoutError, Store, layout, operate, slotfile
from ..types import WHOLE
from . import base, output

SORTS = ("used", "created", "size", "stored", "tokens", "hits")
NARROW = 100  # columns
STYLES = {"learned": "cyan", "pinned": "yellow", "normal": ""}


def family_of(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 16)
    except ValueError:
        base.usage(f"{text!r} is not a family: give its 16 hex digits")


@click.command(epilog=base.example("kvstore ls cache.db --sort size", "kvstore ls cache.db --watch"))
@base.common_options
@click.option("--class", "entry_class", type=click.Choice(["normal", "learned", "pinned"]), help="Only this class.")
@click.option("--family", help="Only this family (16 hex digits).")
@click.option("--unused", is_flag=True, help="Only entries never restored.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="used", show_default=True)
@click.option("-n", "--limit", type=click.IntRange(1), help="Show at most this many entries.")
@click.option("-a", "--all", "with_bases", is_flag=True,
              help="Also bases: kept only because entries are stored against them.")
@click.option("--full-ids", is_flag=True, help="Show all 16 digits of ids, as in a pipe.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--every", type=base.seconds(0.05), default=1.0, show_default=True,
              help="Interval of --watch: 2 (seconds), 500ms, 1min.")
def ls(
    store: str,
    key_file: str | None,
    as_json: bool,
    entry_class: Any,
    family: str | None,
    unused: bool,
    sort: str,
    limit: int | None,
    with_bases: bool,
    full_ids: bool,
    watch: bool,
    every: float,
) -> None:
    """List the entries of STORE, the most recently used first."""
    number = family_of(family)

    def look(opened: Store, most: int | None = None) -> list[Entry]:
        first = min((n for n in (limit, most) if n is not None), default=None)
        chosen = operate.listing(
            opened, order=sort, limit=first, family=number, entry_class=entry_class, unused=unused,
            bases=None if with_bases else False,
        )  # fmt: skip
        return list(chosen)

    def rows(opened: Store, most: int | None = None) -> tuple[list[Entry], set[int] | None]:
        entries = look(opened, most)
        return entries, _bases(opened) if with_bases else None

    with base.open_store(store, key_file) as opened:
        if watch:
            _watch(opened, rows, every, as_json, full_ids)
        elif as_json:
            output.data(_facts(*rows(opened)))
        else:
            _table(*rows(opened), full_ids).show()


def _bases(opened: Store) -> set[int]:
    return {e.id for e in operate.listing(opened, bases=True)}


def _facts(entries: list[Entry], bases: set[int] | None) -> list[dict[str, Any]]:
    """JSON-ready entries; where bases may be among them, each says whether it is one."""
    return [e.as_dict() if bases is None else {**e.as_dict(), "base": e.id in bases} for e in entries]


def _class(e: Entry, bases: set[int] | None) -> Text:
    return Text("base", style="dim") if bases and e.id in bases else Text(e.entry_class, style=STYLES[e.entry_class])


def _table(entries: list[Entry], bases: set[int] | None, full_ids: bool) -> output.Grid:
    width = 16 if full_ids or not sys.stdout.isatty() else base.id_width(entries)
    # In a terminal of 80 columns, half of a line is for the excerpt.
    narrow = sys.stdout.isatty() and output.terminal_width() < NARROW
    more = [] if narrow else [">hits", "expires", "parent"]
    grid = output.Grid("id", ">tokens", ">MiB", ">stored", "class", "used", *more, "excerpt")
    for e in entries:
        parent = "-" if e.parent is None else f"{e.parent:016x}"[:width]
        grid.row(
            Text(e.hex_id[:width], style="bold"),
            f"{e.n_tokens:,}",
            output.mib(e.size),
            output.mib(e.stored),
            _class(e, bases),
            output.age(e.last_used),
            *([] if narrow else [f"{e.hits:,}", output.expiry(e), parent]),
            output.excerpt(e.excerpt),
        )
    return grid


def _watch(
    opened: Store, look: Callable[..., tuple[list[Entry], set[int] | None]], every: float, as_json: bool, full_ids: bool
) -> None:
    def summary() -> Text:
        stats = opened.stats()
        return Text(
            f"{output.plural(sum(stats.entries.values()), 'entry', 'entries')}, {output.mib(stats.size)} MiB as put, "
            f"{output.mib(stats.stored)} MiB stored, {stats.hits:,} hits, {stats.misses:,} misses",
            style="dim",
        )

    with base.interruptible() as stop:  # SIGINT is the normal end of --watch
        if as_json or not sys.stdout.isatty():
            while not stop.is_set():
                if as_json:
                    output.data(_facts(*look(opened)))
                else:
                    _table(*look(opened), full_ids).show()
                    click.echo()
                sys.stdout.flush()
                stop.wait(every)
            return
        with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
            while not stop.is_set():
                rows = look(opened, max(1, live.console.size.height - 3))
                live.update(Group(summary(), Text(""), _table(*rows, full_ids).table), refresh=True)
                stop.wait(every)


@click.command(epilog=base.example("kvstore show cache.db 3f2a", "kvstore show cache.db 3f2a --layout"))
@base.common_options
@click.argument("id", shell_complete=base.complete_id)
@click.option("--layout", "with_layout", is_flag=True, help="Also read the state and show its layout.")
@click.option("--tokens", "with_tokens", is_flag=True, help="Also show its tokens.")
def show(store: str, key_file: str | None, as_json: bool, id: str, with_layout: bool, with_tokens: bool) -> None:
    """Show everything that the store knows about an entry, or about a base (see `kvstore ls --all`)."""
    with base.open_store(store, key_file) as opened:
        (entry,) = base.find(opened, [id], bases=None)
        is_base = opened.entry(entry.id) is None
        fingerprint, head = operate.fingerprint(opened, entry.id), operate.head(opened, entry.id)
        children = [e.hex_id for e in operate.descendants(opened, entry.id)]
        item = operate.export(opened, entry.id) if with_layout or with_tokens else None
    came = None
    if head is not None:
        found = slotfile.with_head(head, (), b"")
        came = {"kind": found.kind, "version": found.version, "packed": found.packed, "media": len(found.media)}
    facts: dict[str, Any] = {
        **entry.as_dict(),
        "n_input": entry.n_input,
        "ttl": entry.ttl,
        "fingerprint": fingerprint,
        "file": came,
        "children": children,
        **({"base": True} if is_base else {}),
    }
    if item is not None and with_tokens:
        facts["tokens"] = item.tokens.tolist()
    if item is not None and with_layout:
        try:
            facts["layout"] = layout.parse(item.main).as_dict()
        except LayoutError as error:
            facts["layout"] = None
            output.note(f"the layout of its state is not understood: {error.message}")
    if as_json:
        output.data(facts)
        return
    saved = entry.size - entry.stored
    rows = [
        ("id", entry.hex_id),
        ("tokens", f"{entry.n_tokens:,}" + (f", {output.plural(entry.n_images, 'image')}" if entry.n_images else "")),
        ("class", "base, kept for its children" if is_base else f"{entry.entry_class} (by {entry.source})"),
        ("size", f"{output.mib(entry.size)} MiB"),
        ("stored", f"{output.mib(entry.stored)} MiB" + (f", {output.mib(saved)} shared" if entry.parent else ", whole")),
        ("parent", "-" if entry.parent is None else f"{entry.parent:016x}"),
        ("children", str(len(children))),
        ("created", f"{output.date(entry.created_at)}, {output.age(entry.created_at)}"),
        ("used", f"{output.date(entry.last_used)}, {output.age(entry.last_used)}, {output.plural(entry.hits, 'hit')}"),
        ("expires", output.expiry(entry)),
        ("family", f"{entry.family:016x}"),
        ("input", f"{output.plural(entry.n_input, 'token')} in the request that created it"),
        ("fingerprint", fingerprint or "-"),
        ("came in", "no file" if came is None else f"a {came['kind']}, version {came['version']}"),
        ("excerpt", output.excerpt(entry.excerpt) or "-"),
    ]
    if with_tokens:
        rows.append(("token ids", " ".join(map(str, facts["tokens"]))))
    output.pairs(rows)
    if facts.get("layout"):
        _show_layout(facts["layout"])


def _show_layout(found: dict[str, Any]) -> None:
    click.echo()
    rows = [("envelope", found["envelope"]), ("can be cropped", "at any token" if found["can_crop"] else "no")]
    if found["checkpoints"]:
        rows.append(("checkpoints", ", ".join(map(str, found["checkpoints"]))))
    for part in found["parts"]:
        size = output.mib(part["to"] - part["from"])
        cells = output.plural(sum(part["cells"]), "cell")
        rows.append((part["kind"], f"{cells}, {output.plural(part['n_layer'], 'layer')}, {size} MiB"))
    output.pairs(rows)


@click.command(epilog=base.example("kvstore tree cache.db"))
@base.common_options
@click.option("--family", help="Only this family (16 hex digits).")
def tree(store: str, key_file: str | None, as_json: bool, family: str | None) -> None:
    """Draw the prefixes of STORE with the entries that are stored against them.

    Sizes are in MiB: as put, as stored, and saved by sharing. A base is kept only because entries are stored against it.
    """
    number = family_of(family)
    with base.open_store(store, key_file) as opened:
        entries = list(operate.listing(opened, family=number, bases=None))
        bases = _bases(opened)
    drawn = _Tree(entries, bases)
    if as_json:
        output.data(
            [{**_facts([e], bases)[0], "children": _facts([k for k, _ in drawn.below(e)], bases)} for e in drawn.roots]
        )
        return
    width = 16 if not sys.stdout.isatty() else base.id_width(entries)
    listed = [e for e in entries if e.id not in bases]
    size, stored = sum(e.size for e in listed), sum(e.stored for e in entries)
    branches: list[RenderableType] = []
    for root in drawn.roots:
        below = drawn.below(root)
        branch = Tree(_leaf(root, width, bases, [e for e, _ in below]), guide_style="dim")
        at = {root.id: branch}
        for entry, under in below:
            at[entry.id] = at[under].add(_leaf(entry, width, bases, []))
        branches.append(branch)
    total = f"{output.plural(len(listed), 'entry', 'entries')}: {output.mib(size)} MiB as put, {output.mib(stored)} stored"
    if bases:
        total += f" with {output.plural(len(entries) - len(listed), 'base')}"
    branches.append(Text(f"{total}, sharing saves {output.mib(size - stored)} MiB", style="bold"))
    output.show(Group(*branches))


class _Tree:
    """Entries and bases below what they are stored against."""

    def __init__(self, entries: list[Entry], bases: set[int]) -> None:
        self._bases = bases
        self._children: defaultdict[int, list[Entry]] = defaultdict(list)
        known = {e.id for e in entries}
        roots = []
        for e in sorted(entries, key=lambda e: (e.family, e.n_tokens, e.id)):
            if e.parent in known and e.parent is not None:
                self._children[e.parent].append(e)
            else:
                roots.append(e)
        # Prefixes with the largest saving come first.
        self.roots = sorted(roots, key=lambda e: (-sum(_saved(k, bases) for k, _ in self.below(e)), -e.size))

    def below(self, root: Entry) -> list[tuple[Entry, int]]:
        """What is stored against an entry, at any depth, each with the id that it is drawn under.

        The one child of a base is drawn beside it: a conversation of 100 turns is a list, and no stair of 100 steps.
        """
        found: list[tuple[Entry, int]] = []
        left = [(child, root.id) for child in reversed(self._children[root.id])]
        while left:
            entry, under = left.pop()
            found.append((entry, under))
            children = self._children[entry.id]
            beside = entry.id in self._bases and len(children) == 1
            left += [(child, under if beside else entry.id) for child in reversed(children)]
        return found


def _saved(e: Entry, bases: set[int]) -> int:
    return -e.stored if e.id in bases else e.size - e.stored


def _leaf(e: Entry, width: int, bases: set[int], below: list[Entry]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(e.hex_id[:width], style="bold")
    text.append(f"  {e.n_tokens:>7,} tokens  {output.mib(e.size):>10} MiB")
    text.append(f"  {output.mib(e.stored):>10} stored", style="green" if e.parent else "")
    if e.id in bases:
        text.append("  base", style="dim")
    elif e.entry_class != "normal":
        text.append(f"  {e.entry_class}", style=STYLES[e.entry_class])
    if below:
        text.append(f"  saves {output.mib(sum(_saved(k, bases) for k in below))} MiB", style="green")
    if e.excerpt:
        text.append(f"  {output.excerpt(e.excerpt)}", style="dim")
    return text


@click.command(epilog=base.example("kvstore stats cache.db"))
@base.common_options
def stats(store: str, key_file: str | None, as_json: bool) -> None:
    """Show what STORE holds, how much sharing saves, and how it was used."""
    with base.open_store(store, key_file) as opened:
        found = opened.stats()
    if as_json:
        output.data(found.as_dict())
        return
    grid = output.Grid("class", ">entries", ">MiB", ">stored")
    for name, n in found.entries.items():
        grid.row(name, f"{n:,}", output.mib(found.size_by_class[name]), output.mib(found.stored_by_class[name]))
    if found.bases:
        grid.row("base", f"{found.bases:,}", "-", output.mib(found.base_bytes), style="dim")
    grid.row("all", f"{sum(found.entries.values()):,}", output.mib(found.size), output.mib(found.stored), style="bold")
    grid.show()
    click.echo()
    asked = found.hits + found.misses
    rate = f" ({100 * found.hits / asked:.0f} %)" if asked else ""
    evicted = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in found.evictions.items()) or "none"
    whole = [f"{n:,}: {WHOLE[cause]}" for cause, n in found.whole_puts.items()]
    output.pairs(
        [
            ("sharing saves", f"{output.mib(found.size - found.stored)} MiB"),
            ("file", f"{output.mib(found.file_bytes)} MiB with its log, {output.mib(found.free_bytes)} of them free"),
            ("served", f"{found.hits:,} of {asked:,} requests{rate}, {found.tokens_served:,} tokens"),
            ("put", f"{found.puts:,}, {found.shared_puts:,} of them shared"),
            ("stored whole", "; ".join(whole) or "none"),
            ("removed", evicted),
            ("codec", f"{found.encode_seconds:.2f} s encoding, {found.decode_seconds:.2f} s decoding"),
            ("families", f"{found.n_families:,}"),
        ]
    )
