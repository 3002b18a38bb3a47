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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import UserError


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


def write_described(path: str | Path, kind: str, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with a text that describes them, under the name of their kind, and a digest of both."""
    with atomic(path) as temporary:
        save_file(dict(tensors), temporary, metadata={kind: text, "digest": digest(text, tensors)})


def read_described(path: str | Path, kind: str, otherwise: str) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors that `write_described` wrote. Of a sound safetensors file of another kind the error says
    `otherwise`."""
    if not Path(path).is_file():
        raise UserError(f"{str(path)!r}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # a damaged header can make the reader fail in any way
        reason = error or type(error).__name__
        raise UserError(f"{str(path)!r} is damaged or not a safetensors file: {reason}") from None
    if kind not in metadata:
        raise UserError(f"{str(path)!r} {otherwise}")
    if metadata.get("digest") != digest(metadata[kind], tensors):
        raise UserError(f"{str(path)!r} is damaged: its content does not match its digest")
    return metadata[kind], tensors


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
