"""Draw what a model looks at in a picture. The maps are computed anew from what enters each layer, by whichever kernel
runs, so they are those the model used.

examples:
  attendless show dog.jpg --model deit_tiny_patch16_224 --weights deit.safetensors --out dog.png
  attendless show dog.jpg --model deit_tiny_patch16_224 --attention foveal:keep=0.1 --figure foveal --out dog.pdf
  attendless show dog.jpg --model deit_tiny_patch16_224 --tokens tome:r=13 --figure tokens --layer 0 4 8 --out dog.svg
"""

from __future__ import annotations

import argparse
import sys

from . import arguments, output

#: The figures of `attendless.show.gallery`, which importing would cost seconds of.
FIGURES = {
    "maps": "what a patch looks at, layer by layer and head by head",
    "rollout": "where the answer comes from, through all layers",
    "tokens": "the tokens that pruning and merging leave",
    "foveal": "the picture as a patch sees it, sharp and blurred",
    "sparsifiner-1": "fixed patterns beside the keys this model chooses",
    "sparsifiner-3": "keys seen closely, the map, and full attention's",
    "sparsifiner-5": "full, low-rank and sparse maps",
    "sparsifiner-6": "the predictor's basis",
    "sparsifiner-7": "the predictor's coefficients",
    "bbvit-1": "BigBird's parts",
    "lavit-saturation": "how alike layers look, and diagonality",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="IMAGE", help="a picture")
    parser.add_argument("--model", metavar="MODEL", required=True, help=arguments.MODEL)
    arguments.weights(parser)
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    arguments.size(parser, many=False)
    arguments.crop_pct(parser)
    listed = "; ".join(f"{name}: {line}" for name, line in FIGURES.items())
    parser.add_argument("--figure", metavar="NAME", choices=FIGURES, default="maps", help=f"what to draw ({listed})")
    parser.add_argument("--query", metavar="X,Y", type=_pixel, help="pixel of the picture whose patch looks (middle)")
    layers = "layers to show, from 0, or backwards from -1 (default: four, from the first to the last)"
    parser.add_argument("--layer", metavar="L", nargs="+", type=int, help=layers)
    parser.add_argument("--head", metavar="H", nargs="+", type=arguments.count, help="heads to show (default: all)")
    text = "where to draw it: .png, .pdf or .svg"
    parser.add_argument("--out", metavar="F", required=True, type=arguments.target("picture"), help=text)
    arguments.threads(parser)
    arguments.json(parser)


def _pixel(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected X,Y in pixels, such as 310,150") from None
    return x, y


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.convert import open_model
    from attendless.convert.source import random_weights
    from attendless.data.source import load_image
    from attendless.show.figures import new_figure, save_figure
    from attendless.show.gallery import FIGURES as DRAW
    from attendless.show.scene import scene
    from attendless.sizes import input_size

    if args.threads:
        torch.set_num_threads(args.threads)
    new_figure()  # says so if there is nothing to draw with, before any work is done
    picture = load_image(args.image)
    given = {"weights": args.weights, "pretrained": args.pretrained}
    more = {"attention": args.attention, "tokens": args.tokens, "predictor": args.predictor, "size": args.size}
    model = open_model(args.model, **given, **more, below_breakeven="keep")
    chosen = {"query": args.query, "layers": args.layer, "heads": args.head}
    seen = scene(model, picture, size=args.size or input_size(model), crop_pct=args.crop_pct, **chosen)
    save_figure(DRAW[args.figure](seen), args.out)
    if random_weights(args.model, **given):
        print("random weights: this is what the model looks at before it has learned anything", file=sys.stderr)
    layers = ", ".join(map(str, seen.layers))
    print(f"{args.figure} of {seen.name}, layers {layers}, into {args.out}")
    about = {"image": args.image, "model": args.model, "figure": args.figure, "attention": seen.attention_text}
    row = {**about, "tokens_spec": seen.tokens_text or None, "layers": list(seen.layers), "out": str(args.out)}
    output.write_json(args.json, {"rows": [{**row, "query": list(seen.query), "size": list(seen.image.shape[-2:])}]})
