"""Print a table of one of the four papers with our own counts beside the printed values. Without TABLE, list all tables
and figures.

examples:
  attendless papers
  attendless papers lavit-2
  attendless papers lavit-extensibility --time --threads 1
  attendless papers --pages docs
  attendless papers bbvit-2 --scale small --data imagenette --out runs/bbvit --minutes 60
  attendless papers bbvit-2 --scale small --results runs/bbvit/bbvit.json > docs/bbvit.md
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "name of a table, such as lavit-2 (default: list them)"
    parser.add_argument("table", metavar="TABLE", nargs="?", help=text)
    parser.add_argument("--markdown", action="store_true", help="print TABLE as Markdown")
    text = "write one Markdown page per paper and an overview to DIR (default: none)"
    parser.add_argument("--pages", metavar="DIR", help=text)
    parser.add_argument("--time", action="store_true", help="also measure the latency of the table's models here")
    small = parser.add_argument_group("small-scale study of a paper's question")
    text = "full: count the models of the table; small: train its small-scale study (default: full)"
    small.add_argument("--scale", choices=("full", "small"), default="full", help=text)
    text = "folder of training images, for example Imagenette (default: none; required without --results)"
    small.add_argument("--data", metavar="DIR", help=text)
    text = "output folder; finished runs are not repeated (default: none; required without --results)"
    small.add_argument("--out", metavar="DIR", help=text)
    text = "start no new run after M minutes (default: no limit)"
    small.add_argument("--minutes", metavar="M", type=arguments.above_zero, help=text)
    text = "print the page of these results, a JSON file, and train nothing (default: train)"
    small.add_argument("--results", metavar="F", help=text)
    small.add_argument("--figure", metavar="F", help="file for the figure (default: in --out)")
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.errors import UserError

    arguments.use_threads(args)
    given = [f"--{name}" for name in ("data", "out", "minutes", "results", "figure") if getattr(args, name) is not None]
    if given and args.scale != "small":
        raise UserError(f"{', '.join(given)}: only valid with --scale small")
    if args.scale == "small":
        return run_study(args)
    return run_table(args) if args.table else run_list(args)


def run_list(args: argparse.Namespace) -> None:
    from pathlib import Path

    from attendless.errors import UserError
    from attendless_lab import papers
    from attendless_lab.papers import page

    tables = papers.tables()
    listing = [(t.name, t.title, "; ".join(t.here), str(t.source)) for t in tables.values()]
    if args.markdown:
        raise UserError("--markdown prints one TABLE; use --pages DIR to write the pages of all tables")
    if args.pages:
        for name, text in page.pages({name: (table, list(table.build())) for name, table in tables.items()}).items():
            path = Path(args.pages) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(path, text)
            print(path)
    else:
        output.print_table("tables and figures", ("table", "content", "reproduced here", "source"), listing)
    keys = ("table", "title", "here", "source")
    output.write_json(args.json, {"rows": [dict(zip(keys, one, strict=True)) for one in listing]})


def run_table(args: argparse.Namespace) -> None:
    from attendless.errors import UserError
    from attendless_lab import papers
    from attendless_lab.papers import page
    from attendless_lab.papers.layout import lay_out

    if args.pages:
        raise UserError(f"--pages writes the pages of all tables, so TABLE {args.table!r} must be left out")
    table = papers.table(args.table)
    if args.time and table.time is None:
        raise UserError(f"--time: table {table.name!r} has no models to time")
    rows = [*table.build(), *(table.time() if args.time and table.time else ())]
    if args.markdown:
        print(page.section(table, rows), end="")
    else:
        layout = lay_out(rows)
        footnotes = [f"[{number}] {note}" for number, note in enumerate(layout.footnotes, start=1)]
        note = "\n".join([*footnotes, *table.rules, f"reproduced here: {'; '.join(table.here)}"])
        output.print_table(page.heading(table), layout.columns, layout.lines, note=note)
        print(page.agreement_sentence(rows))
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
            raise UserError("--scale small requires --data DIR and --out DIR, or --results F")
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
