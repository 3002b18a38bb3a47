"""pt2: `torch.export`'s own format, with attendless's operators in it; loading it needs `import attendless`.

    program = torch.export.load("fast.pt2")               # after `import attendless`
    logits, = program.module()(images)

The format can hold pickles, expressions and names that PyTorch evaluates. `pt2_archive` checks a file before PyTorch
reads it.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from operator import getitem
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..errors import UserError
from . import description, pt2_archive
from .description import Description

SUFFIX = ".pt2"
#: Whether a file uses our kernels by default.
KERNELS = True
PRECISIONS = ("fp32",)
Run = Callable[[Tensor], tuple[Tensor, ...]]


def unavailable() -> str:
    """Earlier versions of PyTorch write weights as pickles, which are not opened."""
    return "" if _writes_plain_weights() else f"pt2 files need torch 2.9 or later; this is {torch.__version__}"


def _writes_plain_weights() -> bool:
    if importlib.util.find_spec("torch.export.pt2_archive") is None:
        return False
    from torch.export.pt2_archive import constants

    return hasattr(constants, "WEIGHTS_CONFIG_FILENAME_FORMAT")


def kernels_unavailable() -> str:
    """Our operators choose their backend when the file is opened."""
    return ""


def write(program: ExportedProgram, path: Path, *, opset: int | None = None) -> None:
    """Write a traced graph, without the paths of the source code it was traced from."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    for node in itertools.chain.from_iterable(part.graph.nodes for part in parts):
        node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()  # PyTorch's own writer aborts the process where the disk is full
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about its own parts
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def stamp(path: Path, about: Description) -> None:
    """Add the description of the model to a file."""
    name = f"{pt2_archive.root(path)}/{pt2_archive.EXTRA}"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, about.as_json())


def operators(path: Path) -> dict[str, int]:
    """The number of uses of each operator in a file's graph, in descending order."""
    called = (node.target for node in _load(path)[0].graph.nodes if node.op == "call_function")
    names = (str(one).removesuffix(".default") for one in called if one is not getitem)  # which takes a result apart
    return dict(Counter(names).most_common())


def files(path: Path) -> list[Path]:
    """The files of an export; the one that is opened comes last."""
    return [path]


def open_file(path: Path, threads: int | None = None) -> tuple[Run, Description]:
    program, text = _load(path)
    return _runs(program, threads), description.read(text, path)


def open_raw(path: Path, threads: int | None = None, floats: str = "fp32") -> Run:
    """As `open_file`, before there is a description. `floats` is fp32: this runtime computes nothing else."""
    return _runs(_load(path)[0], threads)


def _runs(program: ExportedProgram, threads: int | None) -> Run:
    if threads:
        torch.set_num_threads(threads)
    module = program.module()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(module(images))

    return run


def _load(path: Path) -> tuple[ExportedProgram, str]:
    """The program in a file, and the description of its model; empty if there is none."""
    try:
        archive, text = pt2_archive.harmless(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(archive), text
    except UserError:
        raise
    except Exception as error:  # a damaged archive can make the reader fail in any way
        told = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise UserError(f"{str(path)!r} is damaged or not a .pt2 file: {told}") from None
