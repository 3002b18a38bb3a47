"""Flags made from the fields of a frozen dataclass, and what was given read back into one."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

T = TypeVar("T")


def add(parser: argparse.ArgumentParser, title: str, kind: Any) -> None:
    """A flag for every field of `kind`; a field not given stays what the recipe says."""
    from attendless.options import describe_options

    group = parser.add_argument_group(title)
    for field in describe_options(kind):
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
