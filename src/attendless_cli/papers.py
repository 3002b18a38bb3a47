"""Print the papers' tables with our own counts beside the printed numbers. Without a name: list the tables.

examples:
  attendless papers
  attendless papers lavit-2
  attendless papers lavit-extensibility --time --threads 1
  attendless papers sparsifiner-2 --markdown
"""

from __future__ import annotations

import argparse

from . import output, words


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", nargs="?", help="a table's name, such as lavit-2")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--time", action="store_true", help="also time the models here, where the table has models")
    words.threads(parser)
    words.json(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless import papers
    from attendless.errors import UserError

    if not args.table:
        listing = [(t.name, t.title, t.source) for t in papers.tables().values()]
        output.print_table("tables", ("table", "what it is", "source"), listing)
        output.write_json(
            args.json, {"rows": [{"table": name, "title": title, "source": s} for name, title, s in listing]}
        )
        return
    table = papers.table(args.table)
    if args.time and table.time is None:
        raise UserError(f"table {table.name!r} has nothing to time")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = [*table.build(), *(table.time() if args.time and table.time else ())]
    columns = ("row", "quantity", "paper", "ours", "agrees", "note")
    cells = [
        (r.row, r.quantity, _with_unit(r.paper, r.unit), _with_unit(r.ours_text, r.unit), _agrees(r), r.note)
        for r in rows
    ]
    heading = f"{table.title} · {table.source}"
    if args.markdown:
        print(f"**{heading}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in cells:
            print(f"| {' | '.join(row)} |")
        print("\n" + "\n".join(f"- {rule}" for rule in table.rules))
    else:
        output.print_table(heading, columns, cells, note="\n".join(table.rules))
    checked = [r for r in rows if r.agrees is not None]
    print(f"{sum(bool(r.agrees) for r in checked)} of {len(checked)} counted numbers agree to the printed digits")
    output.write_json(args.json, {"table": table.name, "rules": list(table.rules), "rows": [r.as_dict() for r in rows]})


def _agrees(row: object) -> str:
    return {True: "yes", False: "no", None: "–"}[row.agrees]  # type: ignore[attr-defined]


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}".strip() if text else "–"
