"""Comparison of token reducers at equal latency: accuracy, and agreement and divergence from the original model.

    python benchmarks/token_methods.py WEIGHTS EVAL DISTIL [--out FILE] [--batch B] [--stage S …]

WEIGHTS is a file with DeiT-Tiny's weights. EVAL is a folder of labelled images for evaluation. DISTIL is a folder of
other images, from which `solve` estimates sensitivities; its labels are not used. Nothing is trained. Each stage
resumes if it was interrupted:

    solve      compute schedules of the reducer `rank` from the sensitivities of the layers
    match      for every other method, find the settings with the latency of each solved schedule
    evaluate   accuracy of every row on EVAL
    time       interleaved benchmark of every row against timm's model, at batch 1 and B
    quote      write the table of docs/results/tokens.md from FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quoting import quote
from study import MODEL, Rows, against, speed, speedups, table

from attendless.convert import convert, open_model
from attendless.data.labels import match_labels
from attendless.data.opening import open_data
from attendless.measure.accuracy import load_images, paired_difference, preprocessing
from attendless.measure.macs import count
from attendless.optimize.judge import divergence, logits
from attendless.optimize.resume_log import ResumeLog
from attendless.optimize.schedule_solver import within
from attendless.optimize.schedules import Trials, one_each, schedules, space_of, time_model
from attendless.optimize.search import Search
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
#: Speed-ups at the larger batch for which schedules are solved.
TARGETS = (1.5, 1.75, 2.0)
#: DiffRate's learned token counts for DeiT-Tiny, as the tokens that `rank` removes in each layer.
DIFFRATE = {
    "0.9": "0/1/2/6/16/25/18/14/8/4/7/0",
    "0.8": "0/1/6/18/18/29/18/11/12/6/8/0",
    "0.7": "0/1/4/34/25/30/15/16/8/6/9/0",
    "0.6": "0/10/20/28/25/24/14/10/9/12/8/0",
}
#: The other methods: a spec with one free number, and the range of that number.
METHODS = {
    "rank, constant": ("rank:r={:.0f},start=1", (6, 26)),
    "tome": ("tome:r={:.0f}", (6, 26)),
    "tome, protected": ("tome:r={:.0f},start=1,protect=0.1", (6, 26)),
    "pitome": ("pitome:r={:.0f},start=1", (6, 26)),
    "atc": ("atc:r={:.0f},start=1", (6, 26)),
    "soft": ("soft:r={:.0f},start=1", (6, 26)),
    "zerotprune": ("zerotprune:r={:.0f},start=1", (6, 26)),
    "evit": ("evit:keep={:.2f}", (0.8, 0.3)),
}
#: Number of settings of a method that `match` times.
_PROBES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("eval")
    parser.add_argument("distil")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "token-methods.json")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=192, help="images of DISTIL for the solver")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of timing per model")
    parser.add_argument("--log", type=Path, default=Path("build/token-methods"), help="folder of measurements")
    stages = {"solve": solve, "match": match, "evaluate": evaluate, "time": time, "quote": put}
    parser.add_argument("--stage", nargs="+", choices=stages, default=[*stages])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for stage in args.stage:
        stages[stage](args, Rows(args.out))


def solve(args: argparse.Namespace, rows: Rows) -> None:
    if "solved" in rows:
        return
    dense = original(args)
    images = load_images(open_data(args.distil, labels=False), preprocessing(dense, (224, 224)), args.images)
    search = Search(images=images, batch=args.batch, budget=10.0, log=ResumeLog(args.log, "deit-tiny-rank"))
    backbone = convert(dense, "full").eval()
    with torch.inference_mode():
        found = schedules(backbone, "rank", search, max_drop=8.0)
        trials = Trials(backbone, one_each("rank", 12), space_of("rank"), search, time_model(backbone, "rank", search))
        times, measured = trials.layer_times(), [one for one in found if one.predicted and 0.003 < one.divergence < 0.1]
        damage = trials.damage_model().fitted([one.removed for one in measured], [one.divergence for one in measured])
        # A little faster than the target, because the patch embedding and the head are not predicted.
        removed = {t: within(damage, times, found[0].ms / (1.02 * t)) for t in TARGETS}
    picked = {f"rank, solved for {t:g}×": trials.removing(removed[t]).tokens for t in TARGETS}
    off = [abs(one.predicted / one.divergence - 1) for one in measured]
    accuracy = {"schedules": len(off), "median": float(np.median(off)), "worst": float(max(off))}
    front = [{"tokens": one.tokens, "ms": one.ms, "kl": one.divergence, "predicted": one.predicted} for one in found]
    rows.keep({"solved": picked, "prediction error": accuracy, "front": front})
    print(picked, accuracy, flush=True)


def original(args: argparse.Namespace) -> Any:
    return open_model(MODEL, weights=args.weights).eval()


def reduced(dense: Any, tokens: str) -> Any:
    return convert(dense, tokens=tokens, below_breakeven="keep").eval()


def match(args: argparse.Namespace, rows: Rows) -> None:
    """Find settings with the latency of the solved schedules: time a few settings and interpolate between them."""
    dense, found = original(args), dict(rows.get("matched", {}))
    for method, (spec, (low, high)) in METHODS.items():
        if method in found:
            continue
        values = np.linspace(low, high, _PROBES)
        models = {spec.format(value): reduced(dense, spec.format(value)) for value in values}
        models |= {name: reduced(dense, tokens) for name, tokens in rows["solved"].items()}
        timed = speedups(dense, models, 224, min(args.batch, 8), 2.5)
        took = [1 / timed[spec.format(value)]["speedup"] for value in values]  # falls as more tokens go
        found[method] = {
            name: spec.format(np.interp(-1 / timed[name]["speedup"], [-t for t in took], values))
            for name in rows["solved"]
        }
        rows.keep({"matched": found})
        print(method, found[method], flush=True)


def all_rows(rows: Rows | dict[str, Any]) -> dict[str, str]:
    """The name of every row, by its spec. A method that never gets as fast as a solved schedule has fewer rows."""
    names = {tokens: name for name, tokens in rows["solved"].items()}
    names |= {f"rank:r={counts}": f"rank, DiffRate's counts {share}" for share, counts in DIFFRATE.items()}
    for method, found in rows["matched"].items():
        names |= dict.fromkeys(found.values(), method)
    return names


@torch.inference_mode()
def evaluate(args: argparse.Namespace, rows: Rows) -> None:
    found = dict(rows.get("evaluated", {}))
    todo = [tokens for tokens in all_rows(rows) if tokens not in found]
    if not todo:
        return
    dense, source = original(args), open_data(args.eval, "val")
    prepare, classes = preprocessing(dense, (224, 224)), match_labels(source.classes, dense).classes
    pairs = [source[i] for i in range(len(source))]
    x, labels = torch.stack([prepare(image) for image, _ in pairs]), torch.tensor([classes[c] for _, c in pairs])
    belief = logits(dense, x, "timm")
    right = belief.argmax(1) == labels
    for tokens in todo:
        model = reduced(dense, tokens)
        given = logits(model, x, tokens)
        ours = given.argmax(1) == labels
        change, interval = paired_difference(ours.tolist(), right.tolist())
        found[tokens] = {
            "images": len(x),
            "top1": 100 * float(ours.float().mean()),
            "difference": 100 * change,
            "difference_ci": [100 * end for end in interval],
            "agreement": float((given.argmax(1) == belief.argmax(1)).float().mean()),
            "kl": divergence(belief, given),
            "macs": count(model, 224).total,
        }
        rows.keep({"evaluated": found, "baseline top-1": 100 * float(right.float().mean())})
        print(tokens, found[tokens], flush=True)


def time(args: argparse.Namespace, rows: Rows) -> None:
    dense, found = original(args), dict(rows.get("timed", {}))
    specs = list(all_rows(rows))
    for batch in (args.batch, 1):
        todo = [tokens for tokens in specs if f"{batch} {tokens}" not in found]
        for some in (todo[i : i + 8] for i in range(0, len(todo), 8)):
            timed = speedups(dense, {tokens: reduced(dense, tokens) for tokens in some}, 224, batch, args.budget)
            found |= {f"{batch} {tokens}": row for tokens, row in timed.items()}
            rows.keep({"timed": found, "batch": args.batch})
            print(*(f"{batch} {tokens}: {speed(row)}" for tokens, row in timed.items()), sep="\n", flush=True)


def block(found: dict[str, Any]) -> str:
    """The table, by speed-up at the larger batch."""
    batch, lines, names = found["batch"], [], all_rows(found)
    for tokens in sorted(names, key=lambda tokens: found["timed"][f"{batch} {tokens}"]["speedup"]):
        row, timed = found["evaluated"][tokens], [found["timed"][f"{b} {tokens}"] for b in (batch, 1)]
        lines.append(
            [
                f"**{names[tokens]}**" if "solved" in names[tokens] else names[tokens],
                f"`{tokens}`",
                *map(speed, timed),
                f"{row['macs'] / 1e6:,.0f} M",
                against(row),
                f"{100 * row['agreement']:.1f} %",
                f"{row['kl']:.4f}",
            ]
        )
    columns = [
        "method", "tokens", f"batch {batch}", "batch 1", "MACs", "top-1 change (95 %)", "agreement", "KL",
    ]  # fmt: skip
    images = next(iter(found["evaluated"].values()))["images"]
    about = f"DeiT-Tiny, 224 px, fp32, eager, one thread, {images:,} images, baseline {found['baseline top-1']:.1f} %."
    off = found["prediction error"]
    error = (
        f"Predicted and measured divergence of the {off['schedules']} solved schedules between 0.003 and 0.1 differ by "
        f"{100 * off['median']:.0f} % in the median and {100 * off['worst']:.0f} % at most."
    )
    return f"{table(columns, lines)}\n\n{about} {error} {stamp_line(found['stamp'])}"


def put(args: argparse.Namespace, rows: Rows) -> None:
    quote(ROOT / "docs" / "results" / "tokens.md", "token-methods", block(rows))


if __name__ == "__main__":
    main()
