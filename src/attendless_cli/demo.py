"""A first tour in about ten minutes, on data that comes with attendless. It trains and compares six attentions under
identical conditions. Then it converts the model trained with full attention, without training, at 2,304 tokens and
measures predictions, latency and memory. One page shows both. The same command on the same folder resumes.

examples:
  attendless demo
  attendless demo --out runs/demo
"""

from __future__ import annotations

import argparse
import sys

from . import arguments, output
from .compare import tell

#: As measured (docs/results/compare.md). The comparison prints an estimate for this machine.
MINUTES = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder for runs, results and report"
    default = "attendless-out/demo"
    parser.add_argument("--out", metavar="DIR", type=arguments.target("comparison"), default=default, help=text)
    arguments.jobs(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    import shlex
    from pathlib import Path

    from attendless.stamp import cores
    from attendless_lab.compare.demo import demo

    Path(args.out).mkdir(parents=True, exist_ok=True)  # an error here is reported before any work
    print(f"about {MINUTES} minutes on two cores; this machine has {cores()}", file=sys.stderr, flush=True)
    found = demo(
        args.out,
        jobs=args.jobs,
        command=shlex.join(["attendless", *sys.argv[1:]]),
        say=lambda text: print(text, file=sys.stderr, flush=True),
        progress=output.progress,
    )
    output.write_json(args.json, {"conversion": found.conversion, "rows": found.comparison.rows})
    return tell(found.comparison, found.conversion["headline"])
