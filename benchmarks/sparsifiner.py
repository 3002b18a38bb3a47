"""Accuracy and latency of Sparsifiner in a pretrained DeiT-Tiny: untrained, with a trained predictor, fine-tuned.

    python benchmarks/sparsifiner.py WEIGHTS DISTIL EVAL --out DIR [--stage S …] [--threads T]

WEIGHTS is a file with DeiT-Tiny's weights. DISTIL is a folder of images for distillation; its labels are not used. EVAL
is a folder of labelled images for evaluation. The option `rest` of an attention says what happens to the keys that are
not selected. Stages and their output:

    learn      distil the predictor alone, from the teacher's logits and last tokens,    DIR/learn/predictor.safetensors
               one predictor per value of `rest`                                  DIR/learn-pooled/predictor.safetensors
    tune       fine-tune all weights by distillation, at some keep rates                 DIR/tuned/, DIR/joint/, …
    evaluate   accuracy of every row of the tables                                       DIR/rows.json
    confirm    accuracy of some rows on images that were not used to choose settings     DIR/fresh.json
    time       interleaved benchmark of each attention against the original model        DIR/times.json
    report     tables in Markdown and a figure, from the results available so far        DIR/tables.md, DIR/pareto.png

An interrupted stage resumes when the same command is run again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study import whole

import attendless
from attendless import Grid
from attendless.attention.averages import budget
from attendless.attention.selection import HasPredictor
from attendless.convert import convert, load, open_model
from attendless.data.opening import open_data
from attendless.measure.accuracy import evaluate, load_images, preprocessing
from attendless.measure.macs import count
from attendless.stamp import stamp, stamp_line
from attendless.storage import atomic
from attendless.train import Run, distill

#: DeiT-Tiny's token grid at 224 px.
GRID = Grid(14, 14, 1)

MODEL = "deit_tiny_patch16_224"
#: The keep rates of the paper's table 2, and 0.25, which its other tables use.
KEEPS = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.25", "0.2", "0.1", "0.05", "0.01")
RESTS = ("dropped", "pooled")
#: Linformer with as many multiply-accumulates as `sparsifiner:keep=0.25`.
LINFORMER = "linformer:keys=44"
LEARN = "epochs=2,lr=1e-3,batch=16"
TUNE = "lr=1e-4,batch=32,loss.tokens=0.2,epochs="
#: Settings were chosen on these numbers of evenly spaced evaluation images; `confirm` excludes them all.
CHOSEN_BY = (64, 96, 128, 192)


def spec(keep: str, rest: str, name: str = "sparsifiner") -> str:
    return f"{name}:keep={keep}" + (f",rest={rest}" if rest != "dropped" else "")


def rest_of(text: str) -> str:
    return "pooled" if "rest=pooled" in text else "dropped"


def fine_tuned() -> dict[tuple[str, str], str]:
    """Epochs and further settings of each fine-tuning run, by kind of run and attention.

    `tuned`: the new parameters are trained alone first. `plain` and `shorter`: the same without cutmix. `joint`: all
    weights are trained together from the start. `frozen`: the trained predictor is not changed."""
    return {
        ("tuned", spec("0.25", "dropped")): "3",
        ("tuned", spec("0.25", "pooled")): "1",  # pooled keys: a smaller drop before training
        ("tuned", spec("0.1", "dropped")): "5,cutmix=1.0",
        ("tuned", spec("0.1", "pooled")): "1",
        ("joint", spec("0.1", "pooled")): "1",
        ("plain", spec("0.1", "dropped")): "5",
        ("shorter", spec("0.1", "dropped")): "3",
        ("frozen", spec("0.1", "dropped")): "3,trained=old",
        ("tuned", LINFORMER): "3",
    }


def wanted() -> Iterator[tuple[str, str, int]]:
    """Every row of the tables: kind of training, attention, image size."""
    for rest in RESTS:
        for keep in KEEPS:
            for name, how in (("topk", "oracle"), ("sparsifiner", "untrained"), ("sparsifiner", "predictor")):
                yield how, spec(keep, rest, name), 224
    for how, attention in fine_tuned():
        yield how, attention, 224
    for keep in ("0.5", "0.25", "0.1"):
        for rest in RESTS:
            yield "predictor", spec(keep, rest), 384
    for size in (224, 384):
        for keep in ("0.25", "0.1"):
            for rest in RESTS:
                yield "predictor", few(spec(keep, rest)), size


def few(text: str) -> str:
    """The spec with only the 8 largest coefficients of the predictor, which is faster."""
    return f"{text},top=8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("distil")
    parser.add_argument("eval")
    parser.add_argument("--out", type=Path, required=True)
    stages = {
        "learn": learn, "tune": tune, "evaluate": measure, "confirm": confirm, "time": interleave, "report": report,
    }  # fmt: skip
    parser.add_argument("--stage", nargs="+", choices=stages, default=list(stages))
    parser.add_argument("--only", default="", help="run only the rows whose name matches this regular expression")
    parser.add_argument("--at-once", type=int, default=6, help="number of models evaluated in one pass over the images")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stage:
        stages[stage](args)


def learn(args: argparse.Namespace) -> None:
    """Train one predictor per value of `rest`: which keys to select depends on what happens to the others."""
    for rest in RESTS:
        if re.search(args.only, rest):
            whole(distill(
                MODEL, args.distil, attention=spec("0.1", rest), weights=args.weights,
                out=predictor_file(args, rest).parent,
                change={"new": LEARN, "all": "epochs=0"}, eval_every=100, run=Run(workers=0, log_every=20),
            ))  # fmt: skip


def tune(args: argparse.Namespace) -> None:
    for (how, text), epochs in fine_tuned().items():
        if re.search(args.only, f"{how} {text}"):
            predictor = None if how == "joint" or text == LINFORMER else predictor_file(args, rest_of(text))
            alone = LEARN if text == LINFORMER else "epochs=0"
            whole(distill(
                MODEL, args.distil, attention=text, weights=args.weights, predictor=predictor, eval_every=100,
                out=student(args, how, text).parent, run=Run(workers=0, log_every=20),
                change={"new": alone, "all": TUNE + epochs},
            ))  # fmt: skip


def predictor_file(args: argparse.Namespace, rest: str) -> Path:
    folder = "learn" if rest == "dropped" else f"learn-{rest}"
    return args.out / folder / "predictor.safetensors"


def measure(args: argparse.Namespace) -> None:
    judge(args, wanted(), open_data(args.eval, "val"), args.out / "rows.json")


def confirm(args: argparse.Namespace) -> None:
    source = open_data(args.eval, "val")
    seen = {i * len(source) // count for count in CHOSEN_BY for i in range(count)}
    some = [row for row in wanted() if row[2] == 224 and re.search(r"=0\.(25|1)\b|linformer", row[1])]
    judge(args, some, source.subset(sorted(set(range(len(source))) - seen)), args.out / "fresh.json")


def judge(args: argparse.Namespace, rows: Iterable[tuple[str, str, int]], source: Any, path: Path) -> None:
    found = read(path)
    made = fine_tuned().keys()
    todo = [row for row in rows if key(*row) not in found and re.search(args.only, key(*row))]
    for size in sorted({size for _, _, size in todo}):
        original = open_model(MODEL, weights=args.weights, attention="full", size=size)
        rows = [row for row in todo if row[2] == size and (row[:2] not in made or student(args, *row[:2]).is_file())]
        transform = preprocessing(original, (size, size), None if size == 224 else 1.0)
        few = load_images(source, transform, 16)
        for some in (rows[i : i + args.at_once] for i in range(0, len(rows), args.at_once)):
            models = {key(*row): build(args, original, *row) for row in some} | {key("dense", "full", size): original}
            for name, accuracy in evaluate(original, models, source, transform, workers=0).items():
                macs = count(models[name], size)
                found[name] = vars(accuracy) | {"core": macs.core, "total": macs.total, **sparsity(models[name], few)}
            found["stamp"] = stamp()
            write(path, found)
            print(", ".join(f"{name} {found[name]['top1']:.1f}" for name in models), flush=True)


def key(how: str, attention: str, size: int) -> str:
    return f"{how} {attention} {size}"


def student(args: argparse.Namespace, how: str, text: str) -> Path:
    return Path(args.out, how, re.sub("[:,=]", "-", text), "last.safetensors")


def build(args: argparse.Namespace, original: Any, how: str, attention: str, size: int) -> Any:
    if (how, attention) in fine_tuned():
        return load(student(args, how, attention))
    predictor = predictor_file(args, rest_of(attention)) if how == "predictor" else None
    return convert(original, attention, below_breakeven="keep", predictor=predictor).eval()


@torch.no_grad()
def sparsity(model: Any, images: torch.Tensor) -> dict[str, float]:
    """Fraction of the predictors' coefficients above 0.05, and of nonzero entries in their sparse bases."""
    coefficients, basis = [], []
    *entered, _ = model.walk(*model.embed(images))
    for block, (_, x, context) in zip(model.blocks, entered, strict=True):
        if isinstance(block.attn, HasPredictor):
            q, k, _ = block.attn.project(block.norm1(x))
            coefficients.append((block.attn.coefficients(q, k, context.grid) > 0.05).float().mean().item())
            basis.append((block.attn.sparse_basis(context.grid) > 0).float().mean().item())
    return {"coefficients": fmean(coefficients), "basis": fmean(basis)} if basis else {}


def interleave(args: argparse.Namespace) -> None:
    found = read(args.out / "times.json")
    for how, attention, size in wanted():
        name = key(how, attention, size)
        timed = how == "predictor" or attention == LINFORMER
        if not timed or name in found or not re.search(args.only, name):
            continue
        original = open_model(MODEL, weights=args.weights, size=size)
        row = attendless.bench(
            build(args, original, how, attention, size), like=original, threads=args.threads, budget=6.0,
            memory=False, throughput=False, parts=False,
        )  # fmt: skip
        found[name] = {"speedup": row.speedup, "quartiles": list(row.compared.quartiles), "ms": row.latency_ms}
        found["stamp"] = stamp()
        write(args.out / "times.json", found)
        print(name, row.verdict, flush=True)


def report(args: argparse.Namespace) -> None:
    rows, times = read(args.out / "rows.json"), read(args.out / "times.json")
    fresh = read(args.out / "fresh.json")
    text = "\n\n".join(
        [
            *(table_2(rows, times, rest) for rest in RESTS),
            "### Fine-tuning of all weights\n"
            + listing(rows, times, lambda how, text, size: (how, text) in fine_tuned(), "predictor"),
            "### 384 px\n" + listing(rows, times, lambda how, text, size: size == 384 and "top" not in text),
            "### Few coefficients (`top=8`)\n" + listing(rows, times, lambda how, text, size: "top=" in text),
            "### Images that influenced no choice\n" + listing(fresh, {}, lambda how, text, size: "top=" not in text),
        ]
    )
    text += f"\n\n{stamp_line(rows['stamp'])}\n"
    with atomic(args.out / "tables.md") as temporary:
        temporary.write_text(text)
    print(text)
    draw(rows, args.out / "pareto.png")


def table_2(rows: dict[str, Any], times: dict[str, Any], rest: str) -> str:
    lines = [
        f"### {rest.capitalize()} keys",
        "| keep | keys | oracle | untrained | trained predictor | accuracy change (95 %) | top-1 agreement | core MACs "
        "| speed-up |",
        "|---" * 9 + "|",
    ]
    for keep in KEEPS:
        text = spec(keep, rest)
        row, time = (found.get(key("predictor", text, 224)) for found in (rows, times))
        others = (rows.get(key("oracle", spec(keep, rest, "topk"), 224)), rows.get(key("untrained", text, 224)))
        exact, untrained = (f"{one['top1']:.1f}" if one else "–" for one in others)
        if row is not None:
            keys = budget(float(keep), GRID)
            lines.append(
                f"| {keep} | {keys} | {exact} | {untrained} | {row['top1']:.1f} | {against(row)} | "
                f"{row['agreement']:.3f} | {row['core'] / 1e6:.0f} M | {speed(time)} |"
            )
    return "\n".join(lines)


def listing(
    rows: dict[str, Any], times: dict[str, Any], belongs: Callable[[str, str, int], bool], timed_as: str = ""
) -> str:
    """A table of the rows for which `belongs` returns true; latencies may come from the rows of kind `timed_as`."""
    lines = [
        "| | attention | px | top-1 | accuracy change (95 %) | top-1 agreement | core MACs | speed-up |",
        "|---" * 8 + "|",
    ]
    for how, attention, size in [("dense", "full", 224), ("dense", "full", 384), *wanted()]:
        row = rows.get(key(how, attention, size))
        if row is not None and belongs(how, attention, size):
            time = times.get(key(how, attention, size)) or times.get(key(timed_as, attention, size))
            epochs = fine_tuned().get((how, attention), "").split(",")[0]
            title = f"{how}, {epochs} epoch{'s' * (epochs != '1')}" if epochs else how
            lines.append(
                f"| {title} | `{attention}` | {size} | {row['top1']:.1f} | "
                f"{against(row)} | {row['agreement']:.3f} | {row['core'] / 1e6:.0f} M | {speed(time)} |"
            )
    return "\n".join(lines)


def against(row: dict[str, Any]) -> str:
    low, high = row["difference_ci"]
    return f"{signed(row['difference'])} ({signed(low)} to {signed(high)})"


def speed(time: dict[str, Any] | None) -> str:
    return "–" if time is None else f"{time['speedup']:.2f}×"


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def draw(rows: dict[str, Any], path: Path) -> None:
    """Plot accuracy against the multiply-accumulates of the attention core."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = {"oracle": ":", "untrained": "--", "predictor": "-", "tuned": "", "joint": ""}
    titles = {"oracle": "exact selection", "predictor": "trained predictor"}
    colours = {"dropped": "#0072b2", "pooled": "#d55e00"}
    for how, style in styles.items():
        for rest, colour in colours.items():
            names = [
                key(h, a, s)
                for h, a, s in wanted()
                if h == how and s == 224 and ("pooled" in a) == (rest == "pooled") and "top=" not in a
            ]
            points = sorted(
                (rows[n]["core"] / 1e6, rows[n]["top1"]) for n in names if n in rows and "linformer" not in n
            )
            if points:
                marker, size = {"tuned": ("*", 10), "joint": ("P", 8)}.get(how, ("o", 3))
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=size, linestyle=style or "none",
                          color=colour, label=f"{titles.get(how, how)}, rest {rest}")  # fmt: skip
    full = rows[key("dense", "full", 224)]
    axes.plot(full["core"] / 1e6, full["top1"], "ks", label="full attention")
    axes.set(xlabel="multiply-accumulates of the attention core (M)", ylabel="top-1 (%)", ylim=(40, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.suptitle(f"DeiT-Tiny at 224 px, {full['images']} images", fontsize=11)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def write(path: Path, value: dict[str, Any]) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
