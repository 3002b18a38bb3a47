"""Write the table of runtimes and precisions in docs/results/deploy.md from what `attendless bench` measured.

    attendless bench MODEL --size 384 --runtime eager openvino --precision fp32 int8 --quick --json 384.json
    python benchmarks/runtimes.py 384.json [OTHER.json …]

Each file is one interleaved run. The results are kept in docs/results/runtimes.json, one entry for each kind of CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quoting import publish
from study import by_machine, speed, table

from attendless.stamp import stamp_line

#: What the table needs of a row.
KEPT = ("size", "runtime", "precision", "attention", "tokens_spec", "path", "latency_ms", "speedup", "quartiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what `attendless bench --json` wrote")
    found = [json.loads(path.read_text()) for path in parser.parse_args().files]
    rows = [{name: row[name] for name in (*KEPT, "eager_speedup")} for one in found for row in one["rows"]]
    machine = found[-1]["stamp"]
    publish("runtimes", machine, {"stamp": machine, "rows": rows})


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The table of one machine, by image size, precision and runtime."""
    ordered = sorted(found["rows"], key=lambda row: (row["size"], row["path"] != "timm"))
    lines = [
        [
            *(str(row["size"][0]), row["runtime"], row["precision"], variant(row), f"{row['latency_ms']:.1f}"),
            "" if row["path"] == "timm" else speed(row),
            "–" if row["eager_speedup"] is None else f"{row['eager_speedup']:.2f}×",
        ]
        for row in ordered
    ]
    columns = ["px", "runtime", "precision", "model", "ms", "over the original there", "over timm eager fp32"]
    return f"{table(columns, lines)}\n\n{stamp_line(found['stamp'])}"


def variant(row: Mapping[str, Any]) -> str:
    if row["path"] == "timm":
        return "original"
    parts = (row["attention"] if row["attention"] != "full" else "", row["tokens_spec"] or "")
    return " + ".join(f"`{part}`" for part in parts if part) or "converted, full attention"


if __name__ == "__main__":
    main()
