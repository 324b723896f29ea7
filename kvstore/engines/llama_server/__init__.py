"""Starts, queries and stops a llama-server process."""

from .process import LlamaServer, LlamaServerError, find_server

__all__ = ["LlamaServer", "LlamaServerError", "find_server"]
