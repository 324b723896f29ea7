"""Starts a llama-server on the loopback interface.

The server is a separate process: either the one inside PyPI's `xllamacpp` (of this interpreter, or of the one given as
`python=`), or a `llama-server` program. `kvstore.slotfile` reads its slot files.

    with LlamaServer("model.gguf", slot_dir=folder) as server:
        tokens = server.chat_tokens([{"role": "user", "content": "Hello"}])
        answer = server.completion(tokens, n_predict=16)
        server.slot_save(0, "hello.bin")
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

from ...errors import InvalidInputError, KVStoreError
from .. import model_file
from . import probe as server_probe
from .client import LlamaClient, LlamaServerError, Message

__all__ = ["OPTIONS", "LlamaServer", "LlamaServerError", "Message", "ServerCommand", "find_server"]

log = logging.getLogger("kvstore")
StrPath: TypeAlias = "str | os.PathLike[str]"

# Name here: attribute of xllamacpp's CommonParams, option of llama-server.
OPTIONS: dict[str, tuple[str, str]] = {
    "n_batch": ("n_batch", "--batch-size"),
    "n_ubatch": ("n_ubatch", "--ubatch-size"),
    "n_gpu_layers": ("n_gpu_layers", "--n-gpu-layers"),
    "threads": ("cpuparams.n_threads", "--threads"),
    "threads_batch": ("cpuparams_batch.n_threads", "--threads-batch"),
    "cache_ram_mib": ("cache_ram_mib", "--cache-ram"),
    "ctx_checkpoints": ("n_ctx_checkpoints", "--ctx-checkpoints"),
    "checkpoint_min_step": ("checkpoint_min_step", "--checkpoint-min-step"),
    "cache_reuse": ("n_cache_reuse", "--cache-reuse"),
    "slot_prompt_similarity": ("slot_prompt_similarity", "--slot-prompt-similarity"),
    "kv_unified": ("kv_unified", "--kv-unified"),
    "swa_full": ("swa_full", "--swa-full"),
    "sleep_idle_seconds": ("sleep_idle_seconds", "--sleep-idle-seconds"),
    "metrics": ("endpoint_metrics", "--metrics"),
    "mmproj": ("mmproj.path", "--mmproj"),
    "model_draft": ("speculative.draft.mparams.path", "--model-draft"),
    "chat_template": ("chat_template", "--chat-template"),
    "rope_freq_base": ("rope_freq_base", "--rope-freq-base"),
    "rope_freq_scale": ("rope_freq_scale", "--rope-freq-scale"),
    "rope_scaling": ("rope_scaling_type", "--rope-scaling"),
    "yarn_ext_factor": ("yarn_ext_factor", "--yarn-ext-factor"),
    "yarn_attn_factor": ("yarn_attn_factor", "--yarn-attn-factor"),
    "yarn_beta_fast": ("yarn_beta_fast", "--yarn-beta-fast"),
    "yarn_beta_slow": ("yarn_beta_slow", "--yarn-beta-slow"),
    "yarn_orig_ctx": ("yarn_orig_ctx", "--yarn-orig-ctx"),
    "lora": ("lora_adapters", "--lora"),
    "context_shift": ("ctx_shift", "--context-shift"),
    "group_attention_n": ("grp_attn_n", "--grp-attn-n"),
    "group_attention_w": ("grp_attn_w", "--grp-attn-w"),
}
_SHAPES_STATES = (
    "mmproj",
    "model_draft",
    "swa_full",
    "rope_freq_base",
    "rope_freq_scale",
    "rope_scaling",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "group_attention_n",
    "group_attention_w",
)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server: `argv`, whether it is the one of xllamacpp, and its version or "unknown"."""

    argv: tuple[str, ...]
    xllamacpp: bool
    version: str


@lru_cache
def _xllamacpp_version(python: str) -> str | None:
    """The version of xllamacpp in an interpreter, asked there, without importing the package (it takes a second)."""
    code = "import importlib.metadata as m; print(m.version('xllamacpp'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@lru_cache
def _binary_version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise LlamaServerError(f"{program} cannot be run: {error}") from error
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.strip() for line in lines if line.startswith("version:")), "unknown")


def find_server(python: StrPath | None = None) -> ServerCommand:
    """The server to start: xllamacpp's in `python` where that is given; else the program named by the environment
    variable LLAMA_SERVER, xllamacpp's in this interpreter, or `llama-server` on the PATH, in this order."""
    program = None if python else os.environ.get("LLAMA_SERVER")
    if not program:
        interpreter = os.fspath(python) if python else sys.executable
        if version := _xllamacpp_version(interpreter):
            script = Path(__file__).with_name("_xllamacpp_server.py")
            return ServerCommand((interpreter, str(script)), True, version)
        if python:
            raise LlamaServerError(f"{interpreter} has no xllamacpp", hint="pip install xllamacpp")
        program = shutil.which("llama-server")
    if not program:
        raise LlamaServerError(
            "there is no llama-server", hint="pip install xllamacpp, or name the program in LLAMA_SERVER"
        )
    return ServerCommand((program,), False, _binary_version(program))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LlamaServer(LlamaClient):
    """One llama-server process with the requests of `LlamaClient`. Entering the context starts it.

    `extra` takes the keys of `OPTIONS`. Without `api_key` a random key is used: other users of the machine can reach the
    loopback interface too, and the key shows that no other server answers on the port. `api_key=""` starts the server
    without a key.
    """

    def __init__(
        self,
        model: StrPath,
        *,
        slot_dir: StrPath,
        n_ctx: int = 4096,
        parallel: int = 1,
        flash_attn: bool | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        extra: Mapping[str, Any] | None = None,
        python: StrPath | None = None,
        api_key: str | None = None,
        port: int | None = None,
        log: StrPath | None = None,
        start_timeout: float = 120.0,
        timeout: float = 600.0,
    ) -> None:
        self.model = Path(model)
        self.slot_dir = Path(slot_dir)
        self.n_ctx = n_ctx
        self.parallel = parallel
        self.flash_attn = flash_attn
        self.cache_type_k = cache_type_k
        self.cache_type_v = cache_type_v
        self.extra = dict(extra or {})
        if unknown := sorted(set(self.extra) - set(OPTIONS)):
            raise InvalidInputError(f"unknown server option {unknown[0]!r}", hint=f"known: {', '.join(OPTIONS)}")
        key = secrets.token_urlsafe(24) if api_key is None else api_key
        super().__init__("127.0.0.1", port or 0, api_key=key, timeout=timeout)
        self.command = find_server(python)
        self._fixed_port = port is not None
        self._start_timeout = start_timeout
        self._log = Path(log) if log is not None else None
        self._log_is_ours = log is None
        self._process: subprocess.Popen[bytes] | None = None
        self._probed: tuple[Any, str] | None = None  # process id and adapters, the digest of their probe

    # -- the process --------------------------------------------------------------------------------------------------

    def __enter__(self) -> LlamaServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LlamaServerError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it serves."""
        if self.running:
            raise LlamaServerError("the server is already running")
        if not self.model.is_file():
            raise LlamaServerError(f"the model {self.model} does not exist")
        # The files contain prompts, and the server creates them with the mode of its umask.
        self.slot_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._fixed_port:
            self.port = _free_port()
        if self._log is None:
            handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            os.close(handle)
            self._log = Path(name)
        argv, env, first_line = self._command_line()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
        try:
            if first_line and self._process.stdin:
                # Through standard input: every user of the machine can read a command line.
                self._process.stdin.write(first_line)
                self._process.stdin.flush()
            self._wait_until_served()
        except BaseException as error:
            self.kill()
            failure = self._died("did not start") if isinstance(error, OSError) else None
            # `with` does not call `stop` when entering fails; the error has the end of the log.
            self.stop()
            if failure is not None:
                raise failure from error
            raise

    def _command_line(self) -> tuple[list[str], dict[str, str], bytes]:
        slots = os.path.join(self.slot_dir.resolve(), "")
        # An abort would spend seconds on a debugger's backtrace, which pushes its reason out of the log's tail.
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        if self.command.xllamacpp:
            flash = {None: "AUTO", True: "ENABLED", False: "DISABLED"}[self.flash_attn]
            params: dict[str, Any] = {
                "model.path": str(self.model),
                "hostnames": [self.host],
                "port": self.port,
                "slot_save_path": slots,
                "n_ctx": self.n_ctx,
                "n_parallel": self.parallel,
                "flash_attn_type": f"LLAMA_FLASH_ATTN_TYPE_{flash}",
                "cache_type_k": f"GGML_TYPE_{self.cache_type_k.upper()}",
                "cache_type_v": f"GGML_TYPE_{self.cache_type_v.upper()}",
            }
            params.update({OPTIONS[name][0]: value for name, value in self.extra.items()})
            if "rope_scaling" in self.extra:
                params["rope_scaling_type"] = f"LLAMA_ROPE_SCALING_TYPE_{str(self.extra['rope_scaling']).upper()}"
            if self.api_key:
                params["api_keys"] = [self.api_key]
            # Without fit_params = False the server may choose another n_ctx.
            optional = {"endpoint_slots": True, "fit_params": False}
            config = {"params": params, "optional": optional}
            return list(self.command.argv), env, json.dumps(config).encode() + b"\n"
        argv = [*self.command.argv, "--model", str(self.model), "--host", self.host, "--port", str(self.port)]
        argv += ["--slot-save-path", slots, "--ctx-size", str(self.n_ctx), "--parallel", str(self.parallel)]
        argv += ["--flash-attn", {None: "auto", True: "on", False: "off"}[self.flash_attn]]
        argv += ["--cache-type-k", self.cache_type_k, "--cache-type-v", self.cache_type_v, "--slots"]
        for name, value in self.extra.items():
            option = OPTIONS[name][1]
            if isinstance(value, bool):
                argv += [option] if value else []
            else:
                argv += [option, str(value)]
        if self.api_key:
            env["LLAMA_API_KEY"] = self.api_key
        return argv, env, b""

    def _wait_until_served(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout
        while True:
            if self._process.poll() is not None:
                raise self._died("did not start")
            try:
                self._send("GET", "/health", None, timeout=5)
                # Unlike /health, this needs the key: another server that took the port refuses ours.
                self.slots()
                return
            except LlamaServerError as error:
                if error.status in (401, 403):
                    raise LlamaServerError(f"another server answers on {self.url}", status=error.status) from error
                if error.status not in (None, 503):
                    raise
            if time.monotonic() > deadline:
                raise self._died(f"did not serve within {self._start_timeout:g} s")
            time.sleep(0.05)

    def _died(self, what: str) -> LlamaServerError:
        status = self._process.poll() if self._process is not None else None
        ended = "" if status is None else f" (exit status {status})"
        tail = self.log_tail()
        return LlamaServerError(f"llama-server {what}{ended}; the end of its log:\n{tail}", log=tail)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log."""
        if self._log is None or not self._log.exists():
            return ""
        with open(self._log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
            return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End the process at once, as a crash does: SIGKILL (TerminateProcess on Windows)."""
        if self._process is None:
            return
        self._process.kill()
        self._ended()

    def stop(self) -> None:
        """End the process, and delete its log unless `log` was given."""
        if self._process is not None:
            if self._process.poll() is None:
                if self.command.xllamacpp and self._process.stdin:
                    # Some versions do not end on SIGTERM.
                    self._process.stdin.close()
                else:
                    self._process.terminate()
                try:
                    self._process.wait(5)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._ended()
        if self._log_is_ours and self._log is not None:
            self._log.unlink(missing_ok=True)
            self._log = None

    def _ended(self) -> None:
        assert self._process is not None
        self._process.wait()
        if self._process.stdin:
            # Closing flushes the first line, which fails if the server died before reading it.
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def request(self, method: Literal["GET", "POST"], path: str, body: Mapping[str, Any] | None = None) -> Any:
        """As of `LlamaClient`; if the process died, the error has the end of its log."""
        try:
            return super().request(method, path, body)
        except LlamaServerError as error:
            if error.status is not None:
                raise
            if self._process is not None:
                try:
                    # A dying server closes its connections before the system reports its end.
                    self._process.wait(1)
                except subprocess.TimeoutExpired:
                    raise error from None
            raise self._died(f"died at {method} {path}") from error

    def fingerprint(self) -> str:
        """What a state of this server depends on, for `Store(fingerprint=...)`: the files of model and adapters, the KV
        types, flash attention, the number of streams, some options, and the server's version. n_ctx is not among them: a
        state fits into any context that has room for it.

        The fingerprint of a running server also contains a computed probe: the state of 40 tokens, which shows every
        setting that changes the numbers (also adapters that a request set). It is computed in an idle slot, whose
        contents are restored afterwards, once for each process and set of adapters. The fingerprint of a server that is
        not running is a different one: call this after the start.
        """
        lora = self.extra.get("lora")
        facts = {
            "model": model_file.digest(self.model),
            "lora": None if lora is None else model_file.digest(lora),
            "kv": f"{self.cache_type_k}/{self.cache_type_v}",
            "flash_attn": self.flash_attn,
            # Slots that share one buffer have one stream, however many they are.
            "streams": 1 if self.extra.get("kv_unified") else self.parallel,
            "extra": {name: str(self.extra[name]) for name in _SHAPES_STATES if name in self.extra},
            "server": self.command.version,
            "probe": self._probe() if self.running else None,
        }
        return json.dumps(facts, sort_keys=True)

    def _probe(self) -> str | None:
        """The digest of the probe's rows, None where the server does not save slots."""
        try:
            adapters = self.request("GET", "/lora-adapters")
        except LlamaServerError as error:
            if error.status is None:
                raise
            adapters = None
        key = (self.pid, adapters)
        if self._probed is None or self._probed[0] != key:
            try:
                self._probed = key, server_probe.compute(self)
            except (KVStoreError, OSError) as error:
                if not self.running:
                    raise
                log.warning("the server's numbers cannot be probed; its fingerprint is made of its settings alone: %s", error)
                return None
        return self._probed[1]
