"""A caching proxy in front of llama-server."""

from .options import ProxyOptions
from .runner import main, running, serve

__all__ = ["ProxyOptions", "main", "running", "serve"]
