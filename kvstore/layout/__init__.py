"""Layouts of llama.cpp sequence states: finding the cells and rows of a state, cropping and converting it.

layout.parse(blob)           -> Layout: envelope, parts, streams, checkpoints
layout.crop(blob, n_tokens)  -> the state of the first n_tokens positions
layout.convert(blob, like)   -> the state as a server with other flags, or of another version, would have written it
"""

from __future__ import annotations

from .conversion import convert
from .cropping import crop
from .parsing import parse
from .types import AttentionPart, Checkpoint, Layout, RecurrentPart

__all__ = ["AttentionPart", "Checkpoint", "Layout", "RecurrentPart", "convert", "crop", "parse"]
