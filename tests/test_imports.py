"""Imports run one way: each part of the package may import only what stands above it, and no two modules each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
#: From the bottom up. A new part gets its line here; what may import what follows from where it stands.
ORDER = (
    *("version", "errors", "preparation", "palette", "options", "storage", "ownership", "sizes", "randomness"),
    *("plugins", "compiled", "stamp", "cluster", "data", "sparse", "attention", "tokens", "backbones", "check"),
    *("integrations", "convert", "measure"),
    *("huggingface", "train", "dense", "maps", "show", "export", "optimize", "predict", "serve", "hub"),
    *("__init__", "__main__"),
)


#: The parts of the lab, from the bottom up: the studies of `papers` train by `compare`.
LAB = ("__init__", "compare", "explore", "papers")


def modules(package: str = "attendless") -> dict[str, Path]:
    """Every module of a package, by its dotted name without the package's."""
    root = SOURCE / package
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}


def imported(name: str, path: Path, known: dict[str, Path], whose: str = "attendless") -> set[str]:
    """The modules of the library that one imports, wherever in its text: at the top, in a function, for types alone."""
    package = name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(f"{whose}.") for alias in node.names if alias.name != whose}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            words = (node.module or "").split(".") if node.module else []
            if not node.level and words[:1] != [whose]:
                continue
            whole = [*base, *(words if node.level else words[1:])]
            for alias in node.names:
                inside = ".".join([*whole, alias.name])
                found.add(inside if inside in known or f"{inside}.__init__" in known else ".".join(whole) or "__init__")
    return {one if one in known else f"{one}.__init__" for one in found} & known.keys()


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(name, path, known) - {name} for name, path in known.items()}


def test_every_part_has_its_place() -> None:
    assert {name.split(".")[0] for name in modules()} == set(ORDER)


def test_imports_between_parts_point_down() -> None:
    place = {part: number for number, part in enumerate(ORDER)}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if place[other.split(".")[0]] > place[name.split(".")[0]]
    ]
    assert not wrong


def other_packages(path: Path) -> set[str]:
    """The packages that a file names in an import or, as `runpy` takes them, in a text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def test_the_library_imports_neither_the_lab_nor_the_command_line() -> None:
    users = {"attendless_lab", "attendless_cli"}
    assert not {name: found for name, path in modules().items() if (found := other_packages(path) & users)}


def test_the_lab_does_not_import_the_command_line() -> None:
    assert not [name for name, path in modules("attendless_lab").items() if "attendless_cli" in other_packages(path)]


def test_imports_within_the_lab_point_down() -> None:
    known = modules("attendless_lab")
    assert {name.split(".")[0] for name in known} == set(LAB)
    place = {part: number for number, part in enumerate(LAB)}
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in sorted(imported(name, path, known, "attendless_lab") - {name})
        if place[other.split(".")[0]] > place[name.split(".")[0]]
    ]
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    """A package's own `__init__` gathers its modules, and is not asked for by them."""
    edges, done = graph(), set()
    lab = modules("attendless_lab")
    edges |= {
        f"lab {name}": {f"lab {other}" for other in imported(name, path, lab, "attendless_lab") - {name}}
        for name, path in lab.items()
    }

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            pytest.fail(" → ".join([*path[path.index(name) :], name]))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_the_checks_can_fail(tmp_path: Path) -> None:
    (tmp_path / "low.py").write_text("def f():\n    from .high import x\n")
    assert imported("low", tmp_path / "low.py", {"low": tmp_path, "high": tmp_path}) == {"high"}


def test_the_command_line_imports_nothing_heavy_at_the_top() -> None:
    light = {"argparse", "collections", "contextlib", "dataclasses", "importlib", "json", "os", "pathlib", "sys"}
    light |= {"textwrap", "typing", "__future__", "time", "shlex", "shutil", "math", "re", "signal", "stat", "tempfile"}
    light |= {"itertools", "threading", "difflib", "io"}
    for path in (SOURCE / "attendless_cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= light, path.name
