"""Test whether an attention or a token reducer follows its interface: shapes, gradients, determinism, round trips,
MACs, compilation and more. Attentions are tested with every backend that can compute them. The exit code is 1 if a
check fails.

examples:
  attendless check foveal:keep=0.1 tome:r=8
  attendless --plugin mine.py check mine mine:radius=3
  attendless check mine --plugin mine.py --json mine.json
"""

from __future__ import annotations

import argparse

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec",
        metavar="SPEC",
        nargs="+",
        help="attentions or token reducers, such as foveal:keep=0.1, tome or your own",
    )
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.check.run import plan
    from attendless.check.trial import attempt

    plans = [plan(spec) for spec in args.spec]
    found, failed, rules = [], 0, {}
    for spec, checks in zip(args.spec, plans, strict=True):
        verdicts = []
        with output.progress(spec, len(checks)) as step:
            for check, backend in checks:
                verdicts.append(attempt(check, spec, backend))
                rules[check.name] = check.rule
                step(1)
        table = [(v.check, f"auto: {v.backend}" if v.backend else "off", v.result, v.note) for v in verdicts]
        output.print_table(f"interface checks · {spec}", ("check", "computed by", "result", "note"), table)
        for name in dict.fromkeys(v.check for v in verdicts if v.result == "failed"):
            print(f"{name}: {rules[name]}")
        counts = {result: sum(v.result == result for v in verdicts) for result in ("passed", "refused", "failed")}
        print(", ".join(f"{count} {result}" for result, count in counts.items() if count), end="\n\n", flush=True)
        failed += counts["failed"]
        found += verdicts
    output.write_json(args.json, {"rules": rules, "rows": [verdict.as_dict() for verdict in found]})
    return 1 if failed else 0
