"""Files written whole or not at all, and a digest by which a damaged one is told."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; what was written there replaces `path` once it is safely on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of a text and of every tensor's name, type, shape and bytes."""
    found = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            data: Any = value.reshape(-1).view(torch.uint8).numpy()
            found.update(data)
    return found.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
