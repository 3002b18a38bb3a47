"""Compare attentions fairly: each is trained from the same initial weights on the same pictures in the same order, then
measured by turns against the dense model. The folder gets results.json, .csv, .md and .tex, and a report.html that
needs nothing else. The same command on the same folder goes on where it stopped; another attention adds its row.

examples:
  attendless compare
  attendless compare --attention full foveal:keep=0.1 window:size=4 --seeds 0 1 2 --out runs/mine
  attendless compare deit_tiny_patch16_224 --patch 8 16 --data imagenette --recipe quick --size 160 --out runs/nette
  attendless --plugin mine.py compare --attention full mine --out runs/mine
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import arguments, output
from . import recipe_flags as fields

if TYPE_CHECKING:
    from attendless_lab.compare.contest import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from attendless.train.recipe import Recipe

    model = "timm or attendless model names, or files (default: a ViT of under 0.5 M parameters)"
    parser.add_argument("model", metavar="MODEL", nargs="*", help=model)
    attention = "attention specs (default: one of every kind); `attendless list` shows them"
    parser.add_argument("--attention", metavar="A", nargs="+", default=[], help=attention)
    parser.add_argument(
        "--patch",
        metavar="P",
        nargs="+",
        type=arguments.positive,
        default=[None],
        help="patch sizes (default: the model's)",
    )
    parser.add_argument(
        "--data", metavar="DIR", nargs="+", default=[], help="folders of images (default: a few of `scenes`, embedded)"
    )
    recipe = "recipes (default: scenes:epochs=3,lr=3e-3)"
    parser.add_argument("--recipe", metavar="R", nargs="+", default=[], help=recipe)
    parser.add_argument(
        "--seeds", metavar="N", nargs="+", type=arguments.count, default=[], help="seeds (default: 0 1)"
    )
    parser.add_argument("--out", metavar="DIR", default="attendless-out/compare", help="folder (default: %(default)s)")
    parser.add_argument("--jobs", metavar="J", type=arguments.positive, help="runs at a time (default: one per core)")
    parser.add_argument(
        "--threads",
        metavar="T",
        type=arguments.positive,
        default=1,
        help="threads of each run and measurement (default: 1)",
    )
    parser.add_argument(
        "--workers", metavar="W", type=arguments.count, default=0, help="processes that prepare a run's images"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="what computes it (default: auto)"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: its address, `auto` or `local`")
    parser.add_argument(
        "--budget",
        metavar="S",
        type=arguments.above_zero,
        default=2.0,
        help="seconds of timing per attention and size (default: 2)",
    )
    parser.add_argument(
        "--larger", metavar="F", nargs="*", type=arguments.positive, default=[3, 6],
        help="also measure cost at images F times as large (default: 3 6)",
    )  # fmt: skip
    arguments.json(parser)
    fields.add(parser, "the recipe's fields", Recipe)


def run(args: argparse.Namespace) -> int:
    import shlex

    from attendless.train import Recipe
    from attendless_lab.compare import compare
    from attendless_lab.compare.contestants import (
        ATTENTIONS,
        DATA,
        MODEL,
        RECIPE,
        SEEDS,
    )

    changed = fields.given(args, Recipe)
    seed = changed.pop("seed", None)
    found = compare(
        args.model or MODEL,
        args.attention or ATTENTIONS,
        patches=args.patch,
        data=args.data or DATA,
        recipes=args.recipe or RECIPE,
        seeds=args.seeds or (SEEDS if seed is None else (seed,)),
        out=args.out,
        jobs=args.jobs,
        threads=args.threads,
        workers=args.workers,
        device=args.device,
        ray=args.ray,
        factors=(1, *args.larger),
        budget=args.budget,
        command=shlex.join(["attendless", *sys.argv[1:]]),
        say=lambda text: print(text, file=sys.stderr, flush=True),
        progress=output.progress,
        **changed,
    )
    output.write_json(args.json, {"rows": found.rows})
    return tell(found)


def tell(found: Results, *more: str) -> int:
    """The table, what was found in words, `more` first, and where the report is; returns the exit code."""
    from attendless.stamp import stamp_line
    from attendless_lab.compare.results import failures, table

    columns, cells = table(found.rows)
    note = "\n".join([*failures(found.rows), stamp_line(found.stamp)])
    output.print_table("trained alike; costs at the largest size measured", columns, cells, note=note)
    print("", *(f"{text[0].upper()}{text[1:]}." for text in (*more, found.headline) if text), sep="\n")
    print(f"report: {found.report}")
    return 1 if found.failed else 0
