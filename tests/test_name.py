"""The distribution is llama-kvstore: on the package index the name `kvstore` belongs to another project."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli import main
from kvstore.errors import extra

ROOT = Path(__file__).resolve().parent.parent
NAME = "llama-kvstore"
# `kvstore` or `kvstore[extra]` where an installer takes the name of a distribution.
FOREIGN = [
    re.compile(r"(?:pip3?|pipx|uv|poetry|conda)\s+(?:pip\s+)?(?:install|add|run)\s[^\n`]*?(?<![\w./-])kvstore(?![\w/-])"),
    re.compile(r"(?<![\w.-])kvstore\[[a-z]"),
    re.compile(r"(?:name = |version\(|Requires-Dist: )['\"]?kvstore['\"]?\W"),
]
ENDINGS = {"", ".md", ".py", ".toml", ".cfg", ".txt", ".sql", ".sh", ".yml", ".yaml", ".html", ".h", ".c", ".in"}


def texts() -> Iterator[tuple[str, str]]:
    """Documents, code and help of the project."""
    for folder in ("", ".ci", "docs", "kvstore", "migrations", "tests", "tools"):
        for path in sorted((ROOT / folder).glob("*" if folder in ("", ".ci") else "**/*")):
            if path.is_file() and path.suffix in ENDINGS and path.name not in (Path(__file__).name, ".git"):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8", errors="replace")
    for name in main.commands:
        if name != "serve":
            yield f"help of {name}", CliRunner().invoke(main, [name, "-h"]).output
    yield "hint", extra("proxy")


def test_nothing_installs_the_other_project() -> None:
    found = list(texts())
    assert {"README.md", "pyproject.toml", "Makefile", "docs/proxy.md", "kvstore/store/store.py"} <= {name for name, _ in found}
    for name, text in found:
        for pattern in FOREIGN:
            hit = pattern.search(text)
            assert hit is None, f"{name}: {hit[0] if hit else ''}"


@pytest.mark.parametrize(
    "text",
    ["pip install kvstore", "pip install 'kvstore[proxy]'", 'pip install -U "kvstore"', "uv add kvstore", "see kvstore[demo]",
     "uv pip install kvstore", 'version("kvstore")', 'name = "kvstore"\n'],
)  # fmt: skip
def test_the_search_finds_what_it_is_to_find(text: str) -> None:
    assert any(pattern.search(text) for pattern in FOREIGN)


@pytest.mark.parametrize(
    "text", ["pip install llama-kvstore", "pip install 'llama-kvstore[proxy]'", "pip install ./kvstore", "kvstore put x.db"]
)
def test_the_search_finds_nothing_else(text: str) -> None:
    assert not any(pattern.search(text) for pattern in FOREIGN)


def test_the_name_and_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nname = "{NAME}"\n' in project
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    try:
        installed = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a source tree that was not installed")
    assert kvstore.__version__ == installed == version
    assert isinstance(main, click.Group)
    assert installed in CliRunner().invoke(main, ["--version"]).output


def test_the_readme_installs_from_a_checkout_first() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"pip install (\S+)", readme)
    assert first is not None
    assert first[1] == "."
    assert "not published yet" in readme
    assert NAME in readme
    extras = re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("optional")[1], re.M)
    assert {"proxy", "llama-cpp", "demo", "encryption"} <= set(extras)
