"""Write a model for another runtime: ONNX (standard operators, runs anywhere; --kernels: with ours, for ONNX Runtime),
OpenVINO (with our kernels, where they can be built) or pt2 (torch.export, with our operators).

The file is compared with the PyTorch model before it is there; one that computes something else is an error, and
nothing is written. Speed is measured against the same model in PyTorch, and against the dense model exported the same
way. What was found is printed, and stored in the file.

A saved file is exported as it is. A model given by its name is converted as `attendless convert` does it.

examples:
  attendless export fast.safetensors --out fast.onnx
  attendless export fast.safetensors --out fast.onnx --kernels
  attendless export fast.safetensors --out fast.xml --dynamic batch
  attendless export fast.safetensors --out fast.xml --int8 --data imagenet/val
  attendless export deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.1 --size 384 --out fast.pt2
  attendless export lavit_tiny --features --out levels.onnx
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import arguments, output

if TYPE_CHECKING:
    from attendless.export import Exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    arguments.readout(parser)
    arguments.size(parser, many=False)
    parser.add_argument("--below-breakeven", choices=("full", "keep"), default="full", help=arguments.BREAKEVEN)
    parser.add_argument(
        "--format", choices=("onnx", "openvino", "pt2"), help="what to write (default: as --out ends says)"
    )
    parser.add_argument(
        "--out", metavar="F", type=arguments.target("export"), required=True,
        help="where to write it: .onnx, .xml (OpenVINO; a .bin goes beside it) or .pt2",
    )  # fmt: skip
    parser.add_argument("--batch", metavar="B", type=arguments.positive, help="images at once (default: 1)")
    parser.add_argument("--dynamic", choices=("batch",), help="take any number of images at once, in place of --batch")
    parser.add_argument("--features", action="store_true", help="maps [B, C, h, w] in place of logits")
    parser.add_argument("--int8", action="store_true", help="linear layers in 8-bit integers, calibrated on --data")
    parser.add_argument("--data", metavar="DIR", help="images for --int8, and to compare on besides")
    parser.add_argument(
        "--limit", metavar="N", type=arguments.positive, help="measure --int8 on N of them (default: all)"
    )
    parser.add_argument("--opset", metavar="N", type=arguments.positive, help="ONNX opset (default: 18)")
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--kernels", action="store_true", default=None, dest="kernels",
        help="with our kernels, in a library beside the file (default: where they can be had, but not in ONNX)",
    )  # fmt: skip
    who.add_argument(
        "--standard", action="store_false", default=None, dest="kernels",
        help="standard operators only, also where the runtime could have our kernels",
    )  # fmt: skip
    parser.add_argument(
        "--budget", metavar="S", type=arguments.above_zero, default=4.0,
        help="seconds of timing for each contestant (default: 4)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="compare, but time nothing")
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.errors import UserError
    from attendless.export import export
    from attendless.stamp import stamp_line

    if args.dynamic and args.batch:
        raise UserError("--batch and --dynamic batch: a file takes so many images at once, or any number; give one")
    if args.threads:
        torch.set_num_threads(args.threads)
    with output.steps() as say:
        found = export(
            args.model,
            args.out,
            format=args.format,
            size=args.size,
            batch=None if args.dynamic else args.batch or 1,
            features=args.features,
            int8=args.int8,
            data=args.data,
            limit=args.limit,
            kernels=args.kernels,
            opset=args.opset,
            measure=not args.quick,
            budget=args.budget,
            progress=say,
            attention=args.attention,
            tokens=args.tokens,
            predictor=args.predictor,
            readout=args.readout,
            weights=args.weights,
            pretrained=args.pretrained,
            below_breakeven=_breakeven(args),
        )
    _print(found)
    if found.speed is not None:
        print(stamp_line(found.speed.stamp))
    output.write_json(args.json, {"rows": [found.as_dict()]})


def _breakeven(args: argparse.Namespace) -> str:
    """A saved file gets what is asked; of a model given by its name the option says."""
    from pathlib import Path

    return "keep" if Path(args.model).is_file() else str(args.below_breakeven)


def _print(found: Exported) -> None:
    from attendless.measure.measurement import made_of
    from attendless.sizes import size_text

    about = found.description
    counted = sum(found.operators.values())
    most = ", ".join(f"{count} {name}" for name, count in list(found.operators.items())[:6])
    answers = "maps of features" if about.features else f"{about.classes} logits"
    images = "any number of images" if about.batch is None else f"{about.batch} image{'s' if about.batch > 1 else ''}"
    lines = {
        "model": f"{about.model} · {made_of(about.attention, about.tokens)}",
        "takes": f"{images} of {about.channels} channels, {size_text(about.size)} px; answers with {answers}",
        "difference": str(found.parity),
        "int8": "" if found.quality is None else str(found.quality),
        "speed": "" if found.speed is None else str(found.speed),
        "size": f"{found.bytes / 1e6:,.1f} MB in {', '.join(file.name for file in found.files)}",
        "operators": f"{counted}: {most}{', …' if len(found.operators) > 6 else ''}",
        "note": "; ".join(found.notes),
    }
    print(f"wrote {found.path}")
    for name, text in lines.items():
        if text:
            print(f"  {name:<12}{text}")
