"""What states of a server depend on, found out from the server itself."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ... import layout, slotfile
from ...errors import KVStoreError
from .. import model_file
from .. import probe as probing
from .files import SlotFiles
from .upstream import Upstream, UpstreamError

log = logging.getLogger("kvstore.proxy")
PROBE_SECONDS = 30.0


class CacheOff(KVStoreError):
    """The cache cannot work with this server; the message says why."""

    code = "cache_off"


@dataclass(frozen=True)
class Identity:
    """A server process: `marker` differs from process to process where the build has one.

    `adapters` is what /lora-adapters said, None where the server has none; `probed` whether the fingerprint contains the
    computed probe; `fresh` whether no request had used the process yet; `keeps` whether a context shift keeps the start
    of a prompt unless told otherwise (--keep).
    """

    marker: str
    fingerprint: str
    n_slots: int
    n_ctx: int
    model: str
    form: slotfile.SlotFile  # a slot file of this server: what its own look like
    adapters: Any = None
    probed: bool = True
    fresh: bool = False
    keeps: bool = False

    @cached_property
    def crops(self) -> bool:
        """Whether the server can go on from any position of a state, so that it reuses all that a prompt shares with it."""
        return layout.parse(self.form.state).can_crop


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


async def _idle(upstream: Upstream) -> list[tuple[int, int]]:
    """The slots that work for nobody, the emptiest first: tokens, id. Slot 0 where the server does not list them."""
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            listed = await upstream.ask("GET", "/slots")
        except UpstreamError as error:
            if error.status is None:
                raise
            return [(0, 0)]
        idle = [(int(s.get("n_prompt_tokens") or 0), int(s["id"])) for s in listed if not s.get("is_processing")]
        if idle:
            return sorted(idle)
        if time.monotonic() > deadline:
            raise UpstreamError("no slot is idle, so the server cannot be probed yet", late=True)
        await asyncio.sleep(0.1)


async def erase(upstream: Upstream, slot: int) -> None:
    """Raises UpstreamError."""
    await upstream.ask("POST", f"/slots/{slot}?action=erase", {}, timeout=PROBE_SECONDS)


async def _compute(upstream: Upstream, files: SlotFiles, slot: int, tokens: list[int]) -> slotfile.SlotFile:
    """The slot file of these tokens, computed from nothing."""
    await erase(upstream, slot)
    body = {"prompt": tokens, "n_predict": 0, "id_slot": slot, "cache_prompt": False}
    try:
        await upstream.ask("POST", "/completion", body, timeout=PROBE_SECONDS)
    except UpstreamError as error:
        # Builds of spring 2026 refuse to answer with what is no text, after they have computed it.
        if error.status != 500:
            raise
    return await save(upstream, files, slot)


async def probe(upstream: Upstream, files: SlotFiles, n_slots: int, n_ctx: int) -> tuple[slotfile.SlotFile, str | None]:
    """A slot file of this server with at least a token in it, and the digest of the probe's rows, None where the slot
    did not hold the probe afterwards. The emptiest idle slot is used, and is empty after it."""
    tokens = probing.tokens(n_ctx)
    for attempt in range(3):
        idle = await _idle(upstream)
        slot = idle[0][1]
        file = await _compute(upstream, files, slot, tokens)
        if probing.depends_on_others(file.state, n_slots):
            # What the other slots hold would change the probe; with all of them empty, it is always the same. A slot that
            # works is erased when it is done.
            for other in range(n_slots):
                await erase(upstream, other)
            file = await _compute(upstream, files, slot, tokens)
        await erase(upstream, slot)
        if file.tokens.tolist() == tokens and probing.is_plain(file.state, len(tokens)):
            return file, probing.rows_digest(file.state)
        # Somebody else's request may have come in between.
        log.info("slot %d does not hold the probe (attempt %d)", slot, attempt + 1)
    return file, None


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


def _digest_or_path(path: str) -> dict[str, Any]:
    try:
        return {"digest": model_file.digest(path)}
    except KVStoreError as error:
        log.info("a model file is known by its path alone: %s", error)
        return {"path": path}


def _files(props: dict[str, Any], adapters: Any) -> tuple[dict[str, Any], list[Any]]:
    """The model, and the adapters with their scales."""
    lora = [
        [_digest_or_path(str(a.get("path", ""))), a.get("scale")] for a in adapters or () if isinstance(a, dict)
    ]
    return _digest_or_path(str(props.get("model_path", ""))), lora


async def ask_adapters(upstream: Upstream, timeout: float = 60.0) -> Any:
    """What /lora-adapters says, None where there is none. Raises UpstreamError where the server is not there."""
    try:
        return (await upstream.ask("GET", "/lora-adapters", timeout=timeout)) or None
    except UpstreamError as error:
        if error.status is None:
            raise
        return None


async def _model_meta(upstream: Upstream) -> Any:
    """What /v1/models says of the model itself."""
    try:
        models = await upstream.ask("GET", "/v1/models")
        return (models.get("data") or [{}])[0].get("meta")
    except UpstreamError as error:
        if error.status is None:
            raise
    except (AttributeError, IndexError, KeyError, TypeError):
        log.info("/v1/models of this server is not understood")
    return None


async def _is_fresh(upstream: Upstream) -> bool:
    """Whether the server lists its slots, and none had a task."""
    try:
        listed = await upstream.ask("GET", "/slots")
    except UpstreamError as error:
        if error.status is None:
            raise
        return False
    return all(s.get("id_task") is None and not s.get("is_processing") for s in listed)


async def _form(
    upstream: Upstream, files: SlotFiles, n_slots: int, n_ctx: int
) -> tuple[slotfile.SlotFile, str | None]:
    """`probe`, with its failures explained. Raises UpstreamError, CacheOff."""
    try:
        form, rows = await probe(upstream, files, n_slots, n_ctx)
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
    if rows is None:
        log.warning("the server's numbers cannot be probed: its states are told apart by what it says of itself alone")
    return form, rows


async def identify(upstream: Upstream, files: SlotFiles) -> Identity:
    """Raises UpstreamError where the server is not there, CacheOff where its slots cannot be saved."""
    props = await upstream.ask("GET", "/props")
    if not isinstance(props, dict) or "total_slots" not in props:
        raise CacheOff("the upstream is not a llama-server", hint="its /props has no total_slots")
    settings = props.get("default_generation_settings", {})
    params = settings.get("params", {})
    n_slots, n_ctx = int(props["total_slots"]), int(settings.get("n_ctx") or 0)
    adapters = await ask_adapters(upstream)
    meta = await _model_meta(upstream)
    fresh = await _is_fresh(upstream)
    form, rows = await _form(upstream, files, n_slots, n_ctx)
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
