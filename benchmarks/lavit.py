"""LaViT's less attention in a pretrained DeiT-Tiny: similarity of layers, accuracy, latency, and an ablation.

    python benchmarks/lavit.py WEIGHTS DISTIL EVAL --out DIR [--small DATA] [--more FOLDER:TIMES …] [--stage S …]

WEIGHTS is a file with DeiT-Tiny's weights. DISTIL is a folder of images for fitting and distillation; its labels are
not used. EVAL is a folder of labelled images for evaluation. DATA (for `ablate`) is a folder of class folders to train
a small model on. `--more` adds folders of images for distillation. TIMES repeats or thins a folder: 3 uses each image
three times, 0.5 uses every second image. DISTIL also accepts `:TIMES`. Stages and their output:

    saturation  similarity of the scores of neighbouring layers                          DIR/saturation.json
    fit         accuracy with 4, 6 and 8 vanilla layers, without training                DIR/rows.json
    distil      the same after a short distillation                                      DIR/distil-…/, DIR/rows.json
    time        interleaved benchmark of each variant against the original model         DIR/times.json
    ablate      train a small LaViT without each of its parts, three seeds             DIR/ablate-…/, DIR/ablation.json
    report      tables in Markdown, from the results available so far                    DIR/tables.md

An interrupted stage resumes when the same command is run again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from study import gathered, whole

import attendless
from attendless.backbones import Pyramid
from attendless.convert import convert, load, open_model
from attendless.data.opening import open_data
from attendless.measure.accuracy import evaluate, load_images, preprocessing
from attendless.measure.macs import count
from attendless.randomness import WEIGHTS, randomness
from attendless.stamp import stamp, stamp_line
from attendless.storage import atomic
from attendless.train import Run, distill, train

MODEL = "deit_tiny_patch16_224"
VANILLA = (8, 6, 4)
#: Options of `lavit` by variant: scores copied unchanged from the layer before, or transformed by a fitted map: of the
#: heads alone, of low rank (the default), or the dense maps of the LaViT poster.
MAPS = {"copied": "map=none", "heads": "map=none", "default": "", "dense": "map=dense"}
#: Distillation settings by number of vanilla layers. With 8, distillation takes longest and requires many images.
#: `lesson` freezes the layers that are more than two before the first less-attention layer: training them on so few
#: images lowers accuracy, and the backward pass can stop there.
LESSON = "lr=3e-4,batch=32,cutmix=1.0,precision=bf16"
LESSONS = {
    8: f"epochs=7,loss.tokens=0.5,mixup=0.8,crop_scale=0.25/1.0,{LESSON}",
    6: f"epochs=4,loss.tokens=0.2,{LESSON}",
    4: f"epochs=4,loss.tokens=0.2,{LESSON}",
}
FITTED_TO = 32
#: Changes to the arguments of `small`, by row of the ablation; `dp` is part of the less-attention spec.
ABLATION: dict[str, dict[str, Any]] = {
    "LaViT": {},
    "w/o LA": {"less": None, "carry": "none"},
    "w/o AR": {"carry": "none"},
    "w/o L_DP": {"dp": "dp=0"},
    "a tenth of L_DP": {"dp": "dp=0.1"},
    "L_DP as printed": {"dp": "dp=1,dp_sign=poster"},
}
SEEDS = (0, 1, 2)
RECIPE = {"epochs": 3, "batch": 32, "lr": 1e-3, "warmup": 1.0, "size": (64,), "clip": 1.0, "precision": "bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("distil")
    parser.add_argument("eval")
    parser.add_argument("--small", help="folder of class folders, for the ablation")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--more", nargs="+", default=[], help="FOLDER:TIMES: more images for distillation")
    stages = {
        "saturation": saturation,
        "fit": fitted,
        "distil": distilled,
        "time": interleave,
        "ablate": ablate,
        "report": report,
    }
    parser.add_argument("--stage", nargs="+", choices=stages, default=list(stages))
    parser.add_argument("--only", default="", help="run only the rows whose name matches this regular expression")
    parser.add_argument("--images", type=int, help="evaluate on this many evenly spaced images of EVAL (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stage:
        stages[stage](args)


# Similarity of neighbouring layers -----------------------------------------------------------------------------------


@torch.no_grad()
def saturation(args: argparse.Namespace) -> None:
    """Similarity of each layer to the layer before, averaged over images.

    Measured are the correlation of the scores, with rows centred, of the same head (`same`) and of the most similar
    head (`best`), and the cosine similarity of the attention maps averaged over heads (`map`)."""
    if (args.out / "saturation.json").is_file():
        return
    model = convert(open_model(MODEL, weights=args.weights), "full").eval()
    images = load_images(open_data(args.eval, "val"), preprocessing(model, (224, 224)), 64)
    rows: list[dict[str, list[float]]] = [{"same": [], "best": [], "map": []} for _ in model.blocks[1:]]
    for some in images.split(8):
        before = None
        *steps, _ = model.walk(*model.embed(some))
        for block, step in zip(model.blocks, steps, strict=True):
            q, k, _ = block.attn.project(block.norm1(step.x))
            scores = block.attn.scale * q @ k.mT
            if before is not None:
                a, b = (flat(s - s.mean(-1, keepdim=True)) for s in (before, scores))
                similarity = (b @ a.mT).mean(0)
                maps = [s.softmax(-1).mean(1) for s in (before, scores)]
                row = rows[step.number - 1]
                row["same"].append(float(similarity.diagonal().mean()))
                row["best"].append(float(similarity.amax(1).mean()))
                row["map"].append(float(torch.cosine_similarity(*maps, dim=-1).mean()))
            before = scores
    found = [{name: fmean(values) for name, values in row.items()} for row in rows]
    write(args.out / "saturation.json", {"rows": found, "images": len(images), "stamp": stamp()})


def flat(scores: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(scores.flatten(2), dim=-1)


# Fitted and distilled ------------------------------------------------------------------------------------------------


def spec(vanilla: int, maps: str) -> str:
    return f"lavit:vanilla={vanilla}" + (f",{MAPS[maps]}" if MAPS[maps] else "")


def fitted(args: argparse.Namespace) -> None:
    original = open_model(MODEL, weights=args.weights)
    images = load_images(
        open_data(args.distil.partition(":")[0], labels=False), preprocessing(original, (224, 224)), FITTED_TO
    )
    for vanilla in VANILLA:
        names = {f"{maps} {vanilla}": maps for maps in MAPS}
        fits = {name: None if maps == "copied" else images for name, maps in names.items()}
        judge(args, original, {n: partial(build, original, spec(vanilla, maps), fits[n]) for n, maps in names.items()})


def build(original: Any, text: str, images: Any) -> Any:
    return convert(original, text, below_breakeven="keep", fit=images).eval()


def distilled(args: argparse.Namespace) -> None:
    original = open_model(MODEL, weights=args.weights)
    for vanilla in VANILLA:
        name = f"distilled {vanilla}"
        if name not in read(args.out / "rows.json") and re.search(args.only, name):
            whole(distill(
                MODEL, images_of(args), attention=spec(vanilla, "default"), weights=args.weights, eval_every=100,
                out=student(args, vanilla).parent, run=Run(workers=0, log_every=20),
                change={"new": "epochs=0", "all": lesson(vanilla)},
            ))  # fmt: skip
        judge(args, original, {name: partial(load, student(args, vanilla))})


def images_of(args: argparse.Namespace) -> str:
    return gathered(args.out / "pictures", args.distil, args.more)


def lesson(vanilla: int) -> str:
    trained = [*(f"blocks.{i}.*" for i in range(vanilla - 2, 12)), "norm.*", "head.*"]
    return f"{LESSONS[vanilla]},trained={'/'.join(trained)}"


def student(args: argparse.Namespace, vanilla: int) -> Path:
    return Path(args.out, f"distil-{vanilla}", "last.safetensors")


def judge(args: argparse.Namespace, original: Any, make: dict[str, Callable[[], Any]]) -> None:
    """Evaluate models against the original model; skip models that already have a result."""
    found = read(args.out / "rows.json")
    models = {name: made() for name, made in make.items() if name not in found and re.search(args.only, name)}
    if not models:
        return
    source, transform = open_data(args.eval, "val"), preprocessing(original, (224, 224))
    for name, accuracy in evaluate(original, models, source, transform, limit=args.images, workers=0).items():
        found[name] = vars(accuracy) | {"total": count(models[name]).total, "attention": models[name].attention}
        print(f"{name}: {accuracy.top1:.1f}", flush=True)
    write(args.out / "rows.json", found | {"stamp": stamp()})


def interleave(args: argparse.Namespace) -> None:
    found = read(args.out / "times.json")
    original = open_model(MODEL, weights=args.weights)
    for vanilla in VANILLA:
        for maps in ("heads", "default", "dense"):
            name = f"{maps} {vanilla}"
            if name in found or not re.search(args.only, name):
                continue
            row = attendless.bench(
                build(original, spec(vanilla, maps), None), like=original, threads=args.threads, budget=6.0,
                memory=False, throughput=False, parts=False,
            )  # fmt: skip
            found[name] = {"speedup": row.speedup, "quartiles": list(row.compared.quartiles), "ms": row.latency_ms}
            write(args.out / "times.json", found | {"stamp": stamp()})
            print(name, row.verdict, flush=True)


# Ablation ------------------------------------------------------------------------------------------------------------


def small(
    classes: int, less: str | None = "lavit:map=dense,mix=false", carry: str = "grid", dp: str = "dp=1"
) -> Pyramid:
    """A LaViT with a million parameters for images of 64 px; its stages have 16², 8², 4² and 2² tokens."""
    third, fourth = (f"{less},{dp},ratio=2", f"{less},{dp}") if less else ("reduced", "full")
    return Pyramid(
        f"reduced:ratio=8/reduced:ratio=4/reduced/reduced/{third}/{third}/full/{fourth}",
        img_size=64, num_classes=classes, embed_dims=(16, 32, 80, 128), depths=(1, 1, 4, 2), num_heads=(1, 2, 5, 8),
        mlp_ratios=(8, 8, 4, 4), embedding="overlap", positions="none", mlp="conv", stage_norms=True, carry=carry,
    )  # fmt: skip


def ablate(args: argparse.Namespace) -> None:
    if not args.small:
        print("ablate: needs --small DATA, a folder of class folders")
        return
    classes = len(open_data(args.small, "train").classes)
    found = read(args.out / "ablation.json")
    for seed in SEEDS:
        for name, changes in ABLATION.items():
            run = f"{name} {seed}"
            if run in found or not re.search(args.only, run):
                continue
            with randomness(WEIGHTS, seed):
                model = small(classes, **changes)
            folder = args.out / f"ablate-{re.sub('[^a-zA-Z]+', '-', name)}-{seed}"
            quietly = Run(workers=0, log_every=50)
            result = whole(train(model, args.small, out=folder, run=quietly, seed=seed, **RECIPE))
            found[run] = {"top1": result.metrics["top1"], "total": count(model).total}
            write(args.out / "ablation.json", found | {"stamp": stamp()})
            print(f"{run}: {result.metrics['top1']:.1f}", flush=True)


# The tables ----------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> None:
    parts = [saturated(args), judged(args), ablated(args)]
    text = "\n\n".join(filter(None, parts)) + "\n"
    with atomic(args.out / "tables.md") as temporary:
        temporary.write_text(text)
    print(text)


def saturated(args: argparse.Namespace) -> str:
    found = read(args.out / "saturation.json")
    if not found:
        return ""
    lines = [
        "### Saturation",
        "| layers | same head | most similar head | maps averaged over heads |",
        "|---" * 4 + "|",
    ]
    for number, row in enumerate(found["rows"]):
        lines.append(f"| {number} → {number + 1} | {row['same']:.2f} | {row['best']:.2f} | {row['map']:.2f} |")
    return "\n".join([*lines, "", f"{found['images']} images; {stamp_line(found['stamp'])}"])


def judged(args: argparse.Namespace) -> str:
    rows, times = read(args.out / "rows.json"), read(args.out / "times.json")
    if not rows:
        return ""
    lines = [
        "### Accuracy without training and after distillation",
        "| | vanilla layers | top-1 % | accuracy change (95 %) | top-1 agreement | MACs | speed-up |",
        "|---" * 7 + "|",
    ]
    for vanilla in VANILLA:
        for how in (*MAPS, "distilled"):
            row, time = rows.get(f"{how} {vanilla}"), times.get(f"{how} {vanilla}")
            time = time or times.get(f"{ {'copied': 'heads', 'distilled': 'default'}.get(how) } {vanilla}")
            if row:
                low, high = row["difference_ci"]
                speed = f"{time['speedup']:.2f}×" if time else "–"
                lines.append(
                    f"| {how} | {vanilla} | {row['top1']:.1f} | {row['difference']:+.1f} ({low:+.1f} to {high:+.1f}) | "
                    f"{row['agreement']:.3f} | {row['total'] / 1e6:,.0f} M | {speed} |"
                )
    return "\n".join([*lines, "", stamp_line(rows["stamp"])])


def ablated(args: argparse.Namespace) -> str:
    found = read(args.out / "ablation.json")
    if not found:
        return ""
    lines = ["### Ablation", "| | top-1 of each seed | mean ± s.d. | MACs |", "|---" * 4 + "|"]
    for name in ABLATION:
        runs = [found[f"{name} {seed}"] for seed in SEEDS if f"{name} {seed}" in found]
        if runs:
            scores = [run["top1"] for run in runs]
            spread = f"{fmean(scores):.1f} ± {stdev(scores) if len(scores) > 1 else 0:.1f}"
            each = ", ".join(f"{score:.1f}" for score in scores)
            lines.append(f"| {name} | {each} | {spread} | {runs[0]['total'] / 1e6:.1f} M |")
    return "\n".join([*lines, "", stamp_line(found["stamp"])])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def write(path: Path, value: dict[str, Any]) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
