"""What the states of a llama-server depend on: the proxy asks the server itself."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from ... import layout, slotfile
from ...errors import KVStoreError
from .. import model_file
from .. import probe as probing
from .backend import CacheOff, Identity
from .upstream import UpstreamError

if TYPE_CHECKING:
    from .llama_backend import LlamaServerBackend

log = logging.getLogger("kvstore.proxy")
PROBE_SECONDS = 30.0


def marker_of(props: dict[str, Any]) -> str:
    """Builds since 2026 choose a new media marker at each start; the other facts tell older builds' processes apart only
    where their settings differ."""
    names = ("media_marker", "model_path", "build_info", "total_slots")
    n_ctx = props.get("default_generation_settings", {}).get("n_ctx")
    return json.dumps([props.get(name) for name in names] + [n_ctx])


def signature(file: slotfile.SlotFile) -> list[Any]:
    """The KV types, row sizes, streams and slot file version that must be equal for a state to fit."""
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


async def _idle(backend: LlamaServerBackend) -> list[int]:
    """The ids of the slots that work for nobody, the emptiest first. Slot 0 where the server does not list its slots."""
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            listed = await backend.list_slots()
        except UpstreamError as error:
            if error.status is None:
                raise
            return [0]
        idle = sorted((report.n_tokens or 0, report.id) for report in listed if not report.working)
        if idle:
            return [id for _, id in idle]
        if time.monotonic() > deadline:
            raise UpstreamError("no slot is idle, so the server cannot be probed yet", late=True)
        await asyncio.sleep(0.1)


async def _compute(backend: LlamaServerBackend, slot: int, tokens: list[int]) -> slotfile.SlotFile:
    """The slot file of these tokens, computed from the first token on."""
    await backend.erase_slot(slot)
    body = {"prompt": tokens, "n_predict": 0, "id_slot": slot, "cache_prompt": False}
    try:
        await backend.ask("POST", "/completion", body, timeout=PROBE_SECONDS)
    except UpstreamError as error:
        # Builds of spring 2026 compute the tokens, and then refuse to answer because they are not text.
        if error.status != 500:
            raise
    return await backend.save_slot(slot)


async def probe(backend: LlamaServerBackend, n_slots: int, n_ctx: int) -> tuple[slotfile.SlotFile, str | None]:
    """A slot file of this server with at least one token in it, and the digest of the probe's rows, None where the slot
    did not hold the probe afterwards. The emptiest idle slot is used; it is empty afterwards."""
    tokens = probing.tokens(n_ctx)
    for attempt in range(3):
        slot = (await _idle(backend))[0]
        file = await _compute(backend, slot, tokens)
        if probing.depends_on_others(file.state, n_slots):
            # The contents of the other slots would change the probe; with all slots empty, it is always the same. The
            # server erases a working slot when its work is done.
            for other in range(n_slots):
                await backend.erase_slot(other)
            file = await _compute(backend, slot, tokens)
        held = file.tokens.tolist() == tokens and probing.is_plain(file.state, len(tokens))
        if held:
            await backend.try_memory(slot, file)
        await backend.erase_slot(slot)
        if held:
            return file, probing.rows_digest(file.state)
        # A request of another client may have used the slot in between.
        log.info("slot %d does not hold the probe (attempt %d)", slot, attempt + 1)
    return file, None


def _digest_or_path(path: str) -> dict[str, Any]:
    try:
        return {"digest": model_file.digest(path)}
    except KVStoreError as error:
        log.info("the digest of a model file is replaced by its path: %s", error)
        return {"path": path}


def _files(props: dict[str, Any], adapters: Any) -> tuple[dict[str, Any], list[Any]]:
    """The model file, and the adapter files with their scales."""
    lora = [
        [_digest_or_path(str(a.get("path", ""))), a.get("scale")] for a in adapters or () if isinstance(a, dict)
    ]
    return _digest_or_path(str(props.get("model_path", ""))), lora


async def _model_meta(backend: LlamaServerBackend) -> Any:
    """What /v1/models says of the model itself."""
    try:
        models = await backend.ask("GET", "/v1/models")
        return (models.get("data") or [{}])[0].get("meta")
    except UpstreamError as error:
        if error.status is None:
            raise
    except (AttributeError, IndexError, KeyError, TypeError):
        log.info("/v1/models of this server is not understood")
    return None


async def _is_fresh(backend: LlamaServerBackend) -> bool:
    """Whether the server lists its slots, and no slot had a task."""
    try:
        listed = await backend.list_slots()
    except UpstreamError as error:
        if error.status is None:
            raise
        return False
    return all(report.task is None and not report.working for report in listed)


async def _form(backend: LlamaServerBackend, n_slots: int, n_ctx: int) -> tuple[slotfile.SlotFile, str | None]:
    """`probe`, with its failures explained. Raises UpstreamError, CacheOff."""
    try:
        form, rows = await probe(backend, n_slots, n_ctx)
    except FileNotFoundError as error:
        raise CacheOff(f"the slot directory does not exist: {error}") from error
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
        raise CacheOff("the server did not compute the probe", hint="see its log")
    if rows is None:
        log.warning("the server's numbers cannot be probed: only what it says of itself tells its states apart")
    return form, rows


async def identify(backend: LlamaServerBackend) -> Identity:
    """Raises UpstreamError where the server cannot be reached, CacheOff where its slots cannot be saved."""
    props = await backend.ask("GET", "/props")
    if not isinstance(props, dict) or "total_slots" not in props:
        raise CacheOff("the upstream is not a llama-server", hint="its /props has no total_slots")
    settings = props.get("default_generation_settings", {})
    params = settings.get("params", {})
    n_slots, n_ctx = int(props["total_slots"]), int(settings.get("n_ctx") or 0)
    adapters = await backend.list_adapters()
    meta = await _model_meta(backend)
    fresh = await _is_fresh(backend)
    form, rows = await _form(backend, n_slots, n_ctx)
    model, lora = await asyncio.get_running_loop().run_in_executor(None, _files, props, adapters)
    facts = {
        "model": model,
        "meta": meta,
        "ftype": props.get("model_ftype"),
        "n_ctx": n_ctx,
        "build": props.get("build_info"),
        "modalities": props.get("modalities"),
        "speculative": params.get("speculative.types"),
        "lora": lora,
        "kv": signature(form),
        "probe": rows,
    }
    return Identity(
        marker=marker_of(props),
        fingerprint="llama-server " + json.dumps(facts, sort_keys=True),
        n_slots=n_slots,
        n_ctx=n_ctx,
        model=str(props.get("model_path", "")).replace("\\", "/").rpartition("/")[2],
        form=form,
        adapters=adapters,
        probed=rows is not None,
        fresh=fresh,
        keeps=bool(params.get("n_keep")),
    )
