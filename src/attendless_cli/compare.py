"""Compare attentions fairly: train each from the same initial weights on the same images in the same order, then
measure it in an interleaved benchmark against full attention. The folder receives results.json, .csv, .md and .tex, and
a self-contained report.html. The same command on the same folder resumes; another attention adds its row.

examples:
  attendless compare
  attendless compare --attention full foveal:keep=0.1 window:size=4 --seed 0 1 2 --out runs/mine
  attendless compare deit_tiny_patch16_224 --patch 8 16 --data imagenette --recipe quick --size 160 --out runs/nette
  attendless --plugin mine.py compare --attention full mine --out runs/mine
  attendless --plugin mine.py compare --attention all --out runs/all
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import arguments, output, settings

if TYPE_CHECKING:
    from attendless_lab.compare.comparison import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "timm or attendless model names, or files (default: a ViT with fewer than 0.5 M parameters)"
    parser.add_argument("model", metavar="MODEL", nargs="*", help=text)
    text = "attention specs, or `all`: every mechanism of `attendless list`, plug-ins included (default: six of them)"
    parser.add_argument("--attention", metavar="A", nargs="+", default=[], help=text)
    text = "patch sizes (default: the model's own)"
    parser.add_argument("--patch", metavar="P", nargs="+", type=arguments.positive, default=[None], help=text)
    text = "folders of images (default: a small set of `scenes`, included)"
    parser.add_argument("--data", metavar="DIR", nargs="+", default=[], help=text)
    text = "recipes; `attendless recipes` lists them (default: scenes:epochs=3,lr=3e-3)"
    parser.add_argument("--recipe", metavar="R", nargs="+", default=[], help=text)
    settings.add(parser, seeds=True)
    text = "folder for runs, results and report"
    default = "attendless-out/compare"
    parser.add_argument("--out", metavar="DIR", type=arguments.target("comparison"), default=default, help=text)
    arguments.jobs(parser)
    text = "CPU threads of each run and measurement"
    parser.add_argument("--threads", metavar="T", type=arguments.at_least_one, default=1, help=text)
    text = "run on a Ray cluster: its address, `auto` or `local` (default: on this machine)"
    parser.add_argument("--ray", metavar="ADDRESS", help=text)
    arguments.budget(parser, 2.0, "attention and size")
    text = "also measure the cost at images F times as large"
    parser.add_argument("--larger", metavar="F", nargs="*", type=arguments.positive, default=[3, 6], help=text)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    import shlex

    from attendless.errors import UserError
    from attendless.train import Recipe, Run
    from attendless_lab.compare import compare
    from attendless_lab.compare.variants import ATTENTIONS, DATA, MODEL, RECIPE, SEEDS

    fields, how = settings.read(args, "a classification recipe", Recipe, Run)
    for key in how.keys() - {"workers", "device"}:
        raise UserError(f"--set {key}: compare decides this itself")
    seeds = fields.pop("seed", SEEDS)
    found = compare(
        args.model or MODEL,
        args.attention or ATTENTIONS,
        patches=args.patch,
        data=args.data or DATA,
        recipes=args.recipe or RECIPE,
        seeds=[seeds] if isinstance(seeds, int) else seeds,
        out=args.out,
        jobs=args.jobs,
        threads=args.threads,
        ray=args.ray,
        factors=(1, *args.larger),
        budget=args.budget,
        command=shlex.join(["attendless", *sys.argv[1:]]),
        say=lambda text: print(text, file=sys.stderr, flush=True),
        progress=output.progress,
        **how,
        **fields,
    )
    output.write_json(args.json, {"rows": found.rows})
    return tell(found)


def tell(found: Results, *more: str) -> int:
    """Print the table, the findings (`more` first) and the path of the report; returns the exit code."""
    from attendless.stamp import stamp_line
    from attendless_lab.compare.results import failures, table

    columns, cells = table(found.rows)
    note = "\n".join([*failures(found.rows), stamp_line(found.stamp)])
    output.print_table(
        "trained under identical conditions; costs at the largest size measured", columns, cells, note=note
    )
    print("", *(f"{text[0].upper()}{text[1:]}." for text in (*more, found.headline) if text), sep="\n")
    print(f"report: {found.report}")
    return 1 if found.failed else 0
