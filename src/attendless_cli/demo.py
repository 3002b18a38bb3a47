"""The first ten minutes, on pictures that come with attendless. Six attentions are trained alike and compared; then the
model that learned with full attention is converted, without training, at 2,304 tokens: what becomes of its answers, its
milliseconds and its memory. One page shows both. The same command on the same folder goes on where it stopped.

examples:
  attendless demo
  attendless demo --out runs/demo
"""

from __future__ import annotations

import argparse
import sys

from . import arguments, output
from .compare import tell

#: As measured (docs/results/compare.md); the comparison says how long it will take here.
MINUTES = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", default="attendless-out/demo", help="folder (default: %(default)s)")
    parser.add_argument("--jobs", metavar="J", type=arguments.positive, help="runs at a time (default: one per core)")
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    import shlex
    from pathlib import Path

    from attendless.stamp import cores
    from attendless_lab.compare.demo import demo

    Path(args.out).mkdir(parents=True, exist_ok=True)  # or it is said before anything else
    print(f"about {MINUTES} minutes on two cores; here are {cores()}", file=sys.stderr, flush=True)
    found = demo(
        args.out,
        jobs=args.jobs,
        command=shlex.join(["attendless", *sys.argv[1:]]),
        say=lambda text: print(text, file=sys.stderr, flush=True),
        progress=output.progress,
    )
    output.write_json(args.json, {"conversion": found.conversion, "rows": found.comparison.rows})
    return tell(found.comparison, found.conversion["headline"])
