"""The public face, frozen: names, signatures and fields that others rely on."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import kvstore
from kvstore import Store, bkvd, layout, meta, slotfile

NAMES = [
    "BusyError", "ClosedError", "CorruptStoreError", "DeltaError", "DiskFullError", "Entry", "FamilyStats",
    "ForkedError", "InvalidInputError", "KVStoreError", "LayoutError", "Match", "MetaBlockError", "MigrationError",
    "NewerStoreError", "NotAStoreError", "NotFoundError", "OverBudgetError", "Problem", "ReadOnlyError",
    "RemoteDeniedError", "RemoteError", "RemoteKeyError", "RemoteMatch", "SavedState", "SlotFileError", "Stats",
    "Store", "StoreIOError", "UnsafeFilesystemError", "WriteBehindError", "WrongKeyError", "bkvd", "layout", "meta",
    "operate", "slotfile",
]  # fmt: skip

REQUIRED = inspect.Parameter.empty
# name -> (positional parameters, keyword-only parameters that must be there with these defaults)
SIGNATURES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Store": (
        Store.__init__,
        {"self": REQUIRED, "path": REQUIRED},
        {"fingerprint": "", "cache_ram_mib": 8192, "cache_disk_mib": -1, "min_saved_mib": None, "write_behind": False,
         "verify": True, "readonly": False, "auto_learn": False, "remote": None, "remote_key": None, "publish": "learned",
         "remote_options": None},
    ),
    "put": (
        Store.put,
        {"self": REQUIRED, "tokens": REQUIRED, "state": REQUIRED},
        {"draft": None, "entry_class": "normal", "source": "default", "ttl": None, "n_system": 0, "user_start": 0,
         "excerpt": "", "n_input": None, "n_images": 0, "share": True},
    ),
    "get": (Store.get, {"self": REQUIRED, "id": REQUIRED}, {"n_tokens": None}),
    "take": (Store.take, {"self": REQUIRED, "id": REQUIRED}, {}),
    "match": (Store.match, {"self": REQUIRED, "tokens": REQUIRED}, {}),
    "entry": (Store.entry, {"self": REQUIRED, "id": REQUIRED}, {}),
    "entries": (Store.entries, {"self": REQUIRED}, {"family": None, "entry_class": None}),
    "set": (Store.set, {"self": REQUIRED, "id": REQUIRED}, {"entry_class": None, "source": "request", "ttl": None}),
    "delete": (Store.delete, {"self": REQUIRED, "id": REQUIRED}, {"children": "resident"}),
    "remote_match": (Store.remote_match, {"self": REQUIRED, "tokens": REQUIRED, "n_local": 0}, {}),
    "fetch": (Store.fetch, {"self": REQUIRED, "remote_match": REQUIRED, "timeout": None}, {"longest": False}),
    "learn": (Store.learn, {"self": REQUIRED, "tokens": REQUIRED, "n_tokens": None}, {}),
    "stats": (Store.stats, {"self": REQUIRED}, {}),
    "verify": (Store.verify, {"self": REQUIRED}, {}),
    "gc": (Store.gc, {"self": REQUIRED}, {"max_size": None}),
    "flush": (Store.flush, {"self": REQUIRED}, {}),
    "close": (Store.close, {"self": REQUIRED}, {}),
    "bkvd.encode": (
        bkvd.encode, {"child": REQUIRED, "parent": REQUIRED, "parent_id": REQUIRED},
        {"cell_ext": None, "min_saved": 16 << 20, "content": False},
    ),
    "bkvd.decode": (bkvd.decode, {"delta": REQUIRED, "parent": REQUIRED, "parent_id": REQUIRED, "out": None}, {}),
    "bkvd.is_delta": (bkvd.is_delta, {"blob": REQUIRED}, {}),
    "bkvd.parent_id": (bkvd.parent_id, {"blob": REQUIRED}, {}),
    "layout.parse": (layout.parse, {"blob": REQUIRED, "cell_ext": None}, {}),
    "layout.crop": (layout.crop, {"blob": REQUIRED, "n_tokens": REQUIRED}, {}),
}  # fmt: skip

ENTRY = ["id", "n_tokens", "n_images", "entry_class", "source", "created_at", "last_used", "expires_at", "hits", "family",
         "n_input", "excerpt", "parent", "size", "stored", "hex_id", "as_dict"]  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert sorted(kvstore.__all__, key=str) == NAMES
    assert all(hasattr(kvstore, name) for name in kvstore.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name: str) -> None:
    function, positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(function).parameters.values()
    by_position = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    by_keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert by_position == positional
    assert {key: by_keyword.get(key, "missing") for key in keywords} == keywords
    assert all(default is not REQUIRED for default in by_keyword.values())


def test_records_have_their_fields() -> None:
    assert all(hasattr(kvstore.Entry, name) for name in ENTRY)
    assert [f.name for f in dataclasses.fields(kvstore.SavedState)][:4] == ["entry", "tokens", "main", "draft"]
    assert [f.name for f in dataclasses.fields(kvstore.Match)] == ["entry", "n_common"]
    assert {"data", "shared", "n_ops"} <= {f.name for f in dataclasses.fields(bkvd.Delta)}
    assert {"tokens", "state", "media", "version", "packed"} <= {f.name for f in dataclasses.fields(slotfile.SlotFile)}
    assert callable(slotfile.read)
    assert callable(slotfile.write)
    assert callable(meta.MetaBlock.unpack)
    assert callable(meta.MetaBlock.pack)


def test_every_error_is_one_of_kvstores_with_a_code_of_its_own() -> None:
    errors = [getattr(kvstore, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, kvstore.KVStoreError) for error in errors)
    assert len({error.code for error in errors}) == len(errors)
    assert len({error.exit_code for error in errors}) == len(errors)
    assert all(error.__doc__ for error in errors)


def test_a_caller_mistake_is_a_value_error_and_a_missing_id_a_lookup_error() -> None:
    assert issubclass(kvstore.InvalidInputError, ValueError)
    assert issubclass(kvstore.NotFoundError, LookupError)
    assert issubclass(kvstore.StoreIOError, OSError)


def test_every_public_name_says_what_it_is() -> None:
    for name in NAMES:
        assert inspect.getdoc(getattr(kvstore, name)), name
    for name, method in inspect.getmembers(Store, inspect.isfunction):
        assert name.startswith("_") or inspect.getdoc(method), name
