"""Plug-ins: users' files, imported once, recorded, and passed to child processes, which import them again.

A file is recorded when `load_plugin` loads it (`--plugin FILE`), and when something in it registers itself
(`remember_source`), however the file was imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError

_HOME = Path(__file__).resolve().parent
_sources: dict[str, None] = {}  # a set in order
_loading: list[str] = []


def load_plugin(path: str | Path) -> None:
    """Import a user's Python file, so that the attentions, reducers and backends it registers can be named.

    Args:
        path: The file. A file that was imported before is not imported again.

    Raises:
        UserError: there is no such file, or it cannot be imported.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise UserError(f"plugin {str(path)!r} is not a file")
    if str(path) in _sources:
        return
    # Files of the same name in different folders need different module names.
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    module_name = f"attendless_plugin_{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None or found.loader is None:
        raise UserError(f"plugin {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    _loading.append(path.name)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        _sources.pop(str(path), None)
        if isinstance(error, UserError):
            raise
        raise UserError(f"plugin {str(path)!r} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        _loading.pop()
    _sources[str(path)] = None


def enter(table: dict[str, Any], name: str, cls: type, what: str) -> None:
    """Register a class under its name. Raises if another class has the name; the same class may be defined again."""
    other = table.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(f"{what} {name!r} already exists: {other.__module__}.{other.__qualname__}")
    table[name] = cls
    remember_source(cls)


def remember_source(thing: type) -> None:
    """Record the file that defines `thing`, unless it belongs to attendless: child processes import it."""
    path = source_of(thing)
    if path:
        _sources[_as_part_of_a_package(thing.__module__, path) or path] = None


def _as_part_of_a_package(module: str, path: str) -> str:
    """`ROOT::package.module` for a module of a package, which cannot be imported as a single file; otherwise empty."""
    package = getattr(sys.modules[module], "__package__", "") or ""
    return f"{Path(path).parents[package.count('.') + 1]}::{module}" if package and module != package else ""


def source_of(thing: type) -> str:
    """The file that defines `thing`; empty if the file belongs to attendless or `thing` was defined in a console."""
    found = getattr(sys.modules.get(thing.__module__), "__file__", None)
    if not found or not Path(found).is_file():
        return ""
    path = Path(found).resolve()
    return "" if _HOME in path.parents else str(path)


def plugin_files() -> list[str]:
    """The files that a child process must load to have the same registrations."""
    return list(_sources)


def refuse_while_loading(what: str) -> None:
    """Raise if a plug-in uses `what`, which starts processes, while it is imported: each process would import the
    plug-in again, and start processes again."""
    if _loading:
        raise UserError(
            f"{_loading[-1]} is being imported as a plug-in and uses {what}: put the code that it runs under "
            "if __name__ == '__main__':"
        )


def load_plugins(paths: Iterable[str]) -> None:
    """Load the result of `plugin_files` of another process."""
    for path in paths:
        root, part_of_a_package, module = path.rpartition("::")
        if not part_of_a_package:
            load_plugin(path)
            continue
        if root not in sys.path:
            sys.path.append(root)
        importlib.import_module(module)


def import_package(package: ModuleType) -> None:
    """Import every module of a package, so that a new module needs no other edit."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
