"""The `kvstore` command. Data goes to stdout, remarks and errors to stderr; exit codes are those of `kvstore.errors`."""

from __future__ import annotations

import click

from .. import __version__
from . import care, change, look, move, run
from .base import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvstore")
def main() -> None:
    """Look into, fill and look after a store of LLM sequence states.

    Ids may be shortened, as long as they are unique. Every command takes --json.
    """


for _command in (
    look.ls, look.show, look.tree, look.stats,
    move.put, move.get, change.rm, change.set_, change.learn, change.gc,
    care.verify, care.repair, care.migrate, move.export, move.import_, care.backup,
    run.bench, run.demo, run.serve, run.completion,
):  # fmt: skip
    main.add_command(_command)

__all__ = ["main"]
