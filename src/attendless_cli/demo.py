"""A first tour in about ten minutes, on data that comes with attendless. It trains and compares six attentions under
identical conditions. Then it converts the model trained with full attention, without training, at 2,304 tokens and
measures predictions, latency and memory. One page shows both. With weights of DeiT-Tiny, `optimize` then makes a real
model faster, on photographs of installed packages. The same command on the same folder resumes.

examples:
  attendless demo --pretrained
  attendless demo --weights deit.safetensors --out runs/demo
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
    arguments.weights(parser)
    arguments.jobs(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    import shlex
    from pathlib import Path

    from attendless.stamp import cores
    from attendless_lab.compare.demo import demo
    from attendless_lab.compare.photographs import optimize_photographs

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    Path(args.out).mkdir(parents=True, exist_ok=True)  # an error here is reported before any work
    say(f"about {MINUTES} minutes on two cores; this machine has {cores()}")
    found = demo(
        args.out,
        jobs=args.jobs,
        command=shlex.join(["attendless", *sys.argv[1:]]),
        say=say,
        progress=output.progress,
    )
    output.write_json(args.json, {"conversion": found.conversion, "rows": found.comparison.rows})
    code = tell(found.comparison, found.conversion["headline"])
    if not (args.weights or args.pretrained):
        say("3. a real model was left out: --pretrained downloads DeiT-Tiny (23 MB), --weights F takes a file")
    elif optimized := optimize_photographs(Path(args.out, "fast"), weights=args.weights, say=say):
        print(optimized)
        print(f"\nrun it: attendless serve {shlex.quote(str(Path(args.out, 'fast')))}")
    return code
