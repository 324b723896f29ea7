"""A store at work: what `Store` does with a file."""

from .store import Store

__all__ = ["Store"]
