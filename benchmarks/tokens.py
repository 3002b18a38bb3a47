"""Token merging and pruning in a pretrained DeiT-Tiny, alone and with efficient attention: accuracy, MACs, latency.

    python benchmarks/tokens.py WEIGHTS EVAL --out DIR [--distil DISTIL] [--more FOLDER:TIMES …] [--stage S …]

WEIGHTS is a file with DeiT-Tiny's weights. EVAL is a folder of labelled images for evaluation. DISTIL is a folder of
images for distillation; its labels are not used. `--more` adds folders of images for distillation. TIMES repeats or
thins a folder: 3 uses each image three times, 0.5 uses every second image. DISTIL also accepts `:TIMES`. Stages and
their output:

    learn      distil some rows from the original model (needs DISTIL)                                    DIR/learned/
    evaluate   accuracy of every row                                                                     DIR/rows.json
    expect     accuracy drop of each row: estimated without labels, as `tune` does, and measured     DIR/expected.json
    features   similarity of the last layer's features, for detection and segmentation               DIR/features.json
    time       interleaved benchmark against the original model, at batch 1 and a larger batch          DIR/times.json
    report     tables in Markdown and a figure, from the results available so far          DIR/tables.md, DIR/tokens.png

An interrupted stage resumes when the same command is run again.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from study import MODEL, Rows, accuracies, against, gathered, speed, speedups, table, whole

from attendless.convert import convert, load, open_model
from attendless.data.labels import match_labels
from attendless.data.opening import open_data
from attendless.measure.accuracy import load_images, preprocessing
from attendless.optimize.judge import logits, losses, temperature
from attendless.palette import COLOURS
from attendless.show.figures import new_figure, save_figure
from attendless.stamp import stamp_line
from attendless.storage import atomic
from attendless.train import Run, distill


def trained_from(layer: int) -> str:
    """The setting of a training phase that freezes all blocks before `layer`."""
    return "trained=" + "/".join([*(f"blocks.{i}.*" for i in range(layer, 12)), "norm.*", "head.*"])


#: By image size: the number of evaluation images (0: latency only), the larger batch, and the rows, each an attention
#: and a token reduction.
FOVEAL, SPARSIFINER = "foveal:keep=0.1", "sparsifiner:keep=0.25,rest=pooled"
STUDY: dict[int, tuple[int, int, list[tuple[str, str]]]] = {
    224: (1000, 32, [
        ("full", "tome:r=14,start=4"), ("full", "tome:r=8"), ("full", "tome:r=8,protect=0.1"),
        ("full", "tome:r=16/8,start=1,protect=0.1"), ("full", "tome:r=15,start=1,protect=0.1"), ("full", "tome:r=13"),
        ("full", "tome:r=13,protect=0.1"), ("full", "tome:r=16,protect=0.1"),
        ("full", "tome:r=0/24/23/22/20/19/17/16/15/0/0/0,protect=0.1"),
        ("full", "tome:r=0/18/22/24/24/24/20/16/12/8/6/4,protect=0.1"),
        ("full", "tome:r=0/0/22/22/22/22/22/22/22/0/0/0,protect=0.2"), ("full", "evit:keep=0.7"),
        (FOVEAL, "none"), (FOVEAL, "tome:r=8,protect=0.1"), (SPARSIFINER, "none"),
        (SPARSIFINER, "tome:r=8,protect=0.1"),
    ]),
    384: (1000, 16, [
        ("full", "tome:r=30,start=1,protect=0.1"), ("full", "tome:r=44,start=1,protect=0.1"), (FOVEAL, "none"),
        (FOVEAL, "tome:r=30,start=1,protect=0.1"), (FOVEAL, "tome:r=44,start=1,protect=0.1"),
        ("full", "tome:r=64/32,start=1,protect=0.1"), (FOVEAL, "tome:r=64/32,start=1,protect=0.1"),
    ]),
    512: (300, 8, [
        ("full", "tome:keep=0.3,start=1,protect=0.1"), ("full", "tome:keep=0.15,start=1,protect=0.1"),
        (FOVEAL, "none"), (FOVEAL, "tome:keep=0.3,start=1,protect=0.1"), (FOVEAL, "tome:keep=0.15,start=1,protect=0.1"),
    ]),
    1024: (0, 1, [
        ("full", "tome:keep=0.3,start=1,protect=0.1"), (FOVEAL, "none"), (FOVEAL, "tome:keep=0.3,start=1,protect=0.1"),
        (FOVEAL, "tome:keep=0.15,start=1,protect=0.1"),
    ]),
}  # fmt: skip
#: Settings of the rows distilled at 224 px. The last two use more images and freeze the layers before the first that
#: merges.
GENTLY = "mixup=0.8,cutmix=1.0,crop_scale=0.25/1.0,precision=bf16"
DISTILLED = {
    "tome:r=16,protect=0.1": "epochs=16,cutmix=1.0,eval_every=4",
    "tome:r=0/24/23/22/20/19/17/16/15/0/0/0,protect=0.1": "epochs=36,cutmix=1.0,precision=bf16,eval_every=12",
    "tome:r=0/18/22/24/24/24/20/16/12/8/6/4,protect=0.1": f"epochs=9,lr=4e-5,{GENTLY},{trained_from(1)}",
    "tome:r=0/0/22/22/22/22/22/22/22/0/0/0,protect=0.2": f"epochs=1,warmup=0.1,lr=5e-5,{GENTLY},{trained_from(2)}",
}
#: Token reductions of the stage `features`, at 384 px.
FEATURES = (
    "tome:r=44", "tome:r=44,start=2", "tome:r=44,start=2,until=10", "tome:r=44,until=10", "tome:keep=0.3",
    "tome:r=24", "tome:r=24,window=4", "tome:r=36,window=4", "tome:r=36,window=4,start=2",
    "tome:r=36,window=4,until=10",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("eval")
    parser.add_argument("--distil", help="folder of images for distillation")
    parser.add_argument("--more", nargs="+", default=[], help="FOLDER:TIMES: more images for distillation")
    parser.add_argument("--out", type=Path, required=True)
    stages = {
        "learn": learn, "evaluate": judge, "expect": expect, "features": features, "time": time, "report": report,
    }  # fmt: skip
    parser.add_argument("--stage", nargs="+", choices=stages, default=[*stages][1:])
    parser.add_argument("--only", default="", help="run only the rows whose name matches this regular expression: ^384")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of timing per model")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stage:
        stages[stage](args)


def learn(args: argparse.Namespace) -> None:
    for tokens, how in DISTILLED.items():
        if not re.search(args.only, f"224 learned {tokens}"):
            continue
        run = Run(workers=0, log_every=20)
        images = gathered(args.out / "pictures", args.distil, args.more)
        whole(distill(MODEL, images, tokens=tokens, weights=args.weights, out=student(args, tokens).parent,
                      change={"all": how}, run=run))  # fmt: skip


def student(args: argparse.Namespace, tokens: str) -> Path:
    return Path(args.out, "learned", re.sub("[:,=/]", "-", tokens), "last.safetensors")


def models(args: argparse.Namespace, size: int, done: Rows, prefix: str = "") -> tuple[Any, dict[str, Any]]:
    """The original model, and the models of the rows of an image size that have no result yet."""
    original = open_model(MODEL, weights=args.weights, size=size)
    found = {}
    for attention, tokens in STUDY[size][2]:
        name = f"{size} {attention} {tokens}"
        if prefix + name not in done and re.search(args.only, name):
            found[name] = convert(original, attention, tokens=tokens, below_breakeven="keep").eval()
    for tokens in DISTILLED if size == 224 else ():
        name = f"{size} learned {tokens}"
        if prefix + name not in done and student(args, tokens).is_file() and re.search(args.only, name):
            found[name] = load(student(args, tokens)).eval()
    return original.eval(), found


def judge(args: argparse.Namespace) -> None:
    rows, source = Rows(args.out / "rows.json"), open_data(args.eval, "val")
    for size, (limit, _, _) in STUDY.items():
        original, found = models(args, size, rows) if limit else (None, {})
        for some in (dict([*found.items()][i : i + 6]) for i in range(0, len(found), 6)):
            rows.keep(accuracies(original, {f"{size} dense": original, **some}, source, size, limit))
            print(", ".join(f"{name}: {rows[name]['top1']:.1f}" for name in some), flush=True)


def time(args: argparse.Namespace) -> None:
    rows = Rows(args.out / "times.json")
    for size, (_, large, _) in STUDY.items():
        for batch in sorted({1, large}):
            prefix = f"batch {batch}, "
            original, found = models(args, size, rows, prefix)
            if found:
                timed = speedups(original, found, size, batch, args.budget)
                rows.keep({prefix + name: row for name, row in timed.items()})
                print(*(f"{prefix}{name}: {speed(row)}" for name, row in timed.items()), sep="\n", flush=True)


def expect(args: argparse.Namespace, size: int = 224) -> None:
    """The accuracy drop of token merging, measured and estimated in two ways on the same images.

    Measured with labels; estimated from the original model's confidence; estimated from its confidence after
    calibration, that is with the temperature at which mean confidence equals accuracy."""
    rows, source = Rows(args.out / "expected.json"), open_data(args.eval, "val")
    original, found = models(args, size, rows)
    found = {name: model for name, model in found.items() if name.startswith(f"{size} full")}
    if not found:
        return
    prepare, classes = preprocessing(original, (size, size)), match_labels(source.classes, original).classes
    pairs = [source[i] for i in range(len(source))]
    x, labels = torch.stack([prepare(image) for image, _ in pairs]), torch.tensor([classes[c] for _, c in pairs])
    belief = logits(original, x, "original")
    right = (belief.argmax(1) == labels).float()
    accuracy = 100 * float(right.mean())
    sharper = temperature(belief, accuracy)
    sure = 100 * float(belief.softmax(1).amax(1).mean())
    rows.keep({"dense": {"accuracy": accuracy, "sure": sure, "temperature": sharper, "images": len(x)}})
    for name, model in found.items():
        predictions = logits(model, x, name).argmax(1)
        lost = 100 * float((right - (predictions == labels).float()).mean())
        expected = [100 * float(losses(belief / by, predictions).mean()) for by in (1.0, sharper)]
        rows.keep({name: {"lost": lost, "expected": expected[0], "as_sure_as_right": expected[1]}})
        print(name, rows[name], flush=True)


def expected_table(rows: Rows) -> str:
    lines = [
        [f"`{name.split(' ')[-1]}`", *(f"{row[which]:.1f}" for which in ("lost", "expected", "as_sure_as_right"))]
        for name, row in rows.items()
        if name not in ("stamp", "dense")
    ]
    return table(["tokens", "measured drop", "expected drop", "expected drop with `--accuracy`"], lines)


@torch.inference_mode()
def features(args: argparse.Namespace, size: int = 384, images: int = 40) -> None:
    """Cosine similarity of the last layer's patches, restored to the grid, to those of the original model."""
    original = open_model(MODEL, weights=args.weights, size=size).eval()
    x = load_images(open_data(args.eval, "val"), preprocessing(original, (size, size), 1.0), images)
    backbone = convert(original, "full").eval()
    before = torch.cat([backbone.forward_context(some)[0] for some in x.split(10)])[:, 1:]
    total = sum(row.macs.total for row in backbone.costs())
    rows = Rows(args.out / "features.json")
    for tokens in FEATURES:
        backbone.set_tokens(tokens)
        after = []
        for some in x.split(10):
            found, context = backbone.forward_context(some)
            after.append(context.grid.restore(found)[:, 1:])
        similarity = torch.cosine_similarity(before, torch.cat(after), dim=-1)
        share = sum(row.macs.total for row in backbone.costs()) / total
        cosine = {"mean": float(similarity.mean()), "worst": float(similarity.flatten().quantile(0.05))}
        rows.keep({tokens: {"images": len(x), "size": size, "macs": share, **cosine}})


def report(args: argparse.Namespace) -> None:
    rows, times = Rows(args.out / "rows.json"), Rows(args.out / "times.json")
    text = []
    for size, (_, large, _) in STUDY.items():
        names = [name for name in rows if name.startswith(f"{size} ")]
        timed = [name for name in times if name.startswith(f"batch 1, {size} ")]
        if names:
            text.append(f"### {size} px, {rows[names[0]]['images']} images\n\n{listing(names, rows, times, large)}")
        elif timed:
            lines = [[*(f"`{word}`" for word in name.split(" ")[3:]), speed(times[name])] for name in timed]
            text.append(f"### {size} px\n\n{table(['attention', 'tokens', 'batch 1'], lines)}")
    expected = Rows(args.out / "expected.json")
    if expected:
        text.append("### Expected and measured accuracy drop\n\n" + expected_table(expected))
    moved = Rows(args.out / "features.json")
    if moved:
        text.append("### Similarity of features\n\n" + feature_table(moved))
    text.append(stamp_line((rows or moved)["stamp"]))
    with atomic(args.out / "tables.md") as temporary:
        temporary.write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))
    draw(rows, times, args.out / "tokens.png")


def listing(names: list[str], rows: Rows, times: Rows, large: int) -> str:
    columns = [
        "attention",
        "tokens",
        "MACs",
        "top-1",
        "accuracy change (95 %)",
        "top-1 agreement",
        "batch 1",
        f"batch {large}",
    ]
    lines = []
    for name in names:
        row, (_, attention, *rest) = rows[name], name.split(" ")
        original = attention == "dense"
        shown = f"`{attention}`" if ":" in attention else attention
        tokens = f"`{rest[0]}`" if rest and rest[0] != "none" else "–"
        timing = (speed(times.get(f"batch {batch}, {name}")) for batch in (1, large))
        changes = ["", "", "", ""] if original else [against(row), f"{100 * row['agreement']:.1f} %", *timing]
        lines.append([shown, tokens, f"{row['total'] / 1e6:,.0f} M", f"{row['top1']:.1f}", *changes])
    return table(columns, lines)


def feature_table(rows: Rows) -> str:
    lines = [
        [f"`{tokens}`", f"{100 * row['macs']:.0f} %", f"{row['mean']:.3f}", f"{row['worst']:.2f}"]
        for tokens, row in rows.items()
        if tokens != "stamp"
    ]
    return table(["tokens", "MACs of the original", "mean cosine", "5th percentile"], lines)


def draw(rows: Rows, times: Rows, path: Path) -> None:
    """Plot accuracy change against speed-up at the larger batch, one panel per image size; the upper right is best."""
    figure = new_figure(11, 4)
    judged = {size: study for size, study in STUDY.items() if study[0]}
    panels = figure.subplots(1, len(judged), sharey=True)
    colours = dict(zip(("full", "foveal", "sparsifiner", "learned"), COLOURS[1:5], strict=True))
    for axes, (size, (_, large, _)) in zip(panels, judged.items(), strict=True):
        for name in (name for name in rows if name.startswith(f"{size} ") and name != f"{size} dense"):
            timed = times.get(f"batch {large}, {name}")
            if timed is None:
                continue
            _, attention, tokens = name.split(" ")
            kind = attention.partition(":")[0]
            low, high = rows[name]["difference_ci"]
            place, row = timed["speedup"], rows[name]["difference"]
            bars = [[row - low], [high - row]]
            marker = "o" if tokens == "none" else "s"
            axes.errorbar(place, row, yerr=bars, fmt=marker, color=colours[kind], elinewidth=0.6, markersize=5)
        axes.plot(1, 0, "k*", markersize=9)
        axes.set(title=f"{size} px", xlabel=f"speed-up over timm, batch {large}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("top-1 change, percentage points (bars: 95 %)")
    names = {"full": "full attention", "foveal": FOVEAL, "sparsifiner": SPARSIFINER, "learned": "full, distilled"}
    for kind, title in names.items():
        panels[0].plot([], [], "s", color=colours[kind], label=title)
    panels[0].plot([], [], "o", color="grey", label="no token reduction")
    panels[0].plot([], [], "s", color="grey", label="merged tokens")
    panels[0].plot([], [], "k*", label="original model")
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
