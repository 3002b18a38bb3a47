"""Print the tables of the papers with our own counts beside the printed numbers. Without a name: list the tables and
figures.

examples:
  attendless papers
  attendless papers lavit-2
  attendless papers lavit-extensibility --time --threads 1
  attendless papers --markdown > docs/papers.md
  attendless papers bbvit-2 --scale small --data imagenette --out runs/bbvit --minutes 60
  attendless papers bbvit-2 --scale small --results runs/bbvit/bbvit.json --markdown > docs/bbvit.md
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "name of a table, such as lavit-2 (default: list them)"
    parser.add_argument("table", metavar="TABLE", nargs="?", help=text)
    parser.add_argument("--markdown", action="store_true", help="print Markdown; without TABLE, of every table")
    parser.add_argument("--time", action="store_true", help="also measure the latency of the table's models here")
    small = parser.add_argument_group("a paper's question at small scale")
    text = "full counts the table's models, small trains the table's study"
    small.add_argument("--scale", choices=("full", "small"), default="full", help=text)
    text = "images of the study, such as Imagenette's folder (default: none; needed unless --results)"
    small.add_argument("--data", metavar="DIR", help=text)
    text = "folder of the study; finished runs are not repeated (default: none; needed unless --results)"
    small.add_argument("--out", metavar="DIR", help=text)
    text = "start no run after this many minutes (default: no limit)"
    small.add_argument("--minutes", metavar="M", type=arguments.above_zero, help=text)
    text = "JSON of a study: print its page and train nothing (default: train)"
    small.add_argument("--results", metavar="F", help=text)
    small.add_argument("--figure", metavar="F", help="draw the study's rows to this file (default: in --out)")
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.errors import UserError

    arguments.use_threads(args)
    given = [f"--{name}" for name in ("data", "out", "minutes", "results", "figure") if getattr(args, name) is not None]
    if given and args.scale != "small":
        raise UserError(f"{', '.join(given)}: these belong to a study, so --scale small")
    if args.scale == "small":
        return run_study(args)
    return run_table(args) if args.table else run_list(args)


def run_list(args: argparse.Namespace) -> None:
    from attendless_lab import papers
    from attendless_lab.papers import page

    tables = papers.tables()
    listing = [(t.name, t.title, "; ".join(t.here), t.source) for t in tables.values()]
    if args.markdown:
        print(page.page({name: (table, list(table.build())) for name, table in tables.items()}), end="")
    else:
        output.print_table("tables and figures", ("table", "what it is", "here", "source"), listing)
    keys = ("table", "title", "here", "source")
    output.write_json(args.json, {"rows": [dict(zip(keys, one, strict=True)) for one in listing]})


def run_table(args: argparse.Namespace) -> None:
    from attendless.errors import UserError
    from attendless_lab import papers
    from attendless_lab.papers import page

    table = papers.table(args.table)
    if args.time and table.time is None:
        raise UserError(f"table {table.name!r} has nothing to time")
    rows = [*table.build(), *(table.time() if args.time and table.time else ())]
    if args.markdown:
        print(page.section(table, rows), end="")
    else:
        note = "\n".join([*table.rules, f"here: {'; '.join(table.here)}"])
        output.print_table(page.heading(table), page.COLUMNS, [page.cells(row) for row in rows], note=note)
        print(page.agreement(rows))
    found: dict[str, Any] = {"table": table.name, "here": list(table.here), "rules": list(table.rules)}
    output.write_json(args.json, {**found, "rows": [row.as_dict() for row in rows]})


def run_study(args: argparse.Namespace) -> None:
    import json
    import math
    from pathlib import Path

    from attendless.errors import UserError
    from attendless_lab.papers import study, study_page

    asked = study.study(args.table or "")
    if args.results:
        try:
            found = json.loads(Path(args.results).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--results {args.results!r} cannot be read: {error}") from None
        if found.get("study") != asked.name:
            raise UserError(
                f"--results {args.results!r} holds the study {found.get('study')!r}, expected {asked.name!r}"
            )
    else:
        if not args.data or not args.out:
            raise UserError("--scale small needs --data DIR and --out DIR, or --results F")
        out = Path(args.out)
        said = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        study.carry_out(asked, args.data, out, minutes=args.minutes or math.inf, say=said)
        found = study.gather(asked, out)
        study.write(found, out / f"{asked.name}.json")
        study_page.draw(found, out / f"{asked.name}.png")
    if args.json:
        study.write(found, Path(args.json))
    if args.figure:
        study_page.draw(found, args.figure)
    print(study_page.page(found), end="")
