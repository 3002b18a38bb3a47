"""Replace the attention of a pretrained model, without training, and write it to one file that stores its model,
attention and preprocessing. The report states for each layer what was done, why, and its maximum speed-up.

examples:
  attendless convert deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.1 --size 384 --out fast.safetensors
  attendless convert deit_small_patch16_224 --pretrained --attention 4xfull/8xfoveal:keep=0.1 --out fast.safetensors
  attendless convert vit_base_patch16_siglip_224 --attention foveal:keep=0.1 --layers 2: --below-breakeven keep
  attendless convert deit_tiny_patch16_224 --weights deit.safetensors --tokens tome:r=8 --out fast.safetensors
  attendless convert deit_tiny_patch16_224 --weights deit.safetensors --attention lavit:vanilla=8 --fit photos --out fast.safetensors
  attendless convert fast.safetensors --attention full --tokens none --out original.safetensors
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from . import arguments, output

if TYPE_CHECKING:
    from torch import Tensor


#: How many images `--data` and `--fit` use.
IMAGES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    arguments.readout(parser)
    arguments.size(parser, many=False)
    arguments.layers(parser, "convert", "all")
    arguments.below_breakeven(parser)
    text = f"fit lavit attention to the original's scores on {IMAGES} images of this folder (default: not fitted)"
    parser.add_argument("--fit", metavar="DIR", help=text)
    parser.add_argument("--check", action="store_true", help="compare the outputs of both models on noise or on --data")
    text = f"compare the outputs on {IMAGES} images of this folder; implies --check (default: noise)"
    parser.add_argument("--data", metavar="DIR", help=text)
    text = "file to write the model to, .safetensors (default: not written)"
    parser.add_argument("--out", metavar="F", type=arguments.target("model"), help=text)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.convert import convert_with_report, open_model, save
    from attendless.convert.source import random_weights
    from attendless.errors import UserError

    if args.attention is None and args.tokens is None and args.readout is None:
        raise UserError(
            "nothing to convert to: give --attention, such as foveal:keep=0.1, --tokens, such as tome:r=8, or both"
        )
    model = open_model(args.model, weights=args.weights, pretrained=args.pretrained, size=args.size)
    converted, report = convert_with_report(
        model,
        args.attention,
        tokens=args.tokens,
        layers=args.layers,
        below_breakeven=args.below_breakeven,
        predictor=args.predictor,
        readout=args.readout,
        fit=_images(model, args.fit) if args.fit else None,
        check=_images(model, args.data) if args.check or args.data else None,
    )
    random = random_weights(args.model, weights=args.weights, pretrained=args.pretrained)
    compared = report.difference and dataclasses.replace(report.difference, noise=not args.data)
    report = dataclasses.replace(report, random_weights=random, difference=compared)
    print(report.text(output.width()))
    if args.out:
        save(converted, args.out, report=report)
        print(f"\nwrote {args.out}")
        print("\n".join(["next:", *(f"  {command}" for command in _next(args, random))]))
    found = report.as_dict()
    rows = found.pop("layers")
    output.write_json(args.json, {**found, "weights": args.weights, "out": args.out, "rows": rows})


def _images(model: Any, data: str | None) -> Tensor:
    """The inputs of both models: preprocessed images, or noise."""
    import torch

    from attendless.data import open_data
    from attendless.measure.accuracy import load_images, preprocessing
    from attendless.sizes import channels, input_size

    size = input_size(model)
    if data:
        return load_images(open_data(data, labels=False), preprocessing(model, size), IMAGES)
    return torch.randn(4, channels(model), *size, generator=torch.Generator().manual_seed(0))


def _next(args: argparse.Namespace, random: bool) -> list[str]:
    """The commands to run next on the file; random weights are not worth an evaluation."""
    import shlex

    plugins = "".join(f" --plugin {shlex.quote(name)}" for name in (*args.plugin, *args.plugin_of_command))
    bench, evaluate = (f"attendless {command} {shlex.quote(args.out)}{plugins}" for command in ("bench", "eval"))
    return [bench] if random else [bench, f"{evaluate} --data {shlex.quote(args.data or 'DIR')}"]
