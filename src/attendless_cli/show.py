"""Draw attention maps and other figures of a model for one image. The maps are recomputed from the input of each layer,
whichever kernel runs, so they are the maps that the model used.

examples:
  attendless show deit_tiny_patch16_224 dog.jpg --weights deit.safetensors --out dog.png
  attendless show deit_tiny_patch16_224 dog.jpg --attention foveal:keep=0.1 --figure foveal --out dog.pdf
  attendless show deit_tiny_patch16_224 dog.jpg --tokens tome:r=13 --figure tokens --layers 0,4,8 --out dog.svg
"""

from __future__ import annotations

import argparse
import sys

from . import arguments, output

#: The figures of `attendless.show.gallery`, whose import takes seconds.
FIGURES = {
    "maps": "attention of one patch, per layer and head",
    "rollout": "attention rollout through all layers",
    "tokens": "the tokens that remain after pruning and merging",
    "foveal": "the image as one patch sees it, sharp and blurred",
    "sparsifiner-1": "fixed patterns beside the keys that this model selects",
    "sparsifiner-3": "selected keys, the map, and the map of full attention",
    "sparsifiner-5": "full, low-rank and sparse maps",
    "sparsifiner-6": "the predictor's basis",
    "sparsifiner-7": "the predictor's coefficients",
    "bbvit-1": "the parts of BigBird's pattern",
    "lavit-saturation": "similarity of the layers' maps, and their diagonality",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    parser.add_argument("image", metavar="IMAGE", help="an image file")
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    arguments.size(parser, many=False)
    arguments.crop_pct(parser)
    listed = "; ".join(f"{name}: {line}" for name, line in FIGURES.items())
    text = f"figure to draw (choices: {listed})"
    parser.add_argument("--figure", metavar="NAME", choices=FIGURES, default="maps", help=text)
    text = "pixel of the image file whose patch is the query (default: the centre)"
    parser.add_argument("--query", metavar="X,Y", type=_pixel, help=text)
    arguments.layers(parser, "show", "four, from the first to the last")
    text = "heads to show (default: all)"
    parser.add_argument("--heads", metavar="H", nargs="+", type=arguments.count, help=text)
    text = "file to write: .png, .pdf or .svg"
    parser.add_argument("--out", metavar="F", required=True, type=arguments.target("picture"), help=text)
    arguments.threads(parser)
    arguments.json(parser)


def _pixel(text: str) -> tuple[float, float]:
    try:
        x, y = map(arguments.finite, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected X,Y in pixels, such as 310,150") from None
    return x, y


def run(args: argparse.Namespace) -> None:
    from attendless.convert import open_model
    from attendless.convert.source import random_weights
    from attendless.data.source import load_image
    from attendless.show.figures import new_figure, save_figure
    from attendless.show.gallery import FIGURES as DRAW
    from attendless.show.scene import scene
    from attendless.sizes import input_size

    arguments.use_threads(args)
    new_figure()  # raises before any work is done if Matplotlib is missing
    picture = load_image(args.image)
    given = {"weights": args.weights, "pretrained": args.pretrained}
    more = {"attention": args.attention, "tokens": args.tokens, "predictor": args.predictor, "size": args.size}
    model = open_model(args.model, **given, **more, below_breakeven="keep")
    seen = scene(
        model,
        picture,
        size=args.size or input_size(model),
        crop_pct=args.crop_pct,
        query=args.query,
        layers=args.layers,
        heads=args.heads,
    )
    save_figure(DRAW[args.figure](seen), args.out)
    if random_weights(args.model, **given):
        print("random weights: these are the maps of an untrained model", file=sys.stderr)
    layers = ", ".join(map(str, seen.layers))
    print(f"{args.figure} of {seen.name}, layers {layers}, into {args.out}")
    about = {"image": args.image, "model": args.model, "figure": args.figure, "attention": seen.attention_text}
    row = {**about, "tokens_spec": seen.tokens_text or None, "layers": list(seen.layers), "out": str(args.out)}
    output.write_json(args.json, {"rows": [{**row, "query": list(seen.query), "size": list(seen.image.shape[-2:])}]})
