"""Schema version 3."""

from .step import STEP

__all__ = ["STEP"]
