"""Makes the golden store of the present schema version: tests/data/golden/v<version>.db.gz and .json.

    python tools/make_golden.py [FOLDER]

Run it when a schema version is new and before its first release, and never again for that version: the file is what the
stores out there look like. The tests open every golden store and compare it with its .json. `legacy` there makes version 1.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import storekit  # noqa: E402

from kvstore import Store  # noqa: E402
from kvstore.storage import schema as upgrade  # noqa: E402

SYSTEM = list(range(1, 201))
FAR_AWAY = 70 * 365 * 86400  # seconds


def fill(path: Path) -> None:
    with Store(path, fingerprint="model-a", min_saved_mib=0.001) as store:
        store.put(SYSTEM, storekit.state(SYSTEM), draft=storekit.state(SYSTEM, layers=1), entry_class="learned",
                  source="admin", n_system=200, excerpt="You are a helpful llama. 🦙")  # fmt: skip
        for n in range(3):
            tokens = [*SYSTEM, *range(1000 * (n + 1), 1000 * (n + 1) + 40)]
            store.put(tokens, storekit.state(tokens), draft=storekit.state(tokens, layers=1), n_system=200,
                      excerpt=f"Question {n}", n_input=len(tokens) - 3)  # fmt: skip
        tokens = [*SYSTEM, *range(40)]
        for n in range(4):  # a conversation: its turns become bases
            tokens = [*tokens, *range(9000 + 100 * n, 9030 + 100 * n)]
            store.put(tokens, storekit.state(tokens), n_system=200, excerpt=f"Turn {n}")
        branch = [*tokens[:-30], *range(30)]  # the last answer, made again
        store.put(branch, storekit.state(branch), n_system=200, excerpt="Turn 3 again")
        store.put([7, 8, 9], storekit.noise(1, 5000), entry_class="pinned", source="request", ttl=FAR_AWAY, n_images=2)
        store.put([-1, 2**31 - 1, -(2**31)], b"\x00", excerpt="no layout")
        tokens = list(range(5000, 5060))
        store.put(tokens, storekit.recurrent_state(60, (20, 40)), excerpt="cut at 20 and 40 tokens")
        store.get(next(e.id for e in store.entries(entry_class="pinned")))
    with Store(path, fingerprint="model-b") as store:
        store.put(SYSTEM, storekit.state(SYSTEM, model=1), user_start=10)


def expected(path: Path) -> list[dict[str, Any]]:
    out = []
    with Store(path, readonly=True) as store:
        for entry in store.entries():
            saved = store.get(entry.id)
            assert saved is not None, entry.hex_id
            facts = entry.as_dict() | {"expires_at": entry.expires_at, "tokens": saved.tokens.tolist()}
            del facts["expires_in"]
            states = {"main": saved.main, "draft": saved.draft}
            facts["sha256"] = {name: hashlib.sha256(s).hexdigest() for name, s in states.items() if s is not None}
            out.append(facts)
    return out


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests" / "data" / "golden"
    name = folder / f"v{upgrade.SCHEMA_VERSION}"
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "golden.db"
        fill(path)
        facts = expected(path)
        Path(f"{name}.db.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    Path(f"{name}.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
