"""What states of a server depend on, found out from the server itself."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from .. import layout, slotfile
from ..errors import KVStoreError
from . import gguf
from .proxy_files import SlotFiles
from .proxy_upstream import Upstream, UpstreamError

log = logging.getLogger("kvstore.proxy")
PROBE_SECONDS = 30.0


class CacheOff(KVStoreError):
    """The cache cannot work with this server; the message says why."""

    code = "cache_off"


@dataclass(frozen=True)
class Identity:
    """A server process: `marker` differs from process to process where the build has one."""

    marker: str
    fingerprint: str
    n_slots: int
    n_ctx: int
    model: str
    form: slotfile.SlotFile  # a slot file of this server: what its own look like


def marker_of(props: dict[str, Any]) -> str:
    """Builds since 2026 make up a new media marker when they start; other models are told apart by the rest."""
    names = ("media_marker", "model_path", "build_info", "total_slots")
    n_ctx = props.get("default_generation_settings", {}).get("n_ctx")
    return json.dumps([props.get(name) for name in names] + [n_ctx])


def signature(file: slotfile.SlotFile) -> list[Any]:
    """KV types, row sizes, streams and the form of a slot file: what must be equal for a state to fit."""
    parts: list[Any] = [file.version, file.packed]
    for part in layout.parse(file.state).parts:
        if isinstance(part, layout.AttentionPart):
            sections = next((s.sections for s in part.streams if s.n_cells), ())
            kinds = sorted({(s.is_v, s.type, s.width * s.rows) for s in sections})
            ext = [part.cell_ext, part.v_transposed, part.rotation, part.n_stream, part.n_layer, part.v_layers]
            parts.append(["attention", *ext, kinds])
        else:
            extra = [] if part.extra_row is None else [part.extra_row]
            parts.append(["recurrent", part.n_layer, part.n_tensors, part.rows, *extra])
    return parts


async def probe(upstream: Upstream, files: SlotFiles, n_slots: int) -> tuple[slotfile.SlotFile, int]:
    """A slot file of this server with at least a token in it, and the slot it is from. No slot loses what it holds."""
    slot = 0
    try:
        listed = await upstream.ask("GET", "/slots")
        idle = [int(s["id"]) for s in listed if not s.get("is_processing")]
        slot = idle[0] if idle else 0
    except UpstreamError as error:
        if error.status is None:
            raise
    file = await save(upstream, files, slot)
    if file.tokens.size == 0:
        body = {"prompt": [1], "n_predict": 0, "id_slot": slot, "cache_prompt": False}
        try:
            await upstream.ask("POST", "/completion", body, timeout=PROBE_SECONDS)
        except UpstreamError as error:
            # Builds of spring 2026 refuse to answer with what is no text, after they have computed it.
            if error.status != 500:
                raise
        file = await save(upstream, files, slot)
        await upstream.ask("POST", f"/slots/{slot}?action=erase", {}, timeout=PROBE_SECONDS)
    return file, slot


async def save(upstream: Upstream, files: SlotFiles, slot: int, timeout: float = PROBE_SECONDS) -> slotfile.SlotFile:
    """What a slot holds, through a file that is removed again. Raises UpstreamError, SlotFileError, OSError."""

    async def through_file() -> slotfile.SlotFile:
        path = files.for_save()
        try:
            body = {"filename": path.name}
            answer = await upstream.ask("POST", f"/slots/{slot}?action=save", body, timeout=timeout)
            return await asyncio.get_running_loop().run_in_executor(None, files.read, path, int(answer["n_written"]))
        finally:
            path.unlink(missing_ok=True)

    # Who waits may be cancelled. The server would then still write the file, after it was removed.
    return await asyncio.shield(files.task(through_file()))


async def restore(upstream: Upstream, files: SlotFiles, slot: int, file: slotfile.SlotFile, timeout: float) -> int:
    """Puts a state into a slot; the number of tokens. Raises UpstreamError, SlotFileError, OSError."""
    loop = asyncio.get_running_loop()

    async def through_file() -> int:
        path = await loop.run_in_executor(None, files.write, file)
        try:
            body = {"filename": path.name}
            answer = await upstream.ask("POST", f"/slots/{slot}?action=restore", body, timeout=timeout)
            return int(answer["n_restored"])
        finally:
            # Not waited for: freeing a large file takes a while.
            loop.run_in_executor(None, lambda: path.unlink(missing_ok=True))

    return await asyncio.shield(files.task(through_file()))


def _model(props: dict[str, Any]) -> dict[str, Any]:
    path = str(props.get("model_path", ""))
    try:
        return {"gguf": gguf.read(path).digest}
    except (OSError, KVStoreError) as error:
        log.info("the model file is known by its path alone: %s", error)
        return {"path": path}


async def identify(upstream: Upstream, files: SlotFiles) -> Identity:
    """Raises UpstreamError where the server is not there, CacheOff where its slots cannot be saved."""
    props = await upstream.ask("GET", "/props")
    if not isinstance(props, dict) or "total_slots" not in props:
        raise CacheOff("the upstream is no llama-server", hint="its /props has no total_slots")
    optional: dict[str, Any] = {}
    for path in ("/lora-adapters", "/v1/models"):
        try:
            optional[path] = await upstream.ask("GET", path)
        except UpstreamError as error:
            if error.status is None:
                raise
            optional[path] = None
    n_slots = int(props["total_slots"])
    try:
        form, _ = await probe(upstream, files, n_slots)
    except FileNotFoundError as error:
        raise CacheOff(f"the slot directory is not there: {error}") from error
    except UpstreamError as error:
        if error.status is None:
            raise
        raise CacheOff(f"the server does not save slots: {error.message}", hint="start it with --slot-save-path") from error
    except KVStoreError as error:
        raise CacheOff(
            f"the server's slot files do not arrive: {error.message}",
            hint="--slot-dir and the server's --slot-save-path must be one directory",
        ) from error
    if form.tokens.size == 0:
        raise CacheOff("the server computes no token", hint="its log may say why")
    model = await asyncio.get_running_loop().run_in_executor(None, _model, props)
    if "path" in model and isinstance(optional["/v1/models"], dict):
        data = optional["/v1/models"].get("data") or [{}]
        model["meta"] = data[0].get("meta")
    settings = props.get("default_generation_settings", {})
    facts = {
        "model": model,
        "ftype": props.get("model_ftype"),
        "n_ctx": settings.get("n_ctx"),
        "build": props.get("build_info"),
        "modalities": props.get("modalities"),
        "speculative": settings.get("params", {}).get("speculative.types"),
        "lora": [[a.get("path"), a.get("scale")] for a in optional["/lora-adapters"] or ()],
        "kv": signature(form),
    }
    return Identity(
        marker=marker_of(props),
        fingerprint="llama-server " + json.dumps(facts, sort_keys=True),
        n_slots=n_slots,
        n_ctx=int(settings.get("n_ctx") or 0),
        model=str(props.get("model_path", "")).replace("\\", "/").rpartition("/")[2],
        form=form,
    )
