"""The HTTP requests to a llama-server that a keeper of states needs."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ...errors import KVStoreError

Message: TypeAlias = Mapping[str, Any]


class LlamaServerError(KVStoreError):
    """llama-server was not found, did not start, died, or refused a request (facts: status, log)."""

    code, exit_code = "llama_server", 30
    status: int | None = None


class LlamaClient:
    """A llama-server at an address. `api_key` goes with every request; `timeout` is in seconds."""

    def __init__(self, host: str, port: int, *, api_key: str = "", timeout: float = 600.0) -> None:
        self.host = host
        self.port = port
        self.api_key = api_key
        self.timeout = timeout

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(self, method: Literal["GET", "POST"], path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request; the JSON of the answer. Any status but 2xx is a `LlamaServerError` with the server's message."""
        return self._send(method, path, body, timeout=self.timeout)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise LlamaServerError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        try:
            answer = json.loads(data) if data else None
        except ValueError:
            answer = data.decode("utf-8", "replace")
        if not 200 <= status < 300:
            detail = answer.get("error", answer) if isinstance(answer, dict) else answer
            message = detail.get("message", detail) if isinstance(detail, dict) else detail
            raise LlamaServerError(f"{method} {path}: {status}: {message}", status=status)
        return answer

    def props(self) -> dict[str, Any]:
        """The server's own description: model_path, n_ctx of a slot, total_slots, build_info, chat_template. It does not
        contain the KV types."""
        return dict(self.request("GET", "/props"))

    def slots(self) -> list[dict[str, Any]]:
        return list(self._send("GET", "/slots", None, timeout=self.timeout))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The tokens of a text. With the defaults, the text is tokenized as a prompt is."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return [int(token) for token in self.request("POST", "/tokenize", body)["tokens"]]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(self.request("POST", "/detokenize", {"tokens": list(tokens)})["content"])

    def apply_template(self, messages: Sequence[Message], **params: Any) -> str:
        """The prompt that the model's chat template makes of the messages (`params`: tools and so on)."""
        body = {**params, "messages": [dict(message) for message in messages]}
        return str(self.request("POST", "/apply-template", body)["prompt"])

    def chat_tokens(self, messages: Sequence[Message], **params: Any) -> list[int]:
        """The tokens that the server computes for a chat request with these messages."""
        return self.tokenize(self.apply_template(messages, **params))

    def completion(
        self,
        prompt: str | Sequence[int],
        *,
        n_predict: int,
        temperature: float = 0.0,
        cache_prompt: bool = True,
        id_slot: int = 0,
        **params: Any,
    ) -> dict[str, Any]:
        """Continue a prompt. In the answer: `content`, `tokens`, and `timings` with cache_n (tokens reused), prompt_n
        (tokens computed) and prompt_ms. `n_predict=0` computes the prompt and generates nothing."""
        body = {
            "prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt],
            "n_predict": n_predict,
            "temperature": temperature,
            "cache_prompt": cache_prompt,
            "id_slot": id_slot,
            "return_tokens": True,
            **params,
        }
        return dict(self.request("POST", "/completion", body))

    def chat(self, messages: Sequence[Message], **params: Any) -> dict[str, Any]:
        """A chat request of the OpenAI API; the answer also has the server's `timings`."""
        body = {"temperature": 0, **params, "messages": [dict(message) for message in messages]}
        return dict(self.request("POST", "/v1/chat/completions", body))

    def slot_save(self, id: int, filename: str) -> dict[str, Any]:
        """Write a slot's tokens and state to a file in `slot_dir` (n_saved, n_written)."""
        return dict(self.request("POST", f"/slots/{id}?action=save", {"filename": filename}))

    def slot_restore(self, id: int, filename: str) -> dict[str, Any]:
        """Read a slot's tokens and state from a file in `slot_dir` (n_restored, n_read)."""
        return dict(self.request("POST", f"/slots/{id}?action=restore", {"filename": filename}))

    def slot_erase(self, id: int) -> dict[str, Any]:
        return dict(self.request("POST", f"/slots/{id}?action=erase", {}))
