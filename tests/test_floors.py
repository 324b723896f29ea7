"""The floors of kvstore: a module imports from its own floor and those below it, never from above, never in a circle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvstore

ROOT = Path(kvstore.__file__).parent
ARCHITECTURE = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
# From the lowest. A folder stands for all modules in it.
FLOORS: list[set[str]] = [
    {"errors", "native", "types"},
    {"util"},
    {"bkvd", "bkvd_chain", "bkvd_format", "layout", "meta", "slotfile"},
    {"storage", "migrations"},
    {"fleet"},
    {"store"},
    {"operate"},
    {""},
    {"cli", "engines"},
]
MOST_MODULES = 14  # directly in kvstore/
# What the users of the face may name beside its public names: where these are defined, and the helpers that are shared with it.
FACE = {"", "bkvd", "errors", "fleet.admin", "fleet.counters", "fleet.keys", "fleet.options", "fleet.remote",
        "layout", "meta", "operate", "slotfile", "storage.schema", "store", "types", "util.fsutil",
        "util.buffers", "util.hashing", "util.printable", "util.units"}
ALONE = {
    "aiohttp": {"engines.proxy.http_client"},
    "apsw": {"storage.sqlite"},
    "cffi": {"native.build"},
    "kvstore._native": {"bkvd", "bkvd_chain", "bkvd_format"},
    "cryptography": {"fleet.sealing"},
    "obstore": {"fleet.object_store"},
    "xxhash": {"util.hashing"},
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [p for p in path.relative_to(ROOT).with_suffix("").parts if p != "__init__"]
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """The absolute names that a module imports, wherever in it it does: modules, and names out of them."""
    path = MODULES[name]
    package = ["kvstore", *name.split(".")] if name else ["kvstore"]
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                found |= {full} if full.removeprefix("kvstore.") in MODULES else {module, full}
    return found


def inner(name: str) -> set[str]:
    """The modules of kvstore that a module imports."""
    found = set()
    for full in imports(name):
        if full.startswith("kvstore."):
            rest = full.removeprefix("kvstore.")
            if rest in MODULES or rest.split(".")[0] == "migrations":
                found.add(rest)
    return found - {name}


def floor(name: str) -> int:
    for number, names in enumerate(FLOORS):
        if name in names or name.split(".")[0] in names:
            return number
    raise AssertionError(f"{name} is on no floor: add it to the table")


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "kvstore")
def test_a_module_imports_nothing_from_above(name: str) -> None:
    above = {other for other in inner(name) if floor(other) > floor(name) and other.split(".")[0] != "migrations"}
    assert above == set()


@pytest.mark.parametrize("name", [n for n in MODULES if floor(n) == len(FLOORS) - 1])
def test_users_of_the_face_import_public_names_only(name: str) -> None:
    group = name.split(".")[0]
    other = {n for n in inner(name) if n.split(".")[0] not in ("cli", "engines") and n not in FACE}
    assert other == set(), f"{group} is not to know these"


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in done or name not in MODULES:
            return
        for other in inner(name):
            visit(other, (*path, name))
        done.add(name)

    for name in MODULES:
        if name and floor(name) < len(FLOORS) - 2:
            visit(name, ())


def longest_chain(name: str, known: dict[str, list[str]]) -> list[str]:
    """The longest chain of imports inside kvstore that begins at a module."""
    if name not in known:
        known[name] = []  # ends the recursion where a package and a module in it import each other
        others = inner(name) | ({""} if name and "kvstore" in imports(name) else set())
        chains = (longest_chain(other, known) for other in sorted(others) if other in MODULES)
        known[name] = [name or "kvstore", *max(chains, key=len, default=[])]
    return known[name]


def test_the_number_of_import_levels_is_written_down() -> None:
    known: dict[str, list[str]] = {}
    chain = max((longest_chain(name, known) for name in sorted(MODULES)), key=len)
    written = re.search(r"The longest chain of imports has (\d+) modules", ARCHITECTURE)
    assert written is not None
    assert int(written[1]) == len(chain), " -> ".join(chain)


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w/]+/[\w./*-]*|[\w/]+\.(?:py|sql|c|h|html|md|toml))`", ARCHITECTURE))
    assert len(named) > 40
    assert [name for name in sorted(named) if not any((*ROOT.glob(name), *ROOT.parent.glob(name)))] == []


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| \*\*", ARCHITECTURE, re.MULTILINE)
    assert 10 <= len(rows) <= 25


@pytest.mark.parametrize("library", ALONE)
def test_one_module_knows_each_library(library: str) -> None:
    who = {
        name for name in MODULES if any(full == library or full.startswith(f"{library}.") for full in imports(name))
    }
    assert who <= ALONE[library]


def test_few_modules_lie_beside_the_folders() -> None:
    assert len([path for path in MODULES.values() if path.parent == ROOT]) <= MOST_MODULES


def test_every_floor_names_modules_that_exist() -> None:
    known = {name.split(".")[0] for name in MODULES} | set(MODULES) | {"migrations"}
    assert {name for names in FLOORS for name in names} - known == set()


def test_nothing_is_imported_by_star_and_nothing_pickles() -> None:
    for name in MODULES:
        assert not any(full.endswith(".*") or full in ("pickle", "marshal", "shelve") for full in imports(name)), name


def test_click_reads_every_command_line() -> None:
    assert [name for name in MODULES if {"argparse", "optparse", "getopt"} & imports(name)] == []
