"""Fields of a recipe on the command line: flags for those used most, and `--set KEY=VALUE` for all of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import arguments

if TYPE_CHECKING:
    from attendless.options import Options

#: Fields that have a flag of their own.
FLAGS = ("epochs", "batch", "size", "seed", "workers")


def add(parser: argparse.ArgumentParser, *, seeds: bool = False) -> None:
    """`--set` and the flags of `FLAGS`. With `seeds`, `--seed` takes several."""
    kept = "(default: the recipe's)"
    parser.add_argument("--epochs", metavar="N", type=arguments.count, help=f"passes over the training data {kept}")
    parser.add_argument("--batch", metavar="B", type=arguments.positive, help=f"images per optimiser step {kept}")
    arguments.size(parser, many=False)
    if seeds:
        text = "seeds; each attention is trained once from each (default: 0 1)"
        parser.add_argument("--seed", metavar="S", nargs="+", type=arguments.count, default=[], help=text)
    else:
        parser.add_argument("--seed", metavar="S", type=arguments.count, help=f"seed of every random draw {kept}")
    text = f"processes that prepare images (default: {'0' if seeds else 'as many as suit the machine'})"
    parser.add_argument("--workers", metavar="W", type=arguments.processes, help=text)
    text = "other fields of the recipe, such as lr=1e-3 drop_path=0.1; `attendless recipes` lists them " + kept
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help=text)


def names() -> set[str]:
    """Every name that `--set` takes for some task."""
    import dataclasses

    from attendless.dense.recipes import DenseRecipe
    from attendless.train.recipe import Recipe, Run

    return {field.name for kind in (Recipe, DenseRecipe, Run) for field in dataclasses.fields(kind)}


def read(args: argparse.Namespace, owner: str, *kinds: type[Options]) -> list[dict[str, Any]]:
    """The fields that the command line names, typed, in one dict per kind. `owner` names the recipe in errors."""
    import dataclasses

    from attendless.errors import UserError, unknown
    from attendless.options import read_options

    texts: dict[str, str] = {}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--set {item!r}: expected KEY=VALUE, such as lr=1e-3")
        if key in texts or (key in FLAGS and getattr(args, key) not in (None, [])):
            raise UserError(f"--set {key}: given twice")
        texts[key] = value
    fields = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    for key in texts:
        if not any(key in known for known in fields):
            raise unknown(f"field of {owner}", key, set().union(*fields))
    found = []
    for kind, known in zip(kinds, fields, strict=True):
        here = {key: text for key, text in texts.items() if key in known}
        read = read_options(here, kind, "--set")
        typed = {key: getattr(read, key) for key in here}
        flags = {key: getattr(args, key) for key in FLAGS if key in known and getattr(args, key) not in (None, [])}
        found.append(typed | flags)
    return found
