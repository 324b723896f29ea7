"""Encryption installed as the documentation says, in fresh environments: pip installs two packages into one folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.storage import keys

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/encryption.md")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

USE = """
import kvstore
from kvstore import Store, WrongKeyError, operate
secret, tokens = b"my bank account is 4711-0815 " * 5000, list(range(100))
with Store("kv.db", key="correct horse") as store:
    id = store.put(tokens, secret, excerpt="my bank account").id
with Store("kv.db", key="correct horse") as store:
    assert store.get(id).main.tobytes() == secret
    operate.backup(store, "copy.db")
for name in ("kv.db", "copy.db"):
    data = open(name, "rb").read()
    assert b"SQLite format 3" not in data and b"4711-0815" not in data
    assert operate.verify(name, key="correct horse") == []
    try:
        Store(name, key="wrong")
        raise SystemExit("a wrong key opens " + name)
    except WrongKeyError as error:
        assert "does not open" in error.message, error
with Store("copy.db", key="correct horse", readonly=True) as store:
    assert store.get(id).main.tobytes() == secret
with Store("plain.db") as store:
    store.put(tokens, secret)
assert operate.verify("plain.db") == []
print("encrypted")
"""
REFUSED = """
from kvstore import Store, WrongKeyError
try:
    Store("new.db", key="correct horse")
    print("opened")
except WrongKeyError as error:
    print(error)
with Store("plain.db") as store:
    id = store.put([1, 2, 3], b"state").id
    assert store.get(id).main.tobytes() == b"state"
"""


class Environment:
    """A virtual environment with nothing in it but pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.n = 0

    def pip(self, words: list[str]) -> str:
        done = subprocess.run([self.python, "-m", "pip", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def documented(self, command: str, wheel: Path) -> None:
        """Runs a command of the documentation, with the wheel for the checkout."""
        words = [re.sub(r"^\.\[encryption\]$", f"{wheel}[encryption]", word) for word in shlex.split(command)]
        assert words[0] == "pip"
        self.pip(words[1:])

    def run(self, script: str) -> tuple[int, str, str]:
        """A script in a new folder: exit code, and the last lines of stdout and stderr."""
        self.n += 1
        folder = self.folder / str(self.n)
        folder.mkdir()
        done = subprocess.run([self.python, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        return done.returncode, *(("\n" + text.strip()).splitlines()[-1] for text in (done.stdout, done.stderr))

    def works(self) -> None:
        assert self.run(USE) == (0, "encrypted", "")
        assert "No broken requirements" in self.pip(["check"])

    def apsw(self) -> Path:
        found = subprocess.run(
            [self.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return Path(found.stdout.strip()) / "apsw"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This source tree as a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kvstore", "migrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o", "_native.c"))
    Environment(folder).pip(["wheel", "--no-deps", "-w", str(folder / "wheels"), str(source)])
    (found,) = (folder / "wheels").glob("*.whl")
    return found


def commands(document: str) -> list[str]:
    """The first two pip commands that a document gives for encryption."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (found,) = re.findall(r"```sh\n(pip install [^\n]*\[encryption\][^\n]*\npip install [^\n]*)\n```", text)
    return found.splitlines()  # type: ignore[no-any-return]


def of_error(message: str) -> list[str]:
    """The pip commands that an error names."""
    return re.findall(r"`(pip install [^`]*)`", message)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_as_the_documentation_says(tmp_path: Path, wheel: Path, document: str) -> None:
    fresh = Environment(tmp_path)
    for command in commands(document):
        fresh.documented(command, wheel)
    fresh.works()


def test_what_goes_wrong_names_the_command_that_mends_it(tmp_path: Path, wheel: Path) -> None:
    fresh = Environment(tmp_path)

    def mended(why: str) -> None:
        code, said, _ = fresh.run(REFUSED)
        assert code == 0
        assert why in said
        (command,) = of_error(said)
        fresh.documented(command, wheel)
        fresh.works()

    # Nothing but the plain package.
    fresh.pip(["install", str(wheel)])
    mended("which is not installed")
    # The plain package written over the other, by an upgrade or because pip installed it last.
    fresh.pip(["install", "--force-reinstall", "--no-deps", keys.PLAIN])
    assert "No broken requirements" in fresh.pip(["check"])
    mended("was written over it")
    # A folder with files of both: the plain library, all else of the other.
    (library,) = (p for p in fresh.apsw().glob("__init__.*") if p.suffix in (".so", ".pyd"))
    ciphers = library.read_bytes()
    fresh.pip(["install", "--force-reinstall", "--no-deps", keys.PLAIN])
    plain = library.read_bytes()
    assert plain != ciphers
    fresh.pip(["install", "--force-reinstall", "--no-deps", keys.CIPHERS])
    library.write_bytes(plain)
    mended("was written over it")
    # A folder without its library, as after the removal of either package.
    for ruin in (library.unlink, lambda: fresh.pip(["uninstall", "-y", "apsw-sqlite3mc"])):
        ruin()
        code, _, last = fresh.run("import kvstore")
        assert code == 1
        assert last.startswith("ImportError: the package apsw is incomplete")
        for command, wanted in zip(of_error(last), (keys.PLAIN, keys.CIPHERS), strict=True):
            assert wanted in command
            fresh.documented(command, wheel)
            assert fresh.run("import kvstore")[0] == 0
        fresh.works()
