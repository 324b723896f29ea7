"""The `kvstore` command. Data is written to stdout, notes and errors to stderr; `kvstore.errors` lists the exit codes."""

from __future__ import annotations

import click

from .. import __version__
from . import admin, entries, inspect, remote, serve, transfer
from .base import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvstore")
def main() -> None:
    """Inspect, fill and maintain a store of LLM sequence states.

    Ids can be shortened as long as they are unique. Every command takes --json.
    """


for _command in (
    inspect.ls, inspect.show, inspect.tree, inspect.stats,
    transfer.put, transfer.get, entries.rm, entries.set_, entries.learn, entries.gc,
    admin.verify, admin.repair, admin.migrate, transfer.export, transfer.import_, admin.backup,
    remote.remote, remote.push, remote.pull,
    serve.bench, serve.demo, serve.serve, serve.completion,
):  # fmt: skip
    main.add_command(_command)

__all__ = ["main"]
