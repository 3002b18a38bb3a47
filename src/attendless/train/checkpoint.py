"""Checkpoints: one file each with a digest, written atomically.

A checkpoint is a tree of dicts, lists, numbers, strings and tensors. The tensors go into a safetensors file; the rest
is JSON in its header, with a digest of everything. Checkpoints contain no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..storage import atomic, digest

_FORMAT = "attendless checkpoint 1"


class Damaged(UserError):
    """A damaged checkpoint; the message names the file and the cause."""


def save(path: str | Path, tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_strip(tree, tensors, {}))
    header = {"format": _FORMAT, "tree": text, "digest": digest(text, tensors)}
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata=header)


def load(path: str | Path) -> Any:
    """The saved tree, bit-identical; raises `Damaged`."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise Damaged(f"{str(path)!r} is not a checkpoint of attendless")
            # Copies: tensors mapped from a file may be unaligned, and kernels can round differently on unaligned data.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        if header.get("digest") != digest(header["tree"], tensors):
            raise Damaged(f"{str(path)!r} is damaged: its content does not match its checksum")
        return _restore(json.loads(header["tree"]), tensors)
    except Damaged:
        raise
    except Exception as error:  # a damaged header can make the reader fail in any way
        raise Damaged(f"{str(path)!r} is damaged: {error or type(error).__name__}") from None


class Store:
    """The checkpoints of one run: `step-N.safetensors` in a folder, of which the last `keep` are kept."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        names = (path.name[5:-12] for path in self.folder.glob("step-*.safetensors"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"

    def write(self, step: int, tree: Any) -> None:
        save(self.path(step), tree)
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)

    def read(self, say: Callable[[str], None]) -> Any | None:
        """The newest valid checkpoint, or None if there is none; reports damaged ones through `say`."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        damaged: list[Path] = []
        for step in reversed(self.steps()):
            try:
                tree = load(self.path(step))
            except Damaged as error:
                say(f"{error}. Using the previous checkpoint")
                damaged.append(self.path(step))
                continue
            for path in damaged:
                # Rename, so that it does not count among the checkpoints to keep.
                path.replace(path.with_suffix(".damaged"))
            return tree
        if damaged:
            raise UserError(f"every checkpoint in {str(self.folder)!r} is damaged. Remove the folder to start again")
        return None


def _strip(tree: Any, tensors: dict[str, Tensor], names: dict[Any, str]) -> Any:
    """The tree as JSON, with its tensors moved to `tensors`. Tensors that share memory are stored once."""
    if isinstance(tree, Tensor):
        value = tree.detach().cpu().contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:  # a view of a larger tensor
            value = value.clone()
        place = (value.data_ptr(), value.shape, value.dtype) if value.numel() else len(names)
        name = names.setdefault(place, str(len(names)))
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(tree, dict):
        return {"$dict": [[key, _strip(value, tensors, names)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_strip(item, tensors, names) for item in tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"a checkpoint cannot hold {type(tree).__name__}: {tree!r}")


def _restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_restore(item, tensors) for item in tree]
    if isinstance(tree, dict):
        if "$tensor" in tree:
            return tensors[tree["$tensor"]]
        return {key: _restore(value, tensors) for key, value in tree["$dict"]}
    return tree
