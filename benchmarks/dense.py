"""Detection and segmentation with efficient attention in the backbone: quality, latency and peak memory.

    python benchmarks/dense.py WEIGHTS --out DIR [--pets PETS] [--coco COCO] [--stage S …] [--threads T]

WEIGHTS is a file with DeiT-Tiny's weights, PETS a folder of segmentation masks (the Oxford-IIIT Pet trimaps), COCO a
folder of images with instances.json. Stages and their output:

    learn      train Semantic FPN on DeiT-Tiny, one run per attention, the same recipe for all (needs PETS)  DIR/pets/
    overfit    train RetinaNet until it overfits 16 images of COCO (needs COCO)                              DIR/coco/
    time       interleaved benchmark of feature extractors against the one with full attention         DIR/times.json
    memory     peak memory of each feature extractor, measured in a separate process                  DIR/memory.json
    report     tables in Markdown, from the results available so far                                    DIR/tables.md

An interrupted stage resumes when the same command is run again.
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
#: Attentions of the backbones trained for segmentation, and changes to the recipe `small_segmentation`.
TRAINED = ("full", "foveal:keep=0.25", "window:size=8,bias=false", "sparsifiner:keep=0.25,rest=pooled")
FIELDS: dict[str, Any] = {"epochs": 2, "eval_every": 2}
#: Backbone, image sizes, and attentions; the first attention is the baseline of the others.
FOVEAL, WINDOW, SPARSIFINER = "foveal:keep=0.1", "window:size=8,bias=false", "sparsifiner:keep=0.25,rest=pooled"
PYRAMID, REDUCED = "pyramid_pvt_v2_b0", "reduced:ratio=8/reduced:ratio=4/reduced/full"
TIMED: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    (MODEL, (512, 768, 1024), ("full", FOVEAL, "foveal:keep=0.25", WINDOW, SPARSIFINER)),
    (PYRAMID, (512, 768), ("full", REDUCED, WINDOW, FOVEAL, SPARSIFINER)),
    # No full attention at this size: the first stage has 65,536 tokens, and one image would take most of a minute.
    (PYRAMID, (1024,), (REDUCED, WINDOW, FOVEAL)),
)
#: How many images of COCO the detector overfits, and the smallest width and height of their boxes in pixels.
IMAGES, SMALLEST = 16, 80
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
    parser.add_argument("--only", nargs="+", help="run only these attentions or image sizes")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of timing per model")
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
    for attention in (spec for spec in TRAINED if chosen(args, spec)):
        out = args.out / "pets" / folder(attention)
        whole(train(
            MODEL, args.pets, task="segmentation", head=HEAD, attention=attention, weights=args.weights, out=out,
            run=Run(workers=0, log_every=10), **FIELDS,
        ))  # fmt: skip


def overfit(args: argparse.Namespace) -> None:
    data = args.out / "coco" / "data"
    few_images(args.coco, data)
    whole(train(
        MODEL, data, task="detection", head="retinanet:channels=64", weights=args.weights,
        out=args.out / "coco" / "run", run=Run(workers=0, log_every=10), **OVERFIT,
    ))  # fmt: skip


def few_images(coco: Path, data: Path) -> None:
    """Make a folder whose training set and validation set are the same few images."""
    content = json.loads((coco / "instances.json").read_text())
    sides: dict[int, list[float]] = {image["id"]: [] for image in content["images"]}
    for one in content["annotations"]:
        sides[one["image_id"]].append(min(one["bbox"][2:]))
    images = [image for image in content["images"] if min(sides[image["id"]], default=0) >= SMALLEST][:IMAGES]
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
    trained = [line for spec in TRAINED if (line := pets_line(args.out / "pets" / folder(spec), spec))]
    if trained:
        text.append(
            table(["attention", "mIoU", "IoU of pet, background, border", "pixel accuracy", "images/s"], trained)
        )
    found = [row for row in read_rows(args.out / "coco" / "run" / "metrics.jsonl") if "ap50" in row]
    if found:
        lines = [[str(row["epoch"]), f"{row['loss']:.3f}", f"{row['ap50']:.1f}", f"{row['ap']:.1f}"] for row in found]
        text.append(table(["epoch", "loss", "AP50", "AP"], lines))
    for model, sizes, specs in TIMED if times or peaks else ():
        lines = [timed_line(times, peaks, f"{model} {size}", spec, specs) for size in sizes for spec in specs]
        text.append(f"**{model}**\n\n" + table(["px", "attention", "ms", "speed-up", "peak memory"], lines))
    stamps = [rows["stamp"] for rows in (times, peaks) if rows]
    text += [stamp_line(stamps[0])] if stamps else []
    with atomic(args.out / "tables.md") as temporary:
        temporary.write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))


def timed_line(times: Rows, peaks: Rows, where: str, spec: str, specs: tuple[str, ...]) -> list[str]:
    """One line of the table: size, attention, latency, speed-up over the first attention, peak memory."""
    name, another = f"{where} {spec}", f"{where} {specs[-1]}"
    timing = ["–", "–"]
    if name in times:
        timing = [f"{times[name]['ms']:,.0f}", speed(times[name])]
    elif spec == specs[0] and another in times:
        timing = [f"{times[another]['dense_ms']:,.0f}", ""]
    peak = f"{peaks[name]['peak']:,.0f} MB" if name in peaks else "–"
    return [where.split(" ")[-1], f"`{spec}`", *timing, peak]


def pets_line(run: Path, spec: str) -> list[str] | None:
    found = [row for row in read_rows(run / "metrics.jsonl") if "miou" in row]
    if not found:
        return None
    row = found[-1]
    each = ", ".join(f"{value:.1f}" for value in row["iou"])
    return [f"`{spec}`", f"{row['miou']:.1f}", each, f"{row['pixels_right']:.1f}", f"{row['images_per_second']:.1f}"]


if __name__ == "__main__":
    main()
