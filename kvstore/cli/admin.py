"""Commands that maintain the file: verify, repair, migrate, backup."""

from __future__ import annotations

import os

import click

from .. import CorruptStoreError, MigrationError, Problem, operate
from ..storage import schema
from . import base, output

DAMAGED = CorruptStoreError.exit_code
REMEDIES = {
    "drop": "drop the entry",
    "rows": "delete the rows",
    "totals": "count again",
    "cuts": "compute again",
    "salvage": "not in place",
    "retry": "none: verify again",
}


def _check(store: str, key_file: str | None, jobs: int) -> list[Problem]:
    with output.progress("checking digests") as moved:
        return operate.verify(store, key=base.key_of(key_file), jobs=jobs, progress=moved)


def _table(problems: list[Problem]) -> None:
    grid = output.Grid("invariant", "entry", "repair", "problem")
    for p in problems:
        grid.row(p.invariant, "-" if p.entry is None else f"{p.entry:016x}", REMEDIES[p.remedy], output.excerpt(p.text))
    grid.show()


_jobs = click.option("-j", "--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), show_default=True,
                     help="Number of states to check at once; each needs memory for a state and its parent.")


@click.command(epilog=base.example("kvstore verify cache.db --jobs 4"))
@base.common_options
@_jobs
def verify(store: str, key_file: str | None, as_json: bool, jobs: int) -> int:
    """Check the file, every invariant and every digest. Only reads. The exit status is 16 if there are problems."""
    problems = _check(store, key_file, jobs)
    if as_json:
        output.data({"ok": not problems, "problems": [p.as_dict() for p in problems]})
    elif problems:
        _table(problems)
        output.note(f"{output.plural(len(problems), 'problem')}: see `kvstore repair -h`")
    else:
        click.echo("no problems")
    return DAMAGED if problems else 0


@click.command(epilog=base.example("kvstore repair cache.db", "kvstore repair cache.db --salvage new.db"))
@base.common_options
@_jobs
@click.option("--yes", is_flag=True, help="Apply (default: only show what would be done).")
@click.option("--salvage", "new", type=click.Path(), metavar="NEW",
              help="Copy every readable entry to a new file NEW; STORE stays as it is.")
def repair(store: str, key_file: str | None, as_json: bool, jobs: int, yes: bool, new: str | None) -> int:
    """Drop the entries and rows that cannot be used, and nothing else.

    Without --yes the command only shows what it would drop.
    """
    if new is not None:
        return _salvage(store, key_file, as_json, new)
    problems = _check(store, key_file, jobs)
    removed: list[int] = []
    left = problems
    if problems and yes:
        try:
            with base.open_store(store, key_file, readonly=False) as opened:
                removed = operate.repair(opened, problems)
        except CorruptStoreError as error:
            output.note(f"kvstore: {error.message}")
        left = _check(store, key_file, jobs)
    if as_json:
        facts = {"found": [p.as_dict() for p in problems], "left": [p.as_dict() for p in left]}
        output.data({**facts, "removed": [f"{id:016x}" for id in removed], "dry_run": not yes})
        return DAMAGED if left else 0
    if not problems:
        click.echo("no problems")
        return 0
    _table(problems)
    if yes:
        for id in removed:
            output.note(f"dropped {id:016x}")
        output.note(f"{output.plural(len(removed), 'entry', 'entries')} dropped, {output.plural(len(left), 'problem')} left")
    else:
        n = len({p.entry for p in problems if p.remedy == "drop"})
        output.note(f"{output.plural(n, 'entry', 'entries')} would be dropped; use --yes to drop them")
    if left and any(p.remedy == "salvage" for p in left):
        output.note("the file itself is damaged: `kvstore repair --salvage NEW` copies every readable entry")
    return DAMAGED if left else 0


def _salvage(store: str, key_file: str | None, as_json: bool, new: str) -> int:
    with output.progress("salvaging") as moved:
        found = operate.salvage(store, new, key=base.key_of(key_file), progress=moved)
    if as_json:
        copied = [f"{id:016x}" for id in found.entries]
        output.data({"salvaged": copied, "lost": [p.as_dict() for p in found.lost], "to": new})
    else:
        if found.lost:
            _table(list(found.lost))
        n = len({p.entry for p in found.lost if p.entry is not None})
        output.note(f"{output.plural(len(found.entries), 'entry', 'entries')} copied to {new}, {n} lost")
    return 0


@click.command(epilog=base.example("kvstore migrate cache.db --dry-run"))
@base.common_options
@click.option("--dry-run", is_flag=True, help="Only show what would happen.")
@click.option("--no-backup", is_flag=True, help="Do not keep the old file. Asks first.")
@base.yes_option
def migrate(store: str, key_file: str | None, as_json: bool, dry_run: bool, no_backup: bool, yes: bool) -> None:
    """Upgrade STORE to the schema of this version.

    Opening a store does the same. The old file stays beside the new one.
    """
    key = base.key_of(key_file)
    if no_backup and not dry_run and not yes and schema.dry_run(store, key=key).steps:
        base.confirm(yes, f"{store} would be upgraded without keeping the old file")
    if dry_run:
        plan = schema.dry_run(store, key=key)
        if as_json:
            output.data(plan.as_dict())
        else:
            rows = [("file", plan.path), ("schema", f"version {plan.from_version}, upgraded to {plan.to_version}")]
            rows += [(f"step {s.number}", f"{s.name}: {s.description}") for s in plan.steps]
            if plan.steps:
                rows += [
                    ("entries", f"{plan.entries:,}"),
                    ("needs", f"{output.mib(plan.needed)} MiB of the {output.mib(plan.free)} MiB free"),
                    ("backup", plan.backup or "none"),
                ]
            else:
                rows.append(("to do", "nothing"))
            output.pairs(rows)
            _records([(r.id, r.what, r.kept) for r in plan.records])
        if plan.problem is not None:
            raise MigrationError(plan.problem)
        return
    with output.progress("upgrading") as moved:
        report = schema.upgrade(store, moved, key=key, backup=not no_backup)
    if as_json:
        output.data({"upgraded": report is not None, **({} if report is None else report.as_dict())})
    elif report is None:
        click.echo("nothing to do")
    else:
        output.pairs(
            [
                ("schema", f"version {report.to_version}, {report.from_version} before"),
                ("entries", f"{report.entries:,} in {report.seconds:.1f} s"),
                ("old file", report.backup or "not kept"),
            ]
        )
        _records([(r.id, r.what, r.kept) for r in report.records])


def _records(records: list[tuple[int, str, bool]]) -> None:
    if not records:
        return
    click.echo()
    grid = output.Grid("entry", "", "what")
    for id, what, kept in records:
        grid.row(f"{id:016x}", "kept" if kept else "left out", what)
    grid.show()


@click.command(epilog=base.example("kvstore backup cache.db cache-monday.db"))
@base.common_options
@click.argument("target", type=click.Path(dir_okay=False))
def backup(store: str, key_file: str | None, as_json: bool, target: str) -> None:
    """Copy STORE, which can be in use, to a new file.

    If anything fails, TARGET is not created.
    """
    with base.open_store(store, key_file) as opened, output.progress("copying") as moved:
        operate.backup(opened, target, progress=moved)
    size = os.path.getsize(target)
    if as_json:
        output.data({"to": target, "bytes": size})
    else:
        output.note(f"{output.mib(size)} MiB copied to {target}")


