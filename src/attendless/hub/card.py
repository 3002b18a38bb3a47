"""Model cards: description, usage, measurements and machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..measure.measurement import Measurement
from ..measure.subject import attention_of, tokens_of
from ..sizes import input_size, model_name, size_text
from ..stamp import stamp_line

Measured = Measurement | Mapping[str, Any]


def card(
    model: nn.Module,
    repo_id: str | Path,
    measurements: Measured | Iterable[Measured] = (),
    *,
    text: str = "",
    license: str | None = None,
) -> str:
    """The model card in Markdown: description, usage, measurements and machine."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="attendless",
        pipeline_tag="image-classification",
        license=license,
        tags=["attendless", "timm", "vision-transformer"],
    )
    tokens = tokens_of(model)
    made = f"`{attention_of(model)}`" + (f", tokens `{tokens}`" if tokens else "")
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {Path(repo_id).name}",
        f"`{model_name(model)}` with attention {made}, for images of {size_text(input_size(model))} px. "
        "Made with attendless.",
        f'```python\nimport attendless\n\nmodel = attendless.from_hub("{repo_id}")\n```',
        text.strip(),
        _table(list(_rows(measurements))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


#: Column → key of a row of measurements, and format of its value.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "attention": ("attention", str),
    "tokens": ("tokens_spec", str),
    "size": ("size", lambda size: size_text(tuple(size))),
    "ms": ("latency_ms", "{:.2f}".format),
    "baseline ms": ("dense_latency_ms", "{:.2f}".format),
    "speed-up": ("speedup", "{:.2f}×".format),
    "peak MB": ("peak_memory_mb", "{:.0f}".format),
    "top-1": ("top1", "{:.1f} %".format),
    "agreement": ("agreement", "{:.3f}".format),
    "backend": ("path", str),
}


def _rows(measurements: Measured | Iterable[Measured]) -> Iterator[Mapping[str, Any]]:
    """Rows in their JSON form, each with its stamp."""
    if isinstance(measurements, Measurement):
        yield {**measurements.as_dict(), "stamp": measurements.stamp}
    elif isinstance(measurements, Mapping):
        rows = measurements.get("rows", [measurements])
        yield from ({"stamp": measurements.get("stamp"), **row} for row in rows)
    else:
        for one in measurements:
            yield from _rows(one)


def _table(rows: list[Mapping[str, Any]]) -> str:
    """A table of the measurements, without empty columns, and the machines they come from."""
    if not rows:
        return ""
    shown = {name: of for name, of in COLUMNS.items() if any(row.get(of[0]) not in (None, "") for row in rows)}
    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    for row in rows:
        cells = ["" if row.get(key) in (None, "") else form(row[key]) for key, form in shown.values()]
        lines.append(f"| {' | '.join(cells)} |")
    stamps = dict.fromkeys(stamp_line(row["stamp"]) for row in rows if isinstance(row.get("stamp"), Mapping))
    return "## Measured\n\n" + "\n".join(lines) + "".join(f"\n\n{line}" for line in stamps)
