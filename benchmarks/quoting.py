"""Write the measured tables of the documentation: each table stands between two marks and comes from a results file.

    python benchmarks/quoting.py        # write every table again from its results file

Each benchmark also writes its own table when it ends. A test compares each page with its results file.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attendless_cli.output import write_text

ROOT = Path(__file__).resolve().parents[1]


class Quote(NamedTuple):
    """A results file, the page that shows it, and the name of the table there."""

    results: str
    page: str
    name: str


#: By benchmark. Its function `block` turns the results into the table.
QUOTES = {
    "front_page": Quote("docs/results/front-page.json", "README.md", "front-page"),
    "token_methods": Quote("docs/results/token-methods.json", "docs/results/tokens.md", "token-methods"),
    "models": Quote("docs/results/models.json", "docs/models.md", "models"),
    "long_sequences": Quote("docs/results/long-sequences.json", "docs/results/long-sequences.md", "long-sequences"),
    "sam2": Quote("docs/results/sam2.json", "docs/results/sam2.md", "sam2"),
    "closeness": Quote("docs/results/closeness.json", "docs/results/sam2.md", "closeness"),
    "attention": Quote("docs/results/kernels.json", "docs/results/speed.md", "kernels"),
    "remaining": Quote("docs/results/merged-attention.json", "docs/results/speed.md", "merged-attention"),
    "runtimes": Quote("docs/results/runtimes.json", "docs/results/deploy.md", "runtimes"),
    "precision": Quote("docs/results/precision.json", "docs/precision.md", "precision"),
    "bf16": Quote("docs/results/bf16.json", "docs/precision.md", "bf16"),
    "growth": Quote("docs/results/growth.json", "docs/results/attentions.md", "growth"),
    "many_cores": Quote("docs/results/many-cores.json", "docs/writing-a-kernel.md", "many-cores"),
    "demo": Quote("docs/results/compare.json", "docs/results/compare.md", "demo"),
}


def main() -> None:
    for name, (results, page, place) in QUOTES.items():
        quote(ROOT / page, place, block_of(name)(json.loads((ROOT / results).read_text())))


def publish(name: str, stamp: Mapping[str, Any], found: Any) -> None:
    """Put what a benchmark found on one kind of CPU into its results file, and its table into the page."""
    results, page, place = QUOTES[name]
    path = ROOT / results
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[f"{stamp['cpu']}, {stamp['torch_capability']}"] = found
    write_text(path, json.dumps(known, indent=1) + "\n")
    quote(ROOT / page, place, block_of(name)(known))


def block_of(name: str) -> Callable[[Any], str]:
    """The function of a benchmark that makes its table."""
    made: Callable[[Any], str] = runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="imported")["block"]
    return made


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by a command -->", f"<!-- /{name} -->"


def between(text: str, name: str) -> str:
    """The text between the marks of a table."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].strip()


def quote(page: Path, name: str, block: str) -> None:
    """Replace the text between the marks of a table in `page`; exit with an error if the marks are missing."""
    begin, end = marks(name)
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no place for {name}: expected {begin} and {end}")
    write_text(page, f"{before}{begin}\n{block}\n{end}{after}")


if __name__ == "__main__":
    main()
