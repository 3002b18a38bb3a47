"""One self-contained `report.html`: the rows, curves and maps as data inside the page, drawn by its own script.

Style, script and data are in the file, so it can be mailed, archived and opened offline. If the folder has a
`conversion.json` (of the demo: a model converted without training), the page starts with it.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image

from attendless.convert import load
from attendless.data.opening import open_data
from attendless.errors import UserError
from attendless.palette import COLOURS
from attendless.show.html import fill, style
from attendless.sizes import image_config, input_size
from attendless.stamp import stamp_line
from attendless.storage import atomic
from attendless.train.augment import eval_transform
from attendless.train.log import read_rows

from .patterns import looks
from .results import headline
from .variants import Setting, Variant

#: The demo's results of the conversion.
CONVERSION = "conversion.json"
#: Side of the image in the page, in pixels.
_THUMBNAIL = 160


def write_report(
    out: Path,
    variants: Sequence[Variant],
    rows: Sequence[dict[str, Any]],
    stamp: Mapping[str, Any],
    commands: Sequence[str],
) -> Path:
    pictures = {setting: _picture(setting) for setting in {c.setting for c in variants}}
    conversion = json.loads(found.read_text()) if (found := out / CONVERSION).is_file() else None
    payload = {
        "headlines": list(filter(None, [conversion and conversion["headline"], headline(rows)])),
        "conversion": conversion,
        "rows": [
            row | {"curves": _curves(out, row), "looks": _looks(out, variant, row, pictures[variant.setting])}
            for variant, row in zip(variants, rows, strict=True)
        ],
        "pictures": {setting.folder: _thumbnail(picture) for setting, picture in pictures.items()},
        "colours": COLOURS,
        "stamp": stamp_line(stamp),
        "commands": list(commands),
    }
    with atomic(out / "report.html") as temporary:
        temporary.write_text(page(payload), encoding="utf-8")
    return out / "report.html"


def page(payload: Mapping[str, Any]) -> str:
    """The page around its data. `<` is written as an escape, so no text in the data can end the script element."""
    parts = {
        "style": style(),
        "script": _part("report.js"),
        "data": json.dumps(payload, allow_nan=False).replace("<", "\\u003c"),
        "commands": html.escape("\n".join(payload["commands"])),
        "stamp": html.escape(payload["stamp"]),
    }
    return fill(_part("report.html"), parts)


def _part(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _curves(out: Path, row: Mapping[str, Any]) -> list[list[dict[str, float]]]:
    """Top-1 and loss of each run after every epoch."""
    names = ("epoch", "top1", "val_loss", "loss")
    return [
        [
            {name: found[name] for name in names if name in found}
            for found in read_rows(out / run["folder"] / "metrics.jsonl")
            if found.get("event") == "epoch" and "top1" in found
        ]
        for run in row["runs"]
    ]


def _picture(setting: Setting) -> Any:
    """The image of the maps: the first of the validation set."""
    try:
        return open_data(setting.data, "val")[0][0]
    except UserError:  # the data was removed, or its first image is damaged: no maps then
        return None


def _looks(out: Path, variant: Variant, row: Mapping[str, Any], picture: Any) -> list[dict[str, Any]]:
    """The maps of the model of the first seed; empty for a model saved as weights alone, or without maps."""
    if picture is None or not row["runs"]:
        return []
    try:
        model = load(out / row["runs"][0]["folder"] / "last.safetensors")
    except UserError:
        return []
    cfg, size = image_config(model), input_size(model)
    image = eval_transform(variant.setting.recipe, size, cfg.get("mean"), cfg.get("std"))(picture)
    return [dataclasses.asdict(look) for look in looks(model, image)]


def _thumbnail(picture: Image.Image | None) -> str | None:
    if picture is None:
        return None
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side)).resize(
        (_THUMBNAIL, _THUMBNAIL), Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    square.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
