"""Detection and segmentation on backbones that attend less: quality after the same few epochs, milliseconds and memory.

    python benchmarks/dense.py WEIGHTS --out DIR [--pets PETS] [--coco COCO] [--stage S …] [--threads T]

WEIGHTS are DeiT-Tiny's; PETS a folder of masks (the Oxford-IIIT Pet trimaps), COCO one of pictures and instances.json.
Stages:

    learn      Semantic FPN on DeiT-Tiny, one run for each attention, all by the same recipe (needs PETS)    DIR/pets/
    overfit    RetinaNet learns 16 pictures of COCO by heart                                                  DIR/coco/
    time       feature extractors against the one that attends fully, by turns                          DIR/times.json
    memory     what one of them needs at its peak, each in a process of its own                        DIR/memory.json
    report     the tables in Markdown, from what there is so far                                         DIR/tables.md

Killed and started again, every stage goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from study import MODEL, Rows, speed, speedups, table, whole

from attendless.dense import extractor
from attendless.dense.training import train
from attendless.measure.memory import peak_memory
from attendless.stamp import stamp_line
from attendless.storage import atomic
from attendless.train import Run
from attendless.train.log import read_rows

HEAD = "semantic_fpn:channels=64"
#: What learns to segment pets, and by which fields of the recipe `small_segmentation`.
LEARNED = ("full", "foveal:keep=0.25", "window:size=8,bias=false", "sparsifiner:keep=0.25,rest=pooled")
FIELDS: dict[str, Any] = {"epochs": 2, "eval_every": 2}
#: Backbone, sizes, and what is timed there against the first.
FOVEAL, WINDOW, SPARSIFINER = "foveal:keep=0.1", "window:size=8,bias=false", "sparsifiner:keep=0.25,rest=pooled"
PYRAMID, REDUCED = "pyramid_pvt_v2_b0", "reduced:ratio=8/reduced:ratio=4/reduced/full"
TIMED: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    (MODEL, (512, 768, 1024), ("full", FOVEAL, "foveal:keep=0.25", WINDOW, SPARSIFINER)),
    (PYRAMID, (512, 768), ("full", REDUCED, WINDOW, FOVEAL, SPARSIFINER)),
    # With full attention in its first stage, 65,536 tokens, one image would take the better part of a minute.
    (PYRAMID, (1024,), (REDUCED, WINDOW, FOVEAL)),
)
#: Pictures of COCO whose boxes are all at least so wide and high, in pixels, are learned by heart.
PICTURES, SMALLEST = 16, 80
OVERFIT: dict[str, Any] = {
    "epochs": 90, "batch": 2, "size": (128,), "longest": 192, "lr": 5e-4, "layer_decay": 0.9, "flip": 0.0,
    "warmup": 3.0, "clip": 1.0, "weight_decay": 0.0, "eval_every": 30,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--coco", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    stages = {"learn": learn, "overfit": overfit, "time": time, "memory": memory, "report": report}
    parser.add_argument("--stage", nargs="+", choices=stages, default=list(stages))
    parser.add_argument("--only", nargs="+", help="these attentions, or these sizes, alone")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds that each model is timed for")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stage:
        stages[stage](args)


def chosen(args: argparse.Namespace, name: str) -> bool:
    return args.only is None or name in args.only


def folder(spec: str) -> str:
    return spec.replace(":", "-").replace("=", "").replace(",", "-").replace("/", "-")


def learn(args: argparse.Namespace) -> None:
    for attention in (spec for spec in LEARNED if chosen(args, spec)):
        out = args.out / "pets" / folder(attention)
        whole(train(
            MODEL, args.pets, task="segmentation", head=HEAD, attention=attention, weights=args.weights, out=out,
            run=Run(workers=0, log_every=10), **FIELDS,
        ))  # fmt: skip


def overfit(args: argparse.Namespace) -> None:
    data = args.out / "coco" / "data"
    by_heart(args.coco, data)
    whole(train(
        MODEL, data, task="detection", head="retinanet:channels=64", weights=args.weights,
        out=args.out / "coco" / "run", run=Run(workers=0, log_every=10), **OVERFIT,
    ))  # fmt: skip


def by_heart(coco: Path, data: Path) -> None:
    """A folder whose training and validation pictures are the same few."""
    content = json.loads((coco / "instances.json").read_text())
    sides: dict[int, list[float]] = {image["id"]: [] for image in content["images"]}
    for one in content["annotations"]:
        sides[one["image_id"]].append(min(one["bbox"][2:]))
    images = [image for image in content["images"] if min(sides[image["id"]], default=0) >= SMALLEST][:PICTURES]
    there = {image["id"] for image in images}
    content |= {"images": images, "annotations": [a for a in content["annotations"] if a["image_id"] in there]}
    data.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        (data / f"{split}.json").write_text(json.dumps(content))
    if not (data / "images").exists():
        (data / "images").symlink_to((coco / "images").resolve())


def time(args: argparse.Namespace) -> None:
    rows = Rows(args.out / "times.json")
    for model, sizes, specs in TIMED:
        for size in (size for size in sizes if chosen(args, str(size))):
            left = [spec for spec in specs[1:] if f"{model} {size} {spec}" not in rows]
            if left:
                made = {spec: extractor(model, spec, size, **weights(args, model)) for spec in (specs[0], *left)}
                timed = speedups(made.pop(specs[0]), made, size, 1, args.budget)
                rows.keep({f"{model} {size} {spec}": row for spec, row in timed.items()})
                print(*(f"{model} {size} {spec}: {speed(row)}" for spec, row in timed.items()), sep="\n", flush=True)


def weights(args: argparse.Namespace, model: str) -> dict[str, Any]:
    return {"weights": args.weights} if model == MODEL else {}


def memory(args: argparse.Namespace) -> None:
    rows = Rows(args.out / "memory.json")
    for model, sizes, specs in TIMED:
        for size in (size for size in sizes if chosen(args, str(size))):
            for spec in specs:
                name = f"{model} {size} {spec}"
                if name not in rows:
                    given = {"model": model, "attention": spec, "size": size}
                    found = peak_memory(
                        "attendless.dense.features:extractor", given, size=(size, size), threads=args.threads
                    )
                    rows.keep({name: {"peak": found.peak, "weights": found.weights}})


def report(args: argparse.Namespace) -> None:
    times, peaks = Rows(args.out / "times.json"), Rows(args.out / "memory.json")
    text = []
    learned = [line for spec in LEARNED if (line := pets_line(args.out / "pets" / folder(spec), spec))]
    if learned:
        text.append(table(["attention", "mIoU", "of pet, background, border", "pixels right", "images/s"], learned))
    found = [row for row in read_rows(args.out / "coco" / "run" / "metrics.jsonl") if "ap50" in row]
    if found:
        lines = [[str(row["epoch"]), f"{row['loss']:.3f}", f"{row['ap50']:.1f}", f"{row['ap']:.1f}"] for row in found]
        text.append(table(["epoch", "loss", "AP50", "AP"], lines))
    for model, sizes, specs in TIMED if times or peaks else ():
        lines = [timed_line(times, peaks, f"{model} {size}", spec, specs) for size in sizes for spec in specs]
        text.append(f"**{model}**\n\n" + table(["px", "attention", "ms", "speed-up", "memory"], lines))
    stamps = [rows["stamp"] for rows in (times, peaks) if rows]
    text += [stamp_line(stamps[0])] if stamps else []
    with atomic(args.out / "tables.md") as temporary:
        temporary.write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))


def timed_line(times: Rows, peaks: Rows, where: str, spec: str, specs: tuple[str, ...]) -> list[str]:
    """One attention in a backbone at a size: milliseconds, how much quicker than the first, memory."""
    name, another = f"{where} {spec}", f"{where} {specs[-1]}"
    quick = ["–", "–"]
    if name in times:
        quick = [f"{times[name]['ms']:,.0f}", speed(times[name])]
    elif spec == specs[0] and another in times:
        quick = [f"{times[another]['dense_ms']:,.0f}", ""]
    peak = f"{peaks[name]['peak']:,.0f} MB" if name in peaks else "–"
    return [where.split(" ")[-1], f"`{spec}`", *quick, peak]


def pets_line(run: Path, spec: str) -> list[str] | None:
    found = [row for row in read_rows(run / "metrics.jsonl") if "miou" in row]
    if not found:
        return None
    row = found[-1]
    each = ", ".join(f"{value:.1f}" for value in row["iou"])
    return [f"`{spec}`", f"{row['miou']:.1f}", each, f"{row['pixels_right']:.1f}", f"{row['images_per_second']:.1f}"]


if __name__ == "__main__":
    main()
