"""Schema version 2."""

from .step import STEP

__all__ = ["STEP"]
