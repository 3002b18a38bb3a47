"""Write a model for another runtime: ONNX (standard operators, runs anywhere; --kernels: with our kernels, for ONNX
Runtime), OpenVINO (with our kernels, where they can be built) or pt2 (torch.export, with our operators).

Outputs are compared with the PyTorch model before the file is moved to its final path; if they differ, nothing is
written. Latency is compared with the same model in PyTorch, and with the original model exported the same way. The
results are printed and stored in the file.

A saved file is exported as it is. A model given by name is converted as `attendless convert` does.

examples:
  attendless export fast.safetensors --out fast.onnx
  attendless export fast.safetensors --out fast.onnx --kernels
  attendless export fast.safetensors --out fast.xml --dynamic batch
  attendless export fast.safetensors --out fast.xml --precision int8 --data imagenet/val
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
    arguments.below_breakeven(parser)
    text = "format of the file (default: by the ending of --out)"
    parser.add_argument("--format", choices=("onnx", "openvino", "pt2"), help=text)
    text = "file to write: .onnx, .xml (OpenVINO, with a .bin beside it) or .pt2"
    parser.add_argument("--out", metavar="F", type=arguments.target("export"), required=True, help=text)
    parser.add_argument("--batch", metavar="B", type=arguments.positive, help="images per forward pass (default: 1)")
    text = "accept any number of images per forward pass, in place of --batch (default: a fixed batch)"
    parser.add_argument("--dynamic", choices=("batch",), help=text)
    parser.add_argument("--features", action="store_true", help="output feature maps [B, C, h, w] in place of logits")
    precision = parser.add_mutually_exclusive_group()
    text = "fp32, bf16 (OpenVINO on a CPU with bf16 instructions) or int8 (linear layers; needs --data) (default: fp32)"
    precision.add_argument("--precision", metavar="P", help=text)
    precision.add_argument("--int8", action="store_const", const="int8", dest="precision", help=argparse.SUPPRESS)
    text = "images to compare outputs on and to measure the accuracy of int8 on (default: noise)"
    parser.add_argument("--data", metavar="DIR", help=text)
    text = "images to calibrate int8 on, up to 300 (default: at most half of --data, by a hash of the file names; "
    text += "accuracy is measured on the others)"
    parser.add_argument("--calibration", metavar="DIR", help=text)
    arguments.images(parser, "all")
    parser.add_argument("--opset", metavar="N", type=arguments.positive, help="ONNX opset (default: 18)")
    kernels = parser.add_mutually_exclusive_group()
    text = "use our kernels, in a library beside the file (default: where available, but not in ONNX)"
    kernels.add_argument("--kernels", action="store_true", default=None, dest="kernels", help=text)
    text = "use standard operators only, also where the runtime supports our kernels"
    kernels.add_argument("--standard", action="store_false", default=None, dest="kernels", help=text)
    arguments.budget(parser, 4.0, "variant")
    parser.add_argument("--quick", action="store_true", help="compare outputs, but measure no latency")
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.errors import UserError
    from attendless.export import export
    from attendless.stamp import stamp_line

    if args.dynamic and args.batch:
        raise UserError(
            "--batch and --dynamic batch: a file takes a fixed number of images or any number; give one of the two"
        )
    arguments.use_threads(args)
    with output.steps() as say:
        found = export(
            args.model,
            args.out,
            format=args.format,
            size=args.size,
            batch=None if args.dynamic else args.batch or 1,
            features=args.features,
            precision=args.precision,
            data=args.data,
            calibration=args.calibration,
            limit=args.images,
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
    """A saved file is converted as asked; for a model given by name the flag decides."""
    from pathlib import Path

    return "keep" if Path(args.model).is_file() else str(args.below_breakeven)


def _print(found: Exported) -> None:
    from attendless.measure.measurement import made_of
    from attendless.sizes import size_text

    about = found.description
    counted = sum(found.operators.values())
    most = ", ".join(f"{count} {name}" for name, count in list(found.operators.items())[:6])
    outputs = "feature maps" if about.features else f"{about.classes} logits"
    images = "any number of images" if about.batch is None else f"{about.batch} image{'s' if about.batch > 1 else ''}"
    lines = {
        "model": f"{about.model} · {made_of(about.attention, about.tokens)}",
        "input": f"{images} of {about.channels} channels, {size_text(about.size)} px",
        "output": outputs,
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
