"""Flags made from the fields of a frozen dataclass, and what was given read back into one."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

T = TypeVar("T")


def add(parser: argparse.ArgumentParser, title: str, kind: Any, but: Any = None) -> None:
    """A flag for every field of `kind` that `but` has not; a field not given stays what the recipe says."""
    from attendless.options import describe_options

    group = parser.add_argument_group(title)
    known = set() if but is None else {field["name"] for field in describe_options(but)}
    for field in [field for field in describe_options(kind) if field["name"] not in known]:
        name, switch = field["name"], field["type"] == "true or false"
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        more: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        group.add_argument(*flags, dest=f"field_{name}", metavar="X", help=field["help"].replace("%", "%%"), **more)


def given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The fields of `kind` that the command line names, read as their types."""
    import dataclasses

    from attendless.options import parse_options
    from attendless.sizes import parse_size

    found = {}
    for field in dataclasses.fields(kind):
        text = getattr(args, f"field_{field.name}")
        if text is None:
            continue
        if field.name == "size":
            found["size"] = parse_size(text)
        else:
            found[field.name] = getattr(parse_options(f"{field.name}={text}", kind, f"--{field.name}"), field.name)
    return found


def refuse(args: argparse.Namespace, kind: Any, taken: Any, task: str) -> None:
    """Raise for a field of `kind` that was given but is none of `taken`, the kind of recipe that `task` has."""
    import dataclasses

    from attendless.errors import UserError

    known = {field.name for field in dataclasses.fields(taken)}
    for field in dataclasses.fields(kind):
        if field.name not in known and getattr(args, f"field_{field.name}") is not None:
            raise UserError(f"--{field.name.replace('_', '-')} is no field of a recipe of {task}")
