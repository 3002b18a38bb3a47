"""Run the contract that every attention keeps on any attention: shapes, gradients, determinism, round trips, MACs,
maps, compilation and more, by the usual backend and by each other that can compute it. Exit code 1 if a check failed.

examples:
  attendless check foveal:keep=0.1
  attendless --plugin mine.py check mine mine:radius=3
  attendless check mine --plugin mine.py --json mine.json
"""

from __future__ import annotations

import argparse

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", nargs="+", help="attention specs, such as foveal:keep=0.1, or your own")
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.attention import parse
    from attendless.check.attentions import CHECKS, check, plan

    for spec in args.spec:
        parse(spec)
    found, failed = [], 0
    for spec in args.spec:
        verdicts = []
        with output.progress(spec, len(plan(spec))) as step:
            for verdict in check(spec):
                verdicts.append(verdict)
                step(1)
        table = [(v.check, f"auto: {v.backend}" if v.backend else "off", v.result, v.note) for v in verdicts]
        output.print_table(f"the contract · {spec}", ("check", "computed by", "result", "note"), table)
        for name in dict.fromkeys(v.check for v in verdicts if v.result == "failed"):
            print(f"{name}: {CHECKS[name].rule}")
        counts = {result: sum(v.result == result for v in verdicts) for result in ("passed", "refused", "failed")}
        print(", ".join(f"{count} {result}" for result, count in counts.items() if count), end="\n\n", flush=True)
        failed += counts["failed"]
        found += verdicts
    rules = {name: rule.rule for name, rule in CHECKS.items()}
    output.write_json(args.json, {"rules": rules, "rows": [verdict.as_dict() for verdict in found]})
    return 1 if failed else 0
