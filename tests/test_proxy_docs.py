"""The commands and the example of docs/proxy.md, run as they are written, but for addresses."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import serverkit

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from proxykit import wait_for

ROOT = Path(__file__).resolve().parent.parent
DOC = (ROOT / "docs" / "proxy.md").read_text(encoding="utf-8")


def _commands(start: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", DOC, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if start in line]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.slow
def test_the_how_to_runs(tmp_path: Path, keyed: bool) -> None:
    plain, with_key = _commands("kvstore serve")
    assert "-m 700 slots" in DOC
    with serverkit.new_server(tmp_path / "slots", api_key="") as server:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"

        def here(text: str) -> str:
            text = text.replace("http://127.0.0.1:8080", server.url).replace("http://127.0.0.1:8081", url)
            return text.replace("0.0.0.0:8081", f"0.0.0.0:{port}")

        words = shlex.split(here(with_key if keyed else plain))
        env = dict(os.environ)
        while "=" in words[0]:
            name, _, env[name] = words.pop(0).partition("=")
        assert words[:2] == ["kvstore", "serve"]
        argv = [sys.executable, "-m", "kvstore.cli", *words[1:]]
        if not keyed:
            argv += ["--listen", f"127.0.0.1:{port}"]
        headers = {"Authorization": f"Bearer {env['KVSTORE_API_KEY']}"} if keyed else {}
        with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
            try:

                def up() -> bool:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    try:
                        return bool(httpx.get(url + "/kvstore/stats", headers=headers).raise_for_status().json()["caching"])
                    except httpx.ConnectError:
                        return False

                wait_for(up)
                (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
                code = here(code)
                if keyed:
                    code = code.replace('api_key="none"', f'api_key="{env["KVSTORE_API_KEY"]}"')
                done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                cached, total = (int(n) for n in done.stdout.split(" of "))
                assert cached > 0.8 * total
                if not keyed and shutil.which("curl"):
                    for command in _commands("curl"):
                        shown = subprocess.run(shlex.split(here(command)), capture_output=True, text=True, check=True)
                        assert "requests" in shown.stdout
            finally:
                process.terminate()
