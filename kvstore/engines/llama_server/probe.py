"""The computed probe of a running `LlamaServer`; the contents of its slots are restored afterwards."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import slotfile
from ...errors import KVStoreError
from .. import probe

if TYPE_CHECKING:
    from .process import LlamaServer


class ProbeError(KVStoreError):
    """The server cannot be probed; the message says why."""

    code, exit_code = "llama_server", 30


def compute(server: LlamaServer) -> str:
    """The digest of the probe's rows. Raises ProbeError, LlamaServerError, SlotFileError, LayoutError, OSError."""
    idle = _idle_slots(server, 1)
    slot, prompt = idle[0], probe.tokens(server.n_ctx // max(1, server.parallel))
    kept: dict[int, str] = {}
    try:
        _set_aside(server, slot, kept)
        file = _probe_slot(server, slot, prompt)
        if probe.depends_on_others(file.state, server.parallel):
            # The contents of the other slots would change the probe; with all slots empty, it is always the same.
            for other in _idle_slots(server, server.parallel):
                if other != slot:
                    _set_aside(server, other, kept)
            file = _probe_slot(server, slot, prompt)
        server.slot_erase(slot)
    finally:
        for other, name in kept.items():
            with suppress(KVStoreError):
                server.slot_restore(other, name)
            (server.slot_dir / name).unlink(missing_ok=True)
    if file.tokens.tolist() != prompt or not probe.is_plain(file.state, len(prompt)):
        raise ProbeError(f"slot {slot} does not hold the probe", hint="ask again when no request is under way")
    return probe.rows_digest(file.state)


def _idle_slots(server: LlamaServer, n: int) -> list[int]:
    """The idle slots, the emptiest first; waits until there are at least n."""
    deadline = time.monotonic() + server.timeout
    while True:
        listed = [s for s in server.slots() if not s.get("is_processing")]
        if len(listed) >= n:
            return [int(s["id"]) for s in sorted(listed, key=lambda s: (int(s.get("n_prompt_tokens") or 0), s["id"]))]
        if time.monotonic() > deadline:
            raise ProbeError("the slots are busy", hint="ask again when no request is under way")
        time.sleep(0.1)


def _set_aside(server: LlamaServer, slot: int, kept: dict[int, str]) -> None:
    """Saves the contents of a slot, if it is not empty, and erases it."""
    name = f"kvstore-aside-{secrets.token_hex(8)}.bin"
    # The file is created here, so that it has our mode and not the one of the server's umask.
    os.close(os.open(server.slot_dir / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    kept[slot] = name
    if not server.slot_save(slot, name).get("n_saved"):
        del kept[slot]
        (server.slot_dir / name).unlink()
    server.slot_erase(slot)


def _probe_slot(server: LlamaServer, slot: int, prompt: list[int]) -> slotfile.SlotFile:
    server.slot_erase(slot)
    try:
        server.completion(prompt, n_predict=0, cache_prompt=False, id_slot=slot)
    except KVStoreError as error:
        # Builds of spring 2026 compute the tokens, and then refuse to answer because they are not text.
        if getattr(error, "status", None) != 500:
            raise
    path = server.slot_dir / f"kvstore-probe-{secrets.token_hex(8)}.bin"
    try:
        server.slot_save(slot, path.name)
        return slotfile.read(path)
    finally:
        path.unlink(missing_ok=True)
