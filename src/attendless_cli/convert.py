"""Put another attention into a pretrained model, without training, and write it as one file that knows its own model,
attention and preprocessing. The report says, layer by layer, what was done, why, and what it can gain.

examples:
  attendless convert deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.1 --size 384 --out fast.safetensors
  attendless convert deit_small_patch16_224 --pretrained --attention 4xfull/8xfoveal:keep=0.1 --out fast.safetensors
  attendless convert vit_base_patch16_siglip_224 --attention foveal:keep=0.1 --layers 2: --below-breakeven keep
  attendless convert fast.safetensors --attention full --out dense.safetensors
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse

from . import output, words


def arguments(parser: argparse.ArgumentParser) -> None:
    words.model(parser)
    words.attention(parser, many=False, required=True)
    words.predictor(parser)
    words.size(parser, many=False)
    parser.add_argument("--layers", metavar="L", help="layers to convert, such as 2: or :4 or 0,3-5 (default: all)")
    parser.add_argument("--below-breakeven", choices=("full", "keep"), default="full", help=words.BREAKEVEN)
    parser.add_argument("--check", action="store_true", help="compare both models' outputs on four images of noise")
    parser.add_argument(
        "--out", metavar="F", type=words.target("model"), help="where to write the model, a .safetensors file"
    )
    words.json(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.convert import convert_with_report, open_model, save
    from attendless.errors import UserError
    from attendless.sizes import channels, input_size

    if args.out and not args.out.endswith(".safetensors"):
        raise UserError(f"--out {args.out!r}: expected a name that ends in .safetensors")
    model = open_model(args.model, weights=args.weights, pretrained=args.pretrained, size=args.size)
    noise = None
    if args.check:
        shape = (4, channels(model), *input_size(model))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    converted, report = convert_with_report(
        model,
        args.attention,
        layers=args.layers,
        below_breakeven=args.below_breakeven,
        predictor=args.predictor,
        check=noise,
    )
    print(report)
    if args.out:
        save(converted, args.out, report=report)
        print(f"\nwrote {args.out}")
    found = report.as_dict()
    rows = found.pop("layers")
    output.write_json(args.json, {**found, "weights": args.weights, "out": args.out, "rows": rows})
