"""Look at a model's attention in the browser: drop a picture, click a patch, choose layer, head, attention and
keep-rate, and see which keys two models see sharply, their maps beside full attention's, what they answer, and the
milliseconds and MACs that takes. The page is served on this machine alone and asks nothing of the network.

examples:
  attendless explore --weights deit.safetensors
  attendless explore --model deit_tiny_patch16_224 --weights deit.safetensors --image dog.jpg
  attendless explore --model vit_small_patch16_384 --pretrained --attention foveal:keep=0.05 window:size=6
"""

from __future__ import annotations

import argparse
import sys
import threading

from . import arguments, output

MODEL, ATTENTIONS = "deit_tiny_patch16_224", ("foveal:keep=0.1", "sparsifiner:keep=0.25,rest=pooled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", default=MODEL, help=f"{arguments.MODEL} (default: {MODEL})")
    arguments.weights(parser)
    text = "the two attentions to begin with, and others to offer (default: {} and {})".format(*ATTENTIONS)
    parser.add_argument("--attention", metavar="A", nargs="+", default=[], help=text)
    arguments.predictor(parser)
    arguments.size(parser, many=False)
    arguments.crop_pct(parser)
    parser.add_argument("--image", metavar="F", help="the picture to begin with (default: one that Matplotlib brings)")
    text = "address to serve at (default: 127.0.0.1, this machine alone)"
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help=text)
    parser.add_argument("--port", metavar="N", type=_port, default=7860, help="port to serve at (default: 7860)")
    arguments.threads(parser)
    arguments.json(parser)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a port from 1 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.attention import named
    from attendless.convert import open_model
    from attendless.convert.source import random_weights
    from attendless.data.source import load_image
    from attendless.measure.accuracy import preprocessing
    from attendless.sizes import input_size, model_name, size_text
    from attendless_lab.explore import page
    from attendless_lab.explore.picture import first_picture, prepare
    from attendless_lab.explore.sides import Explorer

    if args.threads:
        torch.set_num_threads(args.threads)
    for spec in args.attention:  # mistakes are said before any work is done
        named(spec)
    page.check_place(args.host, args.port)
    picture = first_picture() if args.image is None else load_image(args.image)
    given = {"weights": args.weights, "pretrained": args.pretrained}
    model = open_model(args.model, **given, size=args.size)
    size = args.size or input_size(model)
    transform = preprocessing(model, size, args.crop_pct)
    explorer = Explorer(model, args.predictor)
    note = f"**{model_name(model)}** at {size_text(size)} px. Click a patch in any picture, or use the arrow keys."
    if random_weights(args.model, **given):
        note += " Its weights are random: this is what it looks at before it has learned anything (`--weights`)."
        print("random weights: give --weights or --pretrained to see what a trained model looks at", file=sys.stderr)
    shown = list(dict.fromkeys([*args.attention, *ATTENTIONS]))
    with page.own_folder():
        built = page.build(explorer, transform, prepare(picture, transform), shown, note)
        with page.serving(built, args.host, args.port) as address:
            if args.host not in ("127.0.0.1", "localhost", "::1"):
                print("anyone who can reach this address can use it", file=sys.stderr)
            about = {"model": args.model, "attention": shown, "size": list(size)}
            output.write_json(args.json, {"rows": [{**about, "address": address}]})
            print(f"{address}  (Ctrl-C ends it)", flush=True)
            threading.Event().wait()
