"""Atomic file writes, and digests that detect damaged files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError

#: Paths that name an open stream of this process, and the number of the stream.
_STREAM = re.compile(r"/dev/(?P<name>stdout|stderr)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
#: The types of tensors in a safetensors file.
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
#: The system error in a message of safetensors.
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def cache_folder() -> Path:
    """The folder of reproducible files: `$XDG_CACHE_HOME/attendless`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attendless"


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to. After the `with` block succeeds, `path` has the content written there.

    A file is replaced in one step: readers see the old content or the new, also after a crash. The file keeps its
    mode. A symbolic link stays, and its target is replaced. Devices, pipes and open streams (`/dev/stdout`) receive the
    bytes. Errors name `path`, and no temporary file remains.
    """
    temporary = None
    try:
        if _takes_bytes(path):
            temporary = _temporary(Path(tempfile.gettempdir()), "attendless")
            yield temporary
            _pour(temporary, path)
        else:
            place = Path(os.path.realpath(path))
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = _temporary(place.parent, place.name)
            yield temporary
            temporary.chmod(stat.S_IMODE(place.stat().st_mode) if place.exists() else 0o666 & ~_umask())
            sync(temporary)
            temporary.replace(place)
            sync(place.parent)
    except (OSError, SafetensorError) as error:
        raise _about(error, path, temporary) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def stream(path: str | Path) -> int | None:
    """The number of the open stream that `path` names: 1 for `/dev/stdout`, N for `/dev/fd/N`; else None."""
    found = _STREAM.fullmatch(str(path))
    return found and int(found["number"] or ("stdout", "stderr").index(found["name"]) + 1)


def _takes_bytes(path: str | Path) -> bool:
    """Whether `path` is an open stream, a device or a pipe, which cannot be replaced."""
    if stream(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _temporary(folder: Path, name: str) -> Path:
    handle, made = tempfile.mkstemp(dir=folder, prefix=f".{name[:50]}.", suffix=".tmp")
    os.close(handle)
    return Path(made)


def _pour(source: Path, place: str | Path) -> None:
    """Write the bytes of `source` into a stream, device or pipe."""
    number = stream(place)
    if number is None:
        handle = os.open(place, os.O_WRONLY)
    else:  # duplicate the stream: opening its file again would start at the beginning
        sys.stdout.flush()
        handle = os.dup(number)
    with open(handle, "wb") as sink, open(source, "rb") as file:
        shutil.copyfileobj(file, sink)


def _about(error: Exception, path: str | Path, temporary: Path | None) -> Exception:
    """A write error that names `path` instead of the temporary file. Other errors are returned unchanged."""
    told = _SYSTEM_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    ours = temporary is None or getattr(error, "filename", None) in (None, str(temporary))
    # A broken pipe is the reader's choice, not a failure of this file.
    if number is None or not ours or isinstance(error, BrokenPipeError):
        return error
    return OSError(number, os.strerror(number), str(path))


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of a text and of every tensor's name, type, shape and bytes."""
    found = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(_bytes(value))
    return found.hexdigest()


def _bytes(value: Tensor) -> Any:
    """The bytes of a tensor, as a buffer."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def write_described(path: str | Path, kind: str, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with a text that describes them, stored under the key `kind`, and a digest of both."""
    about = {kind: text, "digest": digest(text, tensors)}
    with atomic(path) as temporary, temporary.open("wb") as file:
        for part in _safetensors(tensors, about):
            file.write(part)


def _safetensors(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Iterator[Any]:
    """The parts of a safetensors file. The same tensors give the same bytes: safetensors' own writer orders the
    metadata differently each time."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # large elements first: aligned
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name in names:
        value, start = tensors[name], end
        if value.dtype not in _TYPES:
            raise UserError(f"{name} is of type {value.dtype}, which safetensors files do not hold")
        end += value.numel() * value.element_size()
        header[name] = {"dtype": _TYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes(tensors[name])


def metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for other files."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except Exception:  # a damaged header can make the reader fail in any way
        return {}


def read_described(path: str | Path, kind: str, otherwise: str) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors that `write_described` wrote. For an intact safetensors file of another kind, the error
    message is `otherwise`."""
    if not Path(path).is_file():
        raise UserError(f"{str(path)!r}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # a damaged header can make the reader fail in any way
        damaged = f"is damaged or not a safetensors file: {error or type(error).__name__}"
        raise UserError(f"{str(path)!r} {_unreadable(path) or damaged}") from None
    if kind not in metadata:
        raise UserError(f"{str(path)!r} {otherwise}")
    if metadata.get("digest") != digest(metadata[kind], tensors):
        raise UserError(f"{str(path)!r} is damaged: its content does not match its digest")
    return metadata[kind], tensors


def _unreadable(path: str | Path) -> str:
    """A description of a file that is not a safetensors file, if its first bytes identify it."""
    with open(path, "rb") as file:
        start = file.read(8)
    bare = start[:1] == b"\x80" and any(start[3:])  # a safetensors file begins with the length of its header
    if start.startswith(b"PK\x03\x04") or bare:
        return "is a PyTorch checkpoint, which does not name its model: name the model, and give this as its weights"
    return ""


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The file mode mask of the process. It can only be read by setting it, so other threads see 0o022 briefly."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
