"""A caching proxy before llama-server."""

from .runner import main, running, serve

__all__ = ["main", "running", "serve"]
