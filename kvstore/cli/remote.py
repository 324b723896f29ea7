"""Commands of the shared tier: remote init, ls, status, gc, verify, rm; push and pull."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from .. import InvalidInputError, Store, operate
from ..errors import RemoteKeyError, extra
from ..fleet.options import OURS
from . import base, output

F = TypeVar("F", bound=Callable[..., Any])
KEY_VARIABLE, URL_VARIABLE = "KVSTORE_REMOTE_KEY_FILE", "KVSTORE_REMOTE"
GIB = 1 << 30
SHOWN = 200

remote_key_option = click.option(
    "--remote-key", type=click.Path(dir_okay=False), envvar=KEY_VARIABLE, show_envvar=True, help="File of the fleet's key."
)
remote_url_option = click.option(
    "--remote", "url", metavar="URL", envvar=URL_VARIABLE, show_envvar=True, help="Address of the fleet's object store."
)
settings_option = click.option(
    "-o", "--option", "settings", multiple=True, metavar="NAME=VALUE",
    help="Setting of the object store, such as endpoint=http://10.0.0.5:8333 or region=eu-west-1. No credentials.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def remote_settings(given: tuple[str, ...]) -> dict[str, Any]:
    """remote_options of NAME=VALUE. Raises InvalidInputError: other users of the machine can read a command line."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInputError(f"option {name!r} has no value", hint="give NAME=VALUE")
        if any(word in name.lower() for word in ("secret", "token", "password", "access_key", "account_key", "sas")):
            raise InvalidInputError(
                f"option {name!r} is a credential", hint="credentials come from the environment: see docs/fleet.md"
            )
        found[name] = value
    for name in OURS.keys() & found.keys():
        try:
            found[name] = float(found[name])
        except ValueError:
            raise InvalidInputError(f"option {name} is {found[name]!r}", hint="give a number") from None
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"kvstore.fleet.{name}")
    except ImportError as error:
        raise InvalidInputError(f"a remote needs {error.name}", hint=extra("remote")) from error


def _admin(
    url: str, settings: tuple[str, ...], key: str | None = None, *, lifetime_days: float | None = None, create: bool = False
) -> Any:
    """Without a key names and sizes can be read, and nothing else."""
    options = remote_settings(settings)
    if lifetime_days is not None:
        options["lifetime_days"] = lifetime_days
    checked = _module("options").remote_options(url, bytes(32) if key is None else key, "none", options)
    return _module("admin").FleetAdmin(checked, create=create)


def _common(function: F) -> F:
    function = json_option(function)
    function = settings_option(function)
    return click.argument("url", envvar=URL_VARIABLE)(function)


@click.group(cls=base.Subcommands, epilog=base.example("kvstore remote init s3://kvcache/team --remote-key fleet.key"))
def remote() -> None:
    """Set up and look after the object store that a fleet shares.

    URL is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER. Every command takes --json.
    """


@remote.command(epilog=base.example("kvstore remote init s3://kvcache/team --remote-key fleet.key"))
@_common
@remote_key_option
def init(url: str, settings: tuple[str, ...], as_json: bool, remote_key: str | None) -> None:
    """Make the fleet's key, and try the object store.

    A key file that exists is checked and kept. Writes, lists, reads and deletes a small object.
    """
    if remote_key is None:
        raise RemoteKeyError("no key file is named", hint="give --remote-key FILE: a new key is written to it")
    admin = _admin(url, settings, remote_key if os.path.exists(remote_key) else None, create=True)
    clock = admin.probe()
    made = not os.path.exists(remote_key)
    if made:
        _module("keys").create_key_file(remote_key)
    skew = int(clock - time.time())
    if as_json:
        output.data({"url": url, "key_file": remote_key, "key_made": made, "clock_difference": skew})
        return
    output.note(f"{url} can be written, listed, read and deleted from")
    output.note(f"{'a new key is in' if made else 'the key is in'} {remote_key}: copy it to every machine of the fleet")
    output.note("give the bucket two lifecycle rules: delete after 30 days, abort uploads after 1 day (docs/fleet.md)")
    if abs(skew) > 300:
        output.note(f"the clock of this machine and that of the object store differ by {skew} s")


@remote.command("ls", epilog=base.example("kvstore remote ls s3://kvcache/team"))
@_common
@click.option("--limit", type=click.IntRange(1), default=SHOWN, show_default=True, help="Show at most N objects.")
def list_(url: str, settings: tuple[str, ...], as_json: bool, limit: int) -> None:
    """List the objects, the youngest first. Needs no key."""
    admin = _admin(url, settings)
    objects = admin.objects()
    now = time.time()
    if as_json:
        output.data([each.as_dict(now) for each in objects[:limit]])
        return
    grid = output.Grid("id", "class", ">tokens", ">MiB", "parent", "written")
    for each in objects[:limit]:
        parent = each.name.parent[:8] if each.name.is_delta else "-"
        grid.row(
            each.name.state, each.name.entry_class, f"{each.name.n_tokens:,}", output.mib(each.size), parent,
            output.age(each.modified),
        )  # fmt: skip
    grid.show()
    if len(objects) > limit:
        output.note(f"and {len(objects) - limit:,} more: see --limit")


@remote.command(epilog=base.example("kvstore remote status s3://kvcache/team"))
@_common
def status(url: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Count objects and bytes. Needs no key."""
    admin = _admin(url, settings)
    objects = admin.objects()
    by_fp: dict[str, list[Any]] = {}
    for each in objects:
        by_fp.setdefault(each.name.fp, []).append(each)
    facts = {
        "url": url,
        "objects": len(objects),
        "bytes": sum(each.size for each in objects),
        "deltas": sum(each.name.is_delta for each in objects),
        "learned": sum(each.name.entry_class == "learned" for each in objects),
        "ignored": admin.ignored,
        "newest": max((each.modified for each in objects), default=None),
        "oldest": min((each.modified for each in objects), default=None),
        "fingerprints": [
            {"fp": fp, "objects": len(each), "bytes": sum(o.size for o in each)} for fp, each in sorted(by_fp.items())
        ],
    }
    if as_json:
        output.data(facts)
        return
    click.echo(f"{output.plural(len(objects), 'object')}, {output.mib(facts['bytes'])} MiB; {facts['deltas']} are deltas")
    if objects:
        click.echo(f"the youngest {output.age(facts['newest'])}, the oldest {output.age(facts['oldest'])}")
    for each in facts["fingerprints"]:
        click.echo(f"  {each['fp']}: {output.plural(each['objects'], 'object')}, {output.mib(each['bytes'])} MiB")
    if admin.ignored:
        click.echo(f"{output.plural(admin.ignored, 'file')} of others, ignored")


@remote.command(epilog=base.example("kvstore remote gc file:///mnt/shared --max-gib 200"))
@_common
@click.option("--lifetime-days", type=click.FloatRange(1 / 24, 36500), help="Delete what is older.  [default: 30]")
@click.option("--max-gib", type=click.FloatRange(0), help="Also delete the oldest until at most this size is left.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def gc(
    url: str, settings: tuple[str, ...], as_json: bool, lifetime_days: float | None, max_gib: float | None, dry_run: bool
) -> None:
    """Delete old objects, as a lifecycle rule does where the object store has one. Needs no key."""
    admin = _admin(url, settings, lifetime_days=lifetime_days)
    deleted = admin.gc(max_bytes=None if max_gib is None else int(max_gib * GIB), dry_run=dry_run)
    if as_json:
        output.data({
            "deleted": [each.name.path for each in deleted.objects],
            "bytes": sum(each.size for each in deleted.objects),
            "expired": len(deleted.expired), "for_size": len(deleted.for_size), "orphans": len(deleted.orphans),
            "abandoned_uploads": deleted.abandoned, "dry_run": dry_run,
        })  # fmt: skip
        return
    size = output.mib(sum(each.size for each in deleted.objects))
    would = "would be " if dry_run else ""
    click.echo(f"{output.plural(len(deleted.objects), 'object')}, {size} MiB {would}deleted")


@remote.command(epilog=base.example("kvstore remote verify s3://kvcache/team --remote-key fleet.key"))
@_common
@remote_key_option
def verify(url: str, settings: tuple[str, ...], as_json: bool, remote_key: str | None) -> int:
    """Fetch and check every object; list those that must not be served. Deletes nothing."""
    if remote_key is None:
        raise RemoteKeyError("only who has the key can open objects", hint=f"give --remote-key FILE, or set {KEY_VARIABLE}")
    admin = _admin(url, settings, remote_key)
    bad = admin.verify()
    if as_json:
        output.data([{"path": each.name.path, "id": each.name.state, "problem": why} for each, why in bad])
    else:
        for each, why in bad:
            click.echo(f"{each.name.path}: {why}")
        output.note("no problems" if not bad else f"{output.plural(len(bad), 'object')} must not be served")
    return int(bool(bad))


@remote.command(epilog=base.example("kvstore remote rm s3://kvcache/team k7f3q2mzx4 --yes"))
@_common
@click.argument("ids", nargs=-1, required=True)
@base.yes_option
def rm(url: str, settings: tuple[str, ...], as_json: bool, ids: tuple[str, ...], yes: bool) -> None:
    """Delete objects, and the deltas against them. Needs no key.

    Machines that fetched them keep their copies until these expire.
    """
    admin = _admin(url, settings)
    found = admin.find(ids)
    base.confirm(yes, f"{output.plural(len(found), 'object')} will be deleted; machines that fetched them keep their copies")
    admin.remove(found)
    if as_json:
        output.data([each.name.path for each in found])
        return
    output.note(f"{output.plural(len(found), 'object')} deleted; machines that fetched them keep their copies")


def _needed(store: str, url: str | None, key: str | None, *, create: bool = False) -> dict[str, Any]:
    if not (create and url) and not os.path.exists(store):
        raise base.missing(store)
    if not url:
        raise InvalidInputError("no remote is named", hint=f"give --remote URL, or set {URL_VARIABLE}")
    if key is None:
        raise RemoteKeyError("no key file is named", hint=f"give --remote-key FILE, or set {KEY_VARIABLE}")
    return {"remote": url, "remote_key": key}


def _by_fingerprint(store: str, key_file: str | None, ids: tuple[str, ...]) -> dict[str, list[int]]:
    """The entries to push, by their fingerprint; without ids the learned and pinned ones. Fewest tokens first."""
    found: dict[str, list[int]] = {}
    with base.open_store(store, key_file) as opened:
        entries = base.find(opened, ids) if ids else [e for e in opened.entries() if e.entry_class != "normal"]
        for entry in sorted(entries, key=lambda e: (e.entry_class != "learned", e.n_tokens)):
            found.setdefault(operate.fingerprint(opened, entry.id), []).append(entry.id)
    return found


@click.command(epilog=base.example("kvstore push cache.db --remote s3://kvcache/team --remote-key fleet.key"))
@base.common_options
@click.argument("ids", nargs=-1, shell_complete=base.complete_id)
@remote_url_option
@remote_key_option
@settings_option
def push(
    store: str, key_file: str | None, as_json: bool, ids: tuple[str, ...], url: str | None, remote_key: str | None,
    settings: tuple[str, ...],
) -> None:  # fmt: skip
    """Publish entries to the fleet: those with these ids, or all learned and pinned ones."""
    options = {**_needed(store, url, remote_key), "remote_options": remote_settings(settings), "publish": "none"}
    rows: list[dict[str, Any]] = []
    for fingerprint, wanted in _by_fingerprint(store, key_file, ids).items():
        with base.open_store(store, key_file, readonly=False, fingerprint=fingerprint, **options) as opened:
            for id in wanted:
                rows.append(_push(opened, id))
    if as_json:
        output.data(rows)
        return
    for row in rows:
        click.echo(f"{row['id']}  {row['result']}  {row['path'] or ''}".rstrip())


def _push(store: Store, id: int) -> dict[str, Any]:
    assert store.remote is not None
    before = store.remote.metrics()["remote_published_total"]
    found = store.remote.push(id)
    if found is None:
        result = "not published: it has fewer than 64 tokens, or images"
    else:
        result = "published" if store.remote.metrics()["remote_published_total"] > before else "there already"
    return {"id": f"{id:016x}", "result": result, "path": None if found is None else found.path}


@click.command(epilog=base.example("kvstore pull cache.db --learned --remote s3://kvcache/team --remote-key fleet.key"))
@base.common_options
@click.option("--learned", is_flag=True, help="Only learned prefixes.")
@click.option("--fingerprint", help="Only entries of this fingerprint.  [default: all]")
@remote_url_option
@remote_key_option
@settings_option
def pull(
    store: str, key_file: str | None, as_json: bool, learned: bool, fingerprint: str | None, url: str | None,
    remote_key: str | None, settings: tuple[str, ...],
) -> None:  # fmt: skip
    """Fetch what the fleet has into a store, which is created if it does not exist."""
    needed = _needed(store, url, remote_key, create=True)
    options = {**needed, "remote_options": remote_settings(settings), "publish": "none"}
    assert url is not None
    wanted = [fingerprint] if fingerprint is not None else sorted(_admin(url, settings, remote_key).fingerprints().values())
    fetched: list[str] = []
    refused = 0
    for each in wanted:
        with base.open_store(store, key_file, create=True, readonly=False, fingerprint=each, **options) as opened:
            assert opened.remote is not None
            opened.remote.poll(full=True)
            fetched += opened.remote.pull_all(learned=learned)
            refused += int(opened.remote.metrics()["remote_refused_total"])
    if as_json:
        output.data({"fetched": fetched, "refused": refused})
        return
    output.note(f"{output.plural(len(fetched), 'object')} fetched" + (f", {refused} refused" if refused else ""))
