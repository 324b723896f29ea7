"""llama-server as a process: started, asked and stopped."""

from .process import LlamaServer, LlamaServerError, find_server

__all__ = ["LlamaServer", "LlamaServerError", "find_server"]
