"""pt2: `torch.export`'s own format, with attendless's operators in it; loading it needs `import attendless`.

    program = torch.export.load("fast.pt2")               # after `import attendless`
    logits, = program.module()(images)

The format can hold pickles and expressions that PyTorch evaluates; ours holds neither pickles nor anything but numbers
and symbols, and `open_file` refuses a file that does, before PyTorch reads it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from operator import getitem
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import UserError
from . import description
from .description import KEY, Description

SUFFIX = ".pt2"
#: Whether a file has our kernels unless it is said.
KERNELS = True
Run = Callable[[Tensor], tuple[Tensor, ...]]
#: What the expressions in a graph are made of.
_PARTS = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.BoolOp, ast.boolop, ast.Subscript, ast.Attribute),
)
_NAMES = re.compile(r"L|[su]\d+|Symbol|Integer|Rational|Mod|PythonMod|FloorDiv|CeilDiv|Max|Min|Eq|Ne|Ge|Gt|Le|Lt")
_ATTRIBUTES = ("size", "shape")


def unavailable() -> str:
    return ""


def kernels_unavailable() -> str:
    """Operators of ours find who computes them where the file is opened."""
    return ""


def write(program: ExportedProgram, path: Path, *, opset: int | None = None) -> None:
    """Write a traced graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about its own parts
        torch.export.save(program, path)


def stamp(path: Path, about: Description) -> None:
    """Let a file say what it is."""
    program = _load(path, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path, extra_files={KEY: about.as_json()})


def operators(path: Path) -> dict[str, int]:
    """How often each operator stands in a file's graph, the commonest first."""
    called = (node.target for node in _load(path, {}).graph.nodes if node.op == "call_function")
    names = (str(one).removesuffix(".default") for one in called if one is not getitem)  # which takes a result apart
    return dict(Counter(names).most_common())


def files(path: Path) -> list[Path]:
    """What an export consists of, that which is opened last."""
    return [path]


def open_file(path: Path, threads: int | None = None) -> tuple[Run, Description]:
    extra = {KEY: ""}
    run = _runs(path, extra, threads)
    return run, description.read(extra[KEY], path)


def open_raw(path: Path, threads: int | None = None) -> Run:
    """As `open_file`, before there is a description."""
    return _runs(path, {}, threads)


def _runs(path: Path, extra: dict[str, str], threads: int | None) -> Run:
    if threads:
        torch.set_num_threads(threads)
    module = _load(path, extra).module()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(module(images))

    return run


def _load(path: Path, extra: dict[str, str]) -> ExportedProgram:
    try:
        _check_harmless(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path, extra_files=extra)
    except UserError:
        raise
    except Exception as error:  # a damaged archive can make the reader fail in any way
        told = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise UserError(f"{str(path)!r} is damaged or not a .pt2 file: {told}") from None


def _check_harmless(path: Path) -> None:
    """Raise for an archive that holds pickles, compiled code, expressions that are none, or bytes that are not those
    that were written."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{str(path)!r} is damaged: {damaged} does not match its checksum")
        for name in archive.namelist():
            inside = name.partition("/")[2]
            if inside.endswith((".so", ".cpp", ".py")) or "aotinductor" in inside:
                raise UserError(f"{str(path)!r} holds code ({inside}) and is not opened: attendless exports none")
            if inside.endswith("_config.json"):
                payloads = json.loads(archive.read(name))["config"].values()
                if any(payload["use_pickle"] for payload in payloads):
                    raise UserError(f"{str(path)!r} holds pickles ({inside}) and is not opened: attendless writes none")
            elif inside.endswith(".pt"):  # PyTorch would unpickle it, if nothing else helps
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            elif inside.startswith("models/"):
                _check_expressions(json.loads(archive.read(name)), path)


def _check_expressions(found: object, path: Path, key: str = "") -> None:
    """Raise for an expression, anywhere in a graph's JSON, that is more than arithmetic with sizes."""
    if isinstance(found, dict):
        for name, value in found.items():
            _check_expressions(value, path, name)
    elif isinstance(found, list):
        for value in found:
            _check_expressions(value, path, key)
    elif key in ("expr_str", "guards_code") and not _arithmetic(str(found)):
        raise UserError(
            f"{str(path)!r} holds an expression that is no arithmetic and is not opened: {str(found)[:80]!r}"
        )


def _arithmetic(text: str) -> bool:
    for node in ast.walk(ast.parse(text, mode="eval")):
        if not isinstance(node, _PARTS):
            return False
        if isinstance(node, ast.Name) and not _NAMES.fullmatch(node.id):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
            return False
    return True
