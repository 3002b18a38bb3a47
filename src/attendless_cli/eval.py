"""Measure accuracy on a folder of images: top-1 and top-5 with their uncertainty, and agreement with the dense model.
Several attentions are measured in one pass; the dense model's answers are shared, so differences are paired, image by
image. Folders are named by class, by class index, or as ImageNet names them; without labels only agreement is measured.

examples:
  attendless eval deit_tiny_patch16_224 --weights deit.safetensors --data imagenet/val --attention foveal:keep=0.1
  attendless eval fast.safetensors --data photos/ --size 384 --crop-pct 1.0
"""

from __future__ import annotations

import argparse
import sys

from . import output, words


def arguments(parser: argparse.ArgumentParser) -> None:
    words.model(parser)
    words.attention(parser)
    words.predictor(parser)
    words.size(parser, many=False)
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of images")
    words.crop_pct(parser)
    parser.add_argument("--below-breakeven", choices=("full", "keep"), default="full", help=words.BREAKEVEN)
    parser.add_argument("--batch", metavar="B", type=words.positive, default=32, help="images at a time (default: 32)")
    parser.add_argument("--limit", metavar="N", type=words.positive, help="use N images spread over the folder")
    parser.add_argument("--workers", metavar="W", type=int, default=1, help="processes that decode images (default: 1)")
    words.threads(parser)
    words.json(parser)


def run(args: argparse.Namespace) -> int:
    import torch
    from torch import nn

    from attendless.convert import convert, open_model
    from attendless.data.opening import open_data
    from attendless.measure.accuracy import evaluate, preprocessing
    from attendless.measure.macs import count
    from attendless.sizes import input_size

    if args.threads:
        torch.set_num_threads(args.threads)
    source = open_data(args.data, "val")
    model = open_model(args.model, weights=args.weights, pretrained=args.pretrained, size=args.size)
    own = getattr(model, "attention", "full")
    dense = model if own == "full" else convert(model, "full")
    ready = {"full": dense, own: model}

    def made(text: str) -> nn.Module:
        return convert(dense, text, below_breakeven=args.below_breakeven, predictor=args.predictor)

    models = {text: ready[text] if text in ready else made(text) for text in args.attention or [own]}
    size = args.size or input_size(dense)
    skipped: list[str] = []
    with output.progress("images", min(args.limit or len(source), len(source))) as step:
        found = evaluate(
            dense,
            models,
            source,
            preprocessing(dense, size, args.crop_pct),
            limit=args.limit,
            batch=args.batch,
            workers=args.workers,
            progress=step,
            on_skip=skipped.append,
        )
    rows = [
        {"model": args.model, "attention": text, "size": list(size), "macs": count(models[text], size).as_dict()}
        | vars(accuracy)
        for text, accuracy in found.items()
    ]
    columns = ("attention", "top-1", "95 %", "top-5", "vs dense", "95 %", "agreement", "core MACs", "images/s")
    images = rows[0]["images"]
    title = f"{args.model} · {size[0]}x{size[1]} px · {images} images of {args.data}"
    output.print_table(title, columns, [_cells(row) for row in rows], note=NOTE)
    for reason in skipped[:5]:
        print(f"skipped: {reason}", file=sys.stderr)
    if skipped:
        print(f"{len(skipped)} of {len(source)} images could not be read", file=sys.stderr)
    output.write_json(args.json, {"rows": rows})
    return 1 if skipped else 0


NOTE = (
    "vs dense: points of top-1 against the dense model on the same images. agreement: share of images with the dense "
    "model's answer.\nimages/s counts the model alone; compare speeds with `attendless bench`, which takes turns."
)


def _cells(row: dict) -> tuple[str, ...]:
    def interval(pair: tuple[float, float] | None, form: str) -> str:
        return "–" if pair is None else f"{pair[0]:{form}} to {pair[1]:{form}}"

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else f"{value:{form}}"

    return (
        row["attention"],
        number(row["top1"], ".2f"),
        interval(row["top1_ci"], ".1f"),
        number(row["top5"], ".2f"),
        number(row["difference"], "+.2f"),
        interval(row["difference_ci"], "+.2f"),
        f"{row['agreement']:.3f}",
        output.millions(row["macs"]["core"]),
        f"{row['throughput']:.1f}",
    )
