"""List the recipes of train, distill and compare, and every field that `--set KEY=VALUE` takes: type, choices, range
and default. With a name: the recipe's description, and its own values as the defaults.

examples:
  attendless recipes
  attendless recipes quick
  attendless recipes small_detection --json recipe.json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from . import arguments, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from attendless.options import Options


class Listed(NamedTuple):
    """A recipe: the command and task that it is for, its name and the function that makes it."""

    used_by: str
    name: str
    make: Callable[[], Any]

    @property
    def text(self) -> str:
        import inspect

        return inspect.getdoc(self.make) or ""

    @property
    def summary(self) -> str:
        return self.text.partition("\n\n")[0].replace("\n", " ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "one recipe: show its description and values (default: list all)"
    parser.add_argument("name", metavar="NAME", nargs="?", help=text)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.dense.recipes import DenseRecipe
    from attendless.errors import unknown
    from attendless.train.recipe import Recipe, Run

    exist = listed()
    chosen = [recipe for recipe in exist if args.name in (None, recipe.name)]
    if not chosen:
        raise unknown("recipe", args.name, {recipe.name for recipe in exist})
    rows: list[dict[str, Any]] = []
    if args.name:
        for recipe in chosen:
            rows += _one(recipe)
    else:
        table = [(recipe.name, recipe.used_by, recipe.summary) for recipe in chosen]
        output.print_table("recipes", ("recipe", "used by", "what it is"), table)
        own = {field["name"] for field in fields(Recipe())}
        rows += _print_fields("fields of a recipe", fields(Recipe()))
        dense = [field for field in fields(DenseRecipe()) if field["name"] not in own]
        rows += _print_fields("fields of detection and segmentation recipes only", dense)
    rows += _print_fields("fields of a run, which do not change the trained weights", fields(Run()))
    print("\nchange fields: attendless train MODEL --set KEY=VALUE …")
    about = [{"name": r.name, "used_by": r.used_by, "summary": r.summary} for r in chosen]
    output.write_json(args.json, {"recipes": about, "rows": rows})


def listed() -> list[Listed]:
    """Every recipe, in the order of the commands."""
    from attendless.dense.recipes import RECIPES as DENSE
    from attendless.train.distilling import PHASES
    from attendless.train.recipe import RECIPES

    found = [Listed("train, compare", name, make) for name, make in RECIPES.items()]
    found += [Listed(f"train --task {task}", name, make) for task in DENSE for name, make in DENSE[task].items()]
    return found + [Listed("distill", name, make) for name, make in PHASES.items()]


def fields(value: Options) -> list[dict[str, Any]]:
    """Name, type, choices, range, default and help of each field; the default is what `value` holds."""
    import dataclasses

    from attendless.options import describe_options, field_text

    described = {field["name"]: field for field in describe_options(type(value))}
    return [
        described[field.name] | {"default": (held := getattr(value, field.name)), "text": field_text(field, held)}
        for field in dataclasses.fields(value)
    ]


def _one(recipe: Listed) -> list[dict[str, Any]]:
    """Print a recipe with its values; one of distill, phase by phase."""
    print(f"{recipe.name} ({recipe.used_by})\n\n{recipe.text}\n")
    made = recipe.make()
    if recipe.used_by != "distill":
        return _print_fields(f"fields of {recipe.name}", fields(made), recipe=recipe.name)
    rows: list[dict[str, Any]] = []
    for phase in made:
        losses = ", ".join(f"loss.{name}={weight:g}" for name, weight in phase.losses.items() if weight)
        about = {"recipe": recipe.name, "phase": phase.name}
        rows += _print_fields(f"phase {phase.name}: {losses}", fields(phase.recipe), **about)
    return rows


def _print_fields(title: str, found: list[dict[str, Any]], **about: str) -> list[dict[str, Any]]:
    columns = ("field", "value", "default", "range", "note")
    table = [(field["name"], field["type"], field.pop("text") or "–", field["range"], field["help"]) for field in found]
    print()
    output.print_table(title, columns, table)
    return [about | field for field in found]
