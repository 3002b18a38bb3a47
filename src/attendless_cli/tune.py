"""Search, without training and without labels, what each layer should attend with: the fewest milliseconds for which
the answers stay what they were. A few hundred images of the kind the model will see are enough.

examples:
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --size 384 --max-drop 0.5
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --target-ms 20 --plot curve.png
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import output, words

if TYPE_CHECKING:
    from attendless.measure.tune import Tuned


def arguments(parser: argparse.ArgumentParser) -> None:
    words.model(parser)
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of images; labels are not used")
    parser.add_argument(
        "--attention", metavar="A", default="foveal", help="a mechanism with a keep option (default: foveal)"
    )
    parser.add_argument("--rates", metavar="R", type=float, nargs="+", help="keep rates to choose from")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument(
        "--max-drop", metavar="P", type=float, help="points of top-1 it may be expected to lose (default: 0.5)"
    )
    bound.add_argument("--target-ms", metavar="T", type=float, help="milliseconds an image may take, instead")
    words.size(parser, many=False)
    words.crop_pct(parser)
    parser.add_argument("--images", metavar="N", type=words.positive, default=256, help="images to use (default: 256)")
    parser.add_argument(
        "--plot", metavar="F", type=words.target("picture"), help="draw the trade-off found into this file"
    )
    parser.add_argument(
        "--out", metavar="F", type=words.target("model"), help="save the converted model to this .safetensors file"
    )
    words.threads(parser)
    words.json(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.convert import open_model, save
    from attendless.data.opening import open_data
    from attendless.measure import tune as tuning
    from attendless.measure.accuracy import load_images, preprocessing
    from attendless.sizes import input_size

    if args.threads:
        torch.set_num_threads(args.threads)
    model = open_model(args.model, weights=args.weights, pretrained=args.pretrained, size=args.size)
    transform = preprocessing(model, args.size or input_size(model), args.crop_pct)
    images = load_images(open_data(args.data, "val"), transform, args.images)
    rates = tuple(args.rates or tuning.RATES)
    total = tuning.steps(tuning.layers_of(model), len(images), rates=len(rates))
    with output.progress("tuning", total) as step:
        tuned = tuning.tune(
            model,
            images,
            attention=args.attention,
            rates=rates,
            max_drop=args.max_drop,
            target_ms=args.target_ms,
            progress=step,
        )
    columns = ("attention", "layers", "ms", "speed-up", "agreement", "expected loss", "core MACs")
    table = [_cells(setting, setting == tuned.chosen) for setting in tuned.front]
    output.print_table(f"{args.model} · {len(images)} images of {args.data}", columns, table, note=NOTE)
    print(f"\nchosen ({tuned.reason}):\n  {_words(tuned)}")
    if args.plot:
        from attendless.show.tradeoff import draw

        draw(tuned, args.plot)
        print(f"drawn: {args.plot}")
    if args.out:
        save(tuned.convert(model), args.out)
        print(f"saved: {args.out}")
    rows = [{**setting.as_dict(), "chosen": setting == tuned.chosen} for setting in tuned.front]
    output.write_json(
        args.json, {"rows": rows, "attention": tuned.attention, "layers": list(tuned.layers), "reason": tuned.reason}
    )


NOTE = (
    "speed-up: median of paired ratios against the dense model, batch 1. agreement: share of images with its answer.\n"
    "expected loss: points of top-1, taking the dense model's probabilities at their word; no labels were used."
)


def _words(tuned: Tuned) -> str:
    """What to give `convert`."""
    if not tuned.layers:
        return f"nothing: the model as it is, {tuned.attention}"
    return f"--attention {tuned.attention} --layers {','.join(map(str, tuned.layers))} --below-breakeven keep"


def _cells(setting: object, chosen: bool) -> tuple[str, ...]:
    s = vars(setting)
    return (
        ("→ " if chosen else "  ") + s["attention"],
        ",".join(map(str, s["layers"])) or "none",
        f"{s['latency_ms']:.2f}",
        f"{s['speedup']:.2f}× ± {s['spread'] / 2:.2f}",
        f"{s['agreement']:.3f}",
        f"{s['expected_drop']:.2f}",
        output.percent(s["core_share"]),
    )
