"""States that are on their way into the store serve the requests that come meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import proxykit
from proxykit import Chat, stats, wait_saved

from kvstore import Store

_WRITER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
connection.execute("BEGIN IMMEDIATE")
print("writing", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""


@contextmanager
def another_writer(path: Path) -> Iterator[None]:
    """Another process writes: no put of ours comes to its end meanwhile."""
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "writing\n"
            yield
        finally:
            process.stdin.write("\n")
            process.stdin.close()


def test_a_chat_goes_on_from_a_state_whose_put_is_under_way(tmp_path: Path) -> None:
    with proxykit.both(tmp_path) as (_, url):
        first = Chat(url, "Nobody")  # the store is there, and the rates are known
        first.ask()
        wait_saved(url)
        a, b = Chat(url, "Anna", system="One. " * 90), Chat(url, "Bert", system="Two. " * 90)
        a.ask()
        with another_writer(tmp_path / "states.kvstore"):
            b.ask()
            a.ask()
            assert a.reused > 0.85
        wait_saved(url)
        told = stats(url)
        assert (told["failures"], told["restores_useless"], told["token_mismatches"]) == (0, 0, 0)
    with Store(tmp_path / "states.kvstore", fingerprint=told["fingerprint"]) as store:
        assert store.verify() == []
        assert {entry.excerpt[:9] for entry in store.entries(entry_class="normal")} >= {"I am Anna", "I am Bert"}


@pytest.mark.parametrize("slots", [1, 2])
def test_chats_that_wait_for_a_slot_find_what_was_saved_meanwhile(tmp_path: Path, slots: int) -> None:
    with proxykit.both(tmp_path, parallel=slots, n_ctx=4096 * slots) as (_, url):
        chats = [Chat(url, name, system=f"{name}. " * 90) for name in ("Anna", "Bert", "Carl", "Dora")]
        for chat in chats:
            chat.ask()
        wait_saved(url)
        threads = [threading.Thread(target=lambda chat=chat: [chat.ask() for _ in range(3)]) for chat in chats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [chat.name for chat in chats if chat.reused < 0.85] == []
        assert stats(url)["failures"] == 0


def test_pages_that_wait_for_a_writer_keep_no_request_waiting(tmp_path: Path) -> None:
    with proxykit.both(tmp_path) as (_, url):
        a, b = Chat(url, "Anna", system="One. " * 90), Chat(url, "Bert", system="Two. " * 90)
        for chat in (a, b):
            chat.ask()
            wait_saved(url)
        pages = [threading.Thread(target=stats, args=(url,)) for _ in range(8)]
        with another_writer(tmp_path / "states.kvstore"):
            for page in pages:
                page.start()
            time.sleep(0.5)  # until they wait
            a.ask()
            assert a.reused > 0.85
        for page in pages:
            page.join()
        assert stats(url)["failures"] == 0
