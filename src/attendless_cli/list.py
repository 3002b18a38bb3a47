"""List the attentions and token reducers with their options, and the models that can be converted.

examples:
  attendless list
  attendless list foveal
  attendless list --json all.json
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="one attention or reducer: show its options in full (default: list all)"
    )
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import attendless
    from attendless.attention import aliases, attention_class
    from attendless.backbones import MODELS
    from attendless.integrations.support import convertible as families
    from attendless.options import describe_options
    from attendless.tokens import reducers

    found: dict[str, Any] = {**attendless.attentions()}
    reducing = reducers()
    if args.name:
        one: Any = reducing[args.name] if args.name in reducing else attention_class(args.name)
        found = {one.name: one}
    rows: list[dict[str, Any]] = [
        {"name": name, "options": describe_options(cls.Options)} for name, cls in found.items()
    ]
    more = [{"name": name, "options": describe_options(cls.Options)} for name, cls in reducing.items()]
    models = sorted(MODELS)
    convertible = families()
    if args.name:
        _one(one.name, one, rows[0]["options"])
    else:
        table = [(name, _first_line(cls), _option_text(cls)) for name, cls in found.items()]
        output.print_table("attentions", ("attention", "description", "options"), table)
        table = [(name, _first_line(cls), _option_text(cls)) for name, cls in reducing.items()]
        print()
        output.print_table("token reducers", ("tokens", "description", "options"), table)
        print()
        for alias, name in aliases().items():
            print(f"{alias} is another name of {name}")
        print(_wrapped(f"models of attendless: {', '.join(models)}"))
        print(_wrapped(f"models that can be converted: {', '.join(convertible)}"))
        print("\ndetails of one: attendless list NAME")
    listed = {"attentions": rows, "aliases": aliases(), "reducers": more}
    output.write_json(args.json, {**listed, "models": models, "convertible": convertible})


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, subsequent_indent="  ")


def _first_line(cls: type) -> str:
    import sys

    return (sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip().split("\n", 1)[0]


def _option_text(cls: type) -> str:
    from attendless.options import describe_options, value_text

    return ", ".join(f"{o['name']}={value_text(o['default'])}" for o in describe_options(cls.Options))  # type: ignore[attr-defined]


def _one(name: str, cls: type, options: list[dict[str, Any]]) -> None:
    import sys

    from attendless.options import value_text

    print((sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip(), end="\n\n")
    table = [(o["name"], o["type"], value_text(o["default"]), o["range"], o["help"]) for o in options]
    if table:
        output.print_table(f"options of {name}", ("option", "value", "default", "range", "note"), table)
    examples = getattr(cls, "examples", ())
    print(f"specs to try: {'  '.join(examples)}" if examples else "")
