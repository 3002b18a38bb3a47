"""Inspect a model's attention in the browser: drop an image, click a patch, choose layer, head, attention and keep
rate. The page shows which keys two models select, their maps beside those of full attention, their predictions,
latency and MACs. The page is served on this machine alone and uses no network.

examples:
  attendless explore deit_tiny_patch16_224 --weights deit.safetensors
  attendless explore deit_tiny_patch16_224 dog.jpg --weights deit.safetensors
  attendless explore vit_small_patch16_384 --pretrained --attention foveal:keep=0.05 window:size=6
"""

from __future__ import annotations

import argparse
import sys
import threading

from . import arguments, output

#: The attentions shown if none is given.
ATTENTIONS = ("foveal:keep=0.1", "sparsifiner:keep=0.25,rest=pooled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    text = "the first image (default: one that is part of Matplotlib)"
    parser.add_argument("image", metavar="IMAGE", nargs="?", help=text)
    text = "two attentions to show, and others for the menu (default: {} and {})".format(*ATTENTIONS)
    parser.add_argument("--attention", metavar="A", nargs="+", default=[], help=text)
    arguments.predictor(parser)
    arguments.size(parser, many=False)
    arguments.crop_pct(parser)
    arguments.host(parser)
    parser.add_argument("--port", metavar="P", type=_port, default=7860, help="port to listen on")
    arguments.threads(parser)
    arguments.json(parser)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a port from 1 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> None:
    from attendless_lab.explore.folder import own_folder

    with own_folder():
        _explore(args)


def _explore(args: argparse.Namespace) -> None:
    from attendless.attention import named
    from attendless.convert import open_model
    from attendless.convert.source import random_weights
    from attendless.data.source import load_image
    from attendless.measure.accuracy import preprocessing
    from attendless.sizes import input_size, model_name, size_text
    from attendless_lab.explore import page
    from attendless_lab.explore.picture import first_picture, prepare
    from attendless_lab.explore.sides import Explorer

    arguments.use_threads(args)
    for spec in args.attention:  # report mistakes before any work is done
        named(spec)
    page.check_place(args.host, args.port)
    picture = first_picture() if args.image is None else load_image(args.image)
    given = {"weights": args.weights, "pretrained": args.pretrained}
    model = open_model(args.model, **given, size=args.size)
    size = args.size or input_size(model)
    transform = preprocessing(model, size, args.crop_pct)
    explorer = Explorer(model, args.predictor)
    note = f"**{model_name(model)}** at {size_text(size)} px. Click a patch in any image, or use the arrow keys."
    if random_weights(args.model, **given):
        note += " The weights are random: these are the maps of an untrained model (give `--weights`)."
        print("random weights: give --weights or --pretrained to see the maps of a trained model", file=sys.stderr)
    shown = list(dict.fromkeys([*args.attention, *ATTENTIONS]))
    built = page.build(explorer, transform, prepare(picture, transform), shown, note)
    with page.serving(built, args.host, args.port, args.allow_host) as address:
        if args.host not in ("127.0.0.1", "localhost", "::1"):
            print("anyone who can reach this address can use it", file=sys.stderr)
        about = {"model": args.model, "attention": shown, "size": list(size)}
        output.write_json(args.json, {"rows": [{**about, "address": address}]})
        print(f"{address}  (press Ctrl-C to stop)", flush=True)
        threading.Event().wait()
