"""Tells model and adapter files apart without parsing them or reading large ones completely."""

from __future__ import annotations

import hashlib
import os
import re

from ..errors import StoreIOError

_WHOLE = 32 << 20  # up to this size, which adapters rarely exceed, the digest covers every byte
_ENDS = 1 << 20
# Fine-tunes of one model have the same size and metadata, so samples of the weights count: 1 MiB in all.
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_MAX_SHARDS = 1000


def digest(path: str | os.PathLike[str]) -> str:
    """The size and a digest of a file and of its shards; of a large file, the digest covers both ends and samples between.

    Raises StoreIOError where one of them cannot be read.
    """
    path = os.fspath(path)
    found = _SHARD.search(path)
    if found is None:
        return _digest(path)
    total = min(int(found[1]), _MAX_SHARDS)
    names = [f"{path[: found.start()]}-{i:05}-of-{found[1]}.gguf" for i in range(1, total + 1)]
    return "-".join(map(_digest, names))


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            hashed = hashlib.blake2b(digest_size=16)
            spans = [(0, size)]
            if size > _WHOLE:
                spans = [(0, _ENDS), (size - _ENDS, _ENDS)]
                spans += [(size * i // (_SAMPLES + 1), _SAMPLE_BYTES) for i in range(1, _SAMPLES + 1)]
            for start, length in spans:
                file.seek(start)
                hashed.update(file.read(length))
    except OSError as error:
        raise StoreIOError(f"{path} cannot be read: {error.strerror or error}", path=path) from error
    return f"{size}-{hashed.hexdigest()}"
