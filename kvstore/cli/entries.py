"""Commands that change entries: rm, set, learn, gc."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from .. import Entry, NotFoundError, Store, operate
from . import base, output
from .inspect import family_of


@click.command(epilog=base.example("kvstore rm cache.db 3f2a 77b0", "kvstore rm cache.db --older 30d --dry-run"))
@base.common_options
@click.argument("ids", nargs=-1, shell_complete=base.complete_id)
@click.option("--family", help="All entries of this family.")
@click.option("--unused", is_flag=True, help="All entries never restored.")
@click.option("--older", type=base.Duration(), help="All entries not used for this long: 12h, 30d (s, min, h, d, w).")
@click.option("--class", "entry_class", type=click.Choice(["normal", "learned", "pinned"]), help="Only entries of this class.")
@click.option("--children", type=click.Choice(["keep", "drop"]),
              help="Entries stored against a removed one: keep stores them without it, drop removes them too.")
@click.option("--secure", is_flag=True, help="Rewrite the file, so that no byte of them is left in it.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@base.yes_option
def rm(
    store: str,
    key_file: str | None,
    as_json: bool,
    ids: tuple[str, ...],
    family: str | None,
    unused: bool,
    older: int | None,
    entry_class: str | None,
    children: str | None,
    secure: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove entries.

    Give IDS, or options that choose entries. Learned and pinned entries are removed only by id or with --class. The command
    asks before it removes more than one entry; without a terminal it needs --yes.
    """
    chosen = family is not None or unused or older is not None or entry_class is not None
    if bool(ids) == bool(chosen):
        base.usage("give ids, or options that choose entries, not both" if ids else "give ids, or options that choose entries")
    with base.open_store(store, key_file, readonly=dry_run) as opened:
        found = base.find(opened, ids) if ids else None
        selected = _Selection(opened, found, family_of(family), unused, older or None, entry_class)
        orphans = selected.orphans()
        if orphans and children is None:
            names = ", ".join(sorted(orphans)[:5])
            base.usage(
                f"{output.plural(len(orphans), 'entry is', 'entries are')} stored against these ({names}"
                f"{', ...' if len(orphans) > 5 else ''}): give --children keep or --children drop"
            )
        also = orphans if children == "drop" else []
        removed: list[str] = []
        if dry_run:
            removed = [e.hex_id for e in selected.entries()] + also
        else:
            n = sum(1 for _ in selected.entries()) + len(also)
            if n > 1:
                base.confirm(yes, f"{n:,} entries of {store} would be removed")
            for entry in selected.children_first():
                removed += [f"{id:016x}" for id in opened.delete(entry.id, children=children or "drop")]
            if secure:
                operate.wipe(opened)
    if as_json:
        output.data({"removed": removed, "dry_run": dry_run})
    else:
        for text in removed:
            click.echo(text)
        output.note(f"{output.plural(len(removed), 'entry', 'entries')} {'would be ' if dry_run else ''}removed")


@dataclass(frozen=True)
class _Selection:
    """The entries that `rm` is to remove: those in `found`, or those that match the options, which are read in pages."""

    opened: Store
    found: list[Entry] | None
    family: int | None
    unused: bool
    older: int | None
    entry_class: Any

    def entries(self) -> Iterator[Entry]:
        if self.found is not None:
            return iter(self.found)
        return operate.listing(
            self.opened,
            family=self.family,
            unused=self.unused,
            idle=self.older,
            entry_class=self.entry_class or "normal",
        )

    def children_first(self) -> Iterator[Entry]:
        """What is stored against an entry before it, so that none is stored anew and then removed. One can be listed twice."""
        for entry in self.entries():
            yield from [e for e in operate.descendants(self.opened, entry.id) if self._has(e)]
            yield entry

    def _has(self, e: Entry) -> bool:
        if self.found is not None:
            return any(e.id == f.id for f in self.found)
        return (
            (self.family is None or e.family == self.family)
            and not (self.unused and e.hits)
            and (self.older is None or output.seconds_since(e.last_used) >= self.older)
            and e.entry_class == (self.entry_class or "normal")
        )

    def orphans(self) -> list[str]:
        """The ids of entries that stay but need a removed one, at any depth."""
        chosen = [e for e in (operate.parents(self.opened) if self.found is None else self.found) if self._has(e)]
        found = {e.id: e.hex_id for one in chosen for e in operate.descendants(self.opened, one.id) if not self._has(e)}
        return list(found.values())


@click.command("set", epilog=base.example("kvstore set cache.db 3f2a --class pinned", "kvstore set cache.db 3f2a --ttl 7d"))
@base.common_options
@click.argument("ids", nargs=-1, required=True, shell_complete=base.complete_id)
@click.option("--class", "entry_class", type=click.Choice(["normal", "learned", "pinned"]))
@click.option("--ttl", type=base.Duration(never=True), help="Time from now until they expire: 90s, 15min, 12h, 7d, or never.")
def set_(
    store: str, key_file: str | None, as_json: bool, ids: tuple[str, ...], entry_class: Any, ttl: int | None
) -> None:
    """Change the class of entries, or when they expire. A learned entry stays when one that continues it is stored."""
    if entry_class is None and ttl is None:
        base.usage("give --class or --ttl")
    with base.open_store(store, key_file, readonly=False) as opened:
        changed = [
            opened.set(e.id, entry_class=entry_class, source="admin", ttl=ttl) for e in base.find(opened, ids)
        ]
    if as_json:
        output.data([e.as_dict() for e in changed])
        return
    grid = output.Grid("id", "class", "expires")
    for e in changed:
        grid.row(e.hex_id, e.entry_class, output.expiry(e))
    grid.show()


@click.command(
    epilog=base.example("kvstore learn cache.db 3f2a --n-tokens 1024", "kvstore learn cache.db --tokens prefix.json")
)
@base.common_options
@click.argument("id", required=False, shell_complete=base.complete_id)
@click.option("--n-tokens", type=click.IntRange(1), help="Length of the prefix in tokens (default: all).")
@click.option("--tokens", help="The tokens of the prefix: a JSON list, or a file that contains one.")
@click.option("--fingerprint", default=None, help="With --tokens: the fingerprint of the entries to search.")
@click.option("--min-saved", type=base.size(), default=None, show_default="an eighth of each state",
              help="Store as a delta only if it saves at least this: 16 (MiB), 512K, 1G.")
def learn(
    store: str,
    key_file: str | None,
    as_json: bool,
    id: str | None,
    n_tokens: int | None,
    tokens: str | None,
    fingerprint: str | None,
    min_saved: float | None,
) -> None:
    """Crop a stored state to a prefix and store that as a learned entry.

    The entries that continue the prefix are then stored as deltas against it.
    """
    if (id is None) == (tokens is None):
        base.usage("give an id or --tokens")
    wanted: Any = None if tokens is None else base.tokens_of(tokens)
    if id is not None:
        with base.open_store(store, key_file) as opened:
            (entry,) = base.find(opened, [id])
            wanted, fingerprint = entry.id, operate.fingerprint(opened, entry.id)
    with base.open_store(
        store, key_file, readonly=False, fingerprint=fingerprint or "", min_saved_mib=min_saved
    ) as opened:
        before = opened.stats().stored
        learned = opened.learn(wanted, n_tokens)
        found = opened.entry(learned.id)
        # The prefix itself takes room too, so it is added to the bytes before.
        saved = max(0, before + (0 if found is None else found.stored) - opened.stats().stored)
        shared = operate.descendants(opened, learned.id)
    if found is None:
        raise NotFoundError(f"entry {learned.hex_id} was deleted meanwhile", id=learned.hex_id)
    if as_json:
        output.data({**found.as_dict(), "shared": [e.hex_id for e in shared], "saved_bytes": saved})
        return
    click.echo(found.hex_id)
    output.note(
        f"learned {output.plural(found.n_tokens, 'token')}, {output.mib(found.size)} MiB; "
        f"{output.plural(len(shared), 'entry is', 'entries are')} now stored against it, which saves {output.mib(saved)} MiB"
    )


@click.command(epilog=base.example("kvstore gc cache.db", "kvstore gc cache.db --max-size 2G", "kvstore gc cache.db --secure"))
@base.common_options
@click.option("--secure", is_flag=True, help="Also rewrite the file, so that nothing deleted earlier is left in it.")
@click.option("--max-size", type=base.size(1, bare=False),
              help="Also remove least recently used entries until the file is at most this large: 500M, 2G.")
def gc(store: str, key_file: str | None, as_json: bool, secure: bool, max_size: float | None) -> None:
    """Remove expired entries and return free space to the disk."""
    with base.open_store(store, key_file, readonly=False) as opened:
        before = opened.stats().file_bytes
        removed = opened.gc(max_size=None if max_size is None else int(max_size * output.MIB))
        if secure:
            operate.wipe(opened)
        after = opened.stats().file_bytes
    if as_json:
        ids = [f"{id:016x}" for id in removed]
        output.data({"removed": ids, "bytes_before": before, "bytes_after": after, "wiped": secure})
        return
    output.pairs(
        [
            ("removed" if max_size is not None else "expired", output.plural(len(removed), "entry", "entries")),
            ("file", f"{output.mib(after)} MiB, {output.mib(before)} before"),
            *([("wiped", "no deleted data is left in the file")] if secure else []),
        ]
    )
