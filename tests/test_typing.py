"""The public API is typed and documented: `make lint` checks the types with mypy, these tests what mypy cannot see."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attendless
from attendless import dense, huggingface, sparse, tokens

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (attendless, dense, huggingface, sparse, tokens)


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, by its full name."""
    for package in PACKAGES:
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{package.__name__}.{name}", found


PUBLIC = dict(public())


def undocumented(found: Any) -> list[str]:
    """The parameters that the docstring of a function, or of a class and its constructor, does not name."""
    made = found.__init__ if inspect.isclass(found) else found
    text = f"{inspect.getdoc(found) or ''} {inspect.getdoc(made) or ''}"
    ours = inspect.isfunction(made) and not made.__module__.startswith("torch.")
    parameters = [name for name in inspect.signature(made).parameters if name != "self"] if ours else []
    return [name for name in parameters if not re.search(rf"\b{name}\b", text)] + (
        [] if text.strip() else ["docstring"]
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_every_parameter(name: str) -> None:
    assert not undocumented(PUBLIC[name])


def test_an_undocumented_parameter_is_found() -> None:
    def half(there: int, missing: int) -> None:
        """Use `there`."""

    assert undocumented(half) == ["missing"]
    assert undocumented(lambda: None) == ["docstring"]
    assert undocumented(attendless.Reducer) == []


def test_the_typed_program_uses_every_public_name() -> None:
    program = (ROOT / "tests" / "typed_program.py").read_text()
    for package in (attendless, dense):
        unused = [name for name in package.__all__ if not re.search(rf"\b{name}\b", program)]
        assert not unused, package.__name__


def test_mypy_is_strict_for_every_module_with_a_public_name() -> None:
    settings = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"]
    assert "tests/typed_program.py" in settings["files"]
    strict = next(set(part["module"]) for part in settings["overrides"] if part.get("warn_return_any"))
    assert {found.__module__ for found in PUBLIC.values()} <= strict


@pytest.mark.parametrize("package", ["attendless", "attendless_lab", "attendless_cli"])
def test_packages_are_marked_as_typed(package: str) -> None:
    assert (ROOT / "src" / package / "py.typed").is_file()


def test_public_packages_hold_no_modules_by_accident() -> None:
    modules = {name for name in attendless.__all__ if isinstance(getattr(attendless, name), types.ModuleType)}
    assert modules == {"dense", "huggingface"}
