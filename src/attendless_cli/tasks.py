"""Detection and segmentation in the commands that serve every task: the task of a model, `eval` and `predict`."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import output
from .targets import FOREIGN


def task_of(model: str, asked: str | None = None) -> str:
    """The task of a saved file, or the one given; the two must not differ."""
    from attendless.convert.files import read_header
    from attendless.errors import UserError

    own = None
    if os.path.isfile(model):
        try:
            own = (read_header(model).get("task") or {}).get("name")
        except UserError:  # opening the file reports it better
            own = None
    if own is not None and asked not in (None, own):
        raise UserError(f"--task {asked}: {model!r} holds a model for {own}")
    return own or asked or "classification"


def open_file(args: argparse.Namespace) -> Any:
    """The detector or segmentor in a file that `train` wrote."""
    from attendless.convert.files import load
    from attendless.errors import UserError

    if not os.path.isfile(args.model):
        raise UserError(f"--task {args.task}: expected a file that `attendless train --task` wrote, not {args.model!r}")
    model = load(args.model)
    if not hasattr(model, "task"):
        raise UserError(
            f"--task {args.task}: {args.model!r} holds a classifier; expected a file that `attendless train --task "
            f"{args.task}` wrote. Leave out --task to classify with this one"
        )
    return model


def evaluate(args: argparse.Namespace) -> int:
    """`eval` of a detector or segmentor."""
    from attendless.dense.evaluating import evaluate as measure
    from attendless.dense.evaluating import judged
    from attendless.dense.training import with_attention
    from attendless.errors import UserError

    for flag in ("no_labels", "crop_pct", "predictor", "weights", "pretrained"):
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')} is for classification")
    model = open_file(args)
    source = judged(model, args.data, args.images)
    rows = []
    for attention in args.attention or [None]:
        for tokens in args.tokens or [None]:
            made = with_attention(model, attention, tokens)
            with output.progress("images", len(source)) as step:
                rows.append(
                    {"model": args.model}
                    | measure(
                        made,
                        source,
                        size=None if args.size is None else min(args.size),
                        batch=args.batch or 4,
                        workers=args.workers,
                        several_scales=args.several_scales,
                        progress=step,
                    )
                )
    names = (
        ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        if model.task == "detection"
        else ("miou", "pixels_right")
    )
    title = f"{args.model} · {model.head_text} · {rows[0]['size']} px · {rows[0]['images']} images of {args.data}"
    cells = [(_made(row), *(_number(row[name]) for name in names), *_costs(row)) for row in rows]
    note = (
        "All in percent, as COCO measures it."
        if model.task == "detection"
        else "miou: mean over classes of intersection over union, in percent."
    )
    columns = ("attention", *(name.replace("_", " ") for name in names), "core MACs", "all MACs", "images/s")
    output.print_table(title, columns, cells, note=note)
    skipped = rows[0]["skipped"]
    if skipped:
        print(f"{skipped} images could not be read", file=sys.stderr)
    output.write_json(args.json, {"rows": rows})
    return 1 if skipped else 0


def predict(args: argparse.Namespace, images: Sequence[str]) -> int:
    """`predict` of a detector or segmentor: write each image with boxes or a mask drawn on to the folder --out."""
    from PIL.PngImagePlugin import PngInfo

    from attendless.data.source import BadImage, load_image
    from attendless.dense.draw import draw
    from attendless.dense.draw import predict as find
    from attendless.errors import UserError
    from attendless.ownership import picture_mark
    from attendless.storage import atomic

    if not args.out:
        raise UserError("--out DIR is needed: the folder for the images with boxes or masks drawn on")
    given = (
        "weights",
        "pretrained",
        "attention",
        "tokens",
        "predictor",
        "size",
        "crop_pct",
        "runtime",
        "features",
        "ray",
    )
    for flag in given:
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')} is for classification: other tasks run as they were saved")
    targets = _drawings(images, args.out, args.force)
    model = open_file(args)
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    mark = PngInfo()
    for key, value in picture_mark(".png").items():
        mark.add_text(key, value)
    for name, target in targets.items():
        try:
            image = load_image(name)
        except BadImage as error:
            bad.append(str(error))
            continue
        found = find(model, image, score=args.score or 0.5)
        with atomic(target) as temporary:
            draw(image, found).save(temporary, format="png", pnginfo=mark)
        rows.append({"model": args.model, "image": name, "picture": str(target), **found.as_dict()})
        print(f"{name} → {target}: {_said(found)}")
    for reason in bad[:5]:
        print(f"skipped: {reason}", file=sys.stderr)
    output.write_json(args.json, {"rows": rows})
    return 1 if bad else 0


def _drawings(images: Sequence[str], out: str, force: bool) -> dict[str, Path]:
    """The file for the drawing of each image; raises `UserError` if a file exists that attendless did not write."""
    from attendless.errors import UserError
    from attendless.ownership import is_ours

    drawn: Counter[str] = Counter()
    found = {}
    for name in images:
        stem = Path(name).stem
        drawn[stem] += 1  # images of the same name in other folders get a number
        found[name] = target = Path(out) / (f"{stem}.png" if drawn[stem] == 1 else f"{stem}-{drawn[stem]}.png")
        if target.exists() and not force and not is_ours(target, ".png"):
            raise UserError(f"--out {out!r}: holds {target.name!r}, a file {FOREIGN}")
    return found


def _said(found: Any) -> str:
    if found.boxes is None:
        return ", ".join(f"{found.names[i]}: {100 * share:.0f} %" for i, share in found.shares()[:5])
    names = [found.names[label] for label in found.labels.tolist()]
    return ", ".join(f"{name}: {names.count(name)}" for name in dict.fromkeys(names)) or "nothing"


def _made(row: dict[str, Any]) -> str:
    return " + ".join(filter(None, (row["attention"], row["tokens_spec"]))) or "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _costs(row: dict[str, Any]) -> tuple[str, str, str]:
    speed = row["throughput"]
    return output.millions(row["macs"]["core"]), output.millions(row["macs"]["total"]), _number(speed)
