"""Read a `.pt2` archive as data.

PyTorch's loader unpickles several entries, resolves any dotted name in a graph (`torch.os.system` too), evaluates
expressions and generates source code from names. It also reads archives otherwise than Python's zipfile: two entries of
one name, or of another layout, are another program to each. So it never reads a given file. `harmless` reads the file,
checks each entry against exact lists, and writes what passed into a new archive, which PyTorch's loader may read.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .description import KEY

GRAPH = "models/model.json"
EXTRA = f"extra/{KEY}"
#: Pickles the inputs that a graph was traced with. Running does not need them, so they are never read.
_SAMPLE = "data/sample_inputs/model.pt"
#: The entries that describe tensors: each with the folder and the names of the tensors' own entries.
_CONFIGS = {
    "data/weights/model_weights_config.json": ("data/weights/", re.compile(r"weight_[0-9]{1,6}")),
    "data/constants/model_constants_config.json": ("data/constants/", re.compile(r"tensor_[0-9]{1,6}")),
}
_MARKS = ("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id")
_ENTRIES = frozenset({GRAPH, EXTRA, _SAMPLE, *_CONFIGS, *_MARKS})
_TENSORS = re.compile("|".join(re.escape(folder) + name.pattern for folder, name in _CONFIGS.values()))

#: Names in a graph: of nodes, weights, arguments.
_NAME = re.compile(r"[\w.]*|-Infinity", re.ASCII)
#: Functions of whole numbers, and parts of a graph with a setting: what a graph calls besides operators.
_FUNCTION = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|torch\.sym_(max|min|int|float|not|ite|sum)|math\.(ceil|floor|trunc)"
    r"|torch\.ops\.higher_order\.wrap_with_(autocast|set_grad_enabled)"
)
_OPERATOR = re.compile(r"torch\.ops\.(aten|attendless)\.([a-zA-Z_]\w*)\.([a-zA-Z_]\w*)", re.ASCII)
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
#: What the expressions in a graph are made of.
_PARTS = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Compare, ast.cmpop, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.UnaryOp, ast.unaryop, ast.BoolOp, ast.boolop, ast.Subscript, ast.Attribute),
)
_SYMBOLS = re.compile(r"L|[su]\d+|Symbol|Integer|Rational|Mod|PythonMod|FloorDiv|CeilDiv|Max|Min|Eq|Ne|Ge|Gt|Le|Lt")
_LONGEST, _NESTED, _POWER = 2000, 50, 9


def harmless(path: Path) -> tuple[io.BytesIO, str]:
    """A new archive with the checked entries of a file, and the description of the model in it.

    Raises:
        UserError: the file holds anything else than graphs, tensors and a description.
    """
    entries = _entries(path)
    graph = _without_metadata(json.loads(entries[GRAPH]))
    _check_graph(graph, path)
    entries[GRAPH] = json.dumps(graph).encode()
    for config, (folder, name) in _CONFIGS.items():
        for payload in json.loads(entries[config])["config"].values():
            _check_tensor(payload, folder, name, entries, path)
    return _archive(entries | {_SAMPLE: b""}), entries.get(EXTRA, b"").decode()


def root(path: Path) -> str:
    """The folder in an archive that holds every entry."""
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()[0].partition("/")[0]


def arithmetic(text: str) -> bool:
    """Whether an expression is arithmetic with sizes, and no larger than it looks."""
    if len(text) > _LONGEST or text.count("(") > _NESTED:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError):
        return False
    return all(map(_is_arithmetic, nodes))


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return bool(_SYMBOLS.fullmatch(node.id))
    if isinstance(node, ast.Attribute):
        return node.attr in ("size", "shape")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):  # of a symbol: a number's power can be of any size
        of = node.left.func if isinstance(node.left, ast.Call) else node.left
        symbol = isinstance(of, ast.Name) and (of.id == "Symbol" or of is node.left)
        return symbol and isinstance(node.right, ast.Constant) and node.right.value in range(_POWER + 1)
    return isinstance(node, _PARTS)


def _entries(path: Path) -> dict[str, bytes]:
    """The content of every entry, by its name under the root."""
    found: dict[str, bytes] = {}
    top = root(path)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            if folder != top or not (name in _ENTRIES or _TENSORS.fullmatch(name)):
                raise UserError(
                    f"{str(path)!r} holds {entry.filename!r} and is not opened: attendless writes no such entry, "
                    "which could be a program"
                )
            if name in found:
                raise UserError(f"{str(path)!r} holds {name!r} twice and is not opened")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise UserError(f"{str(path)!r} holds a compressed entry ({name!r}) and is not opened")
            found[name] = archive.read(entry)  # raises if it does not match its checksum
    if missing := sorted({GRAPH, *_CONFIGS, *_MARKS[:2]} - found.keys()):
        raise UserError(f"{str(path)!r} is damaged or not a .pt2 file: {missing[0]} is missing")
    return found


def _archive(entries: dict[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    buffer.seek(0)
    return buffer


def _check_tensor(
    payload: dict[str, Any], folder: str, name: re.Pattern[str], entries: dict[str, bytes], path: Path
) -> None:
    """Raise unless an entry holds a tensor's bytes, and all of them."""
    entry = str(payload["path_name"])
    if payload["use_pickle"] is not False or not name.fullmatch(entry):
        raise UserError(f"{str(path)!r} holds a pickle ({folder}{entry}) and is not opened: attendless writes none")
    elements = math.prod(int(size["as_int"]) for size in payload["tensor_meta"]["sizes"])
    if elements > len(entries.get(folder + entry, b"")):
        raise UserError(f"{str(path)!r} is damaged: {folder}{entry} holds fewer bytes than its shape has elements")


def _without_metadata(found: Any) -> Any:
    """A graph's JSON without the names of source files and functions of its nodes, which running does not need."""
    if isinstance(found, list):
        return list(map(_without_metadata, found))
    if not isinstance(found, dict):
        return found
    return {key: {} if key == "metadata" else _without_metadata(value) for key, value in found.items()}


def _check_graph(found: object, path: Path, key: str = "") -> None:
    """Raise for a text, anywhere in a graph's JSON, that PyTorch would take for more than a name or arithmetic."""
    if isinstance(found, dict):
        for name, value in found.items():
            _check_text(name, "", path)
            _check_graph(value, path, name)
    elif isinstance(found, list):
        for value in found:
            _check_graph(value, path, key)
    elif isinstance(found, str):
        _check_text(found, key, path)


def _check_text(text: str, key: str, path: Path) -> None:
    if key in ("as_string", "as_strings"):  # an argument of an operator, which receives it as it is
        return
    if key in ("expr_str", "guards_code"):
        good, what = arithmetic(text), "an expression that is no arithmetic"
    elif key in ("in_spec", "out_spec"):
        good, what = not text or _plain_container(json.loads(text)), "a container other than tuple, list and dict"
    elif key in ("target", "as_operator"):
        good, what = _known_operator(text), "an operator that is neither PyTorch's nor attendless's"
    else:
        good = bool(_NAME.fullmatch(text)) or (key == "torch_version" and bool(_NAME.fullmatch(text.replace("+", ""))))
        what = "a name that is none"
    if not good:
        raise UserError(f"{str(path)!r} holds {what} and is not opened: {text[:80]!r}")


def _plain_container(found: object) -> bool:
    """Whether a tree of containers, as `torch.utils._pytree` writes it, has plain ones alone."""
    if isinstance(found, list):
        return all(map(_plain_container, found))
    if isinstance(found, dict):
        return found.get("type") in _CONTAINERS and _plain_container(found.get("children_spec"))
    return isinstance(found, int)


def _known_operator(target: str) -> bool:
    """Whether a name is that of an operator that computes: no function, and nothing that opens a file."""
    if _FUNCTION.fullmatch(target):
        return True
    match = _OPERATOR.fullmatch(target)
    if not match:
        return False
    namespace, name, overload = match.groups()
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    return not any("file" in argument.name for argument in operator._schema.arguments)
