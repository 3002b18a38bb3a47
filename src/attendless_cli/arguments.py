"""Arguments that several commands share: one name, meaning and help text wherever they appear."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

Size = tuple[int, int]
MODEL = "a timm or attendless model name, or a file that attendless saved"
EXPORTED = f"{MODEL}, exported (.onnx, .xml, .pt2), or a folder of optimize"
TASKS = ("classification", "detection", "segmentation")


def model(parser: argparse.ArgumentParser, *, exported: bool = False) -> None:
    """`exported`: whether MODEL may be an exported file."""
    parser.add_argument("model", metavar="MODEL", help=EXPORTED if exported else MODEL)
    weights(parser)


def weights(parser: argparse.ArgumentParser) -> None:
    text = "the model's weights: a safetensors file, or a PyTorch state dict (default: random weights, or those of a "
    text += "saved file)"
    parser.add_argument("--weights", metavar="F", help=text)
    parser.add_argument(
        "--pretrained", action="store_true", help="download timm's pretrained weights (needs a network)"
    )


def attention(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    """`--attention`; without it the value is empty (or None), and the command uses the model's own."""
    text = "attention spec, such as full or foveal:keep=0.1; `attendless list` shows them (default: the model's own)"
    if many:
        text = text.replace("spec,", "specs,")
        parser.add_argument("--attention", metavar="A", nargs="+", default=[], help=text)
    else:
        parser.add_argument("--attention", metavar="A", help=text)


def tokens(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    """`--tokens`; without it the model keeps its own token reduction."""
    text = "token reducer, such as tome:r=8; none removes it; `attendless list` shows them (default: the model's own)"
    if many:
        text = text.replace("reducer,", "reducers,")
        parser.add_argument("--tokens", metavar="R", nargs="+", default=[], help=text)
    else:
        parser.add_argument("--tokens", metavar="R", help=text)


def task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=TASKS, help="what the model does (default: the file's, or classification)")


def predictor(parser: argparse.ArgumentParser) -> None:
    text = "trained key predictor for sparsifiner: a file that distill wrote, or the name of one that comes with "
    text += "attendless (default: the model's own)"
    parser.add_argument("--predictor", metavar="F", help=text)


def size(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    text = "image size in pixels, S or HxW (default: the model's own)"
    if many:
        text = text.replace("size in", "sizes in")
        parser.add_argument("--size", metavar="S", nargs="+", type=parse_size, default=[], help=text)
    else:
        parser.add_argument("--size", metavar="S", type=parse_size, help=text)


def readout(parser: argparse.ArgumentParser, *, default: str = "where attention or tokens are reduced") -> None:
    """`--readout` and `--no-readout`; left out, None."""
    text = f"compute the last layer for the class token alone: the same outputs with fewer MACs (default: {default})"
    parser.add_argument("--readout", action=argparse.BooleanOptionalAction, help=text)


#: The default of `readout` in commands that compare attentions.
FOR_ALL = "for all rows, if attention or tokens are reduced in any"


def below_breakeven(parser: argparse.ArgumentParser) -> None:
    text = "layers for which sparser attention is not faster at this size: full leaves them as they are, keep converts "
    text += "them anyway"
    parser.add_argument("--below-breakeven", choices=("full", "keep"), default="full", help=text)


def layers(parser: argparse.ArgumentParser, what: str, default: str) -> None:
    text = f"layers to {what}, counted from 0, such as 2: or :4 or 0,3-5 or -1 (default: {default})"
    parser.add_argument("--layers", metavar="L", help=text)


def batch(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--batch", metavar="B", type=positive, default=default, help="images per forward pass")


def images(parser: argparse.ArgumentParser, default: str) -> None:
    """`--images N`: how many images of `--data` a command uses."""
    text = f"number of images to use, spread evenly over the folder (default: {default})"
    parser.add_argument("--images", metavar="N", type=positive, help=text)


def budget(parser: argparse.ArgumentParser, default: float, of: str) -> None:
    text = f"seconds of timing for each {of}, without warm-up"
    parser.add_argument("--budget", metavar="S", type=above_zero, default=default, help=text)


def jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", metavar="J", type=at_least_one, help="runs in parallel (default: one per core)")


def threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", metavar="T", type=at_least_one, help="CPU threads (default: chosen by torch)")


def use_threads(args: argparse.Namespace) -> None:
    """Set torch's number of threads, if `--threads` was given."""
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)


def crop_pct(parser: argparse.ArgumentParser) -> None:
    text = "fraction of the resized image that the centre crop keeps, above 0 and up to 1 (default: the model's)"
    parser.add_argument("--crop-pct", metavar="P", type=share, help=text)


def features(parser: argparse.ArgumentParser) -> None:
    text = "also return the features that enter the classifier"
    parser.add_argument("--features", action="store_true", help=text)


def host(parser: argparse.ArgumentParser) -> None:
    text = "address to listen on; 127.0.0.1 is this machine alone"
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help=text)
    text = "other names of this server; requests for a host that is neither these, --host, localhost nor an IP address "
    text += "are refused; * accepts all (default: none)"
    parser.add_argument("--allow-host", metavar="NAME", nargs="+", default=[], help=text)


def opening(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may be an exported file, and how it is opened for prediction; `opened` reads them."""
    parser.add_argument("model", metavar="MODEL", help=EXPORTED)
    weights(parser)
    attention(parser, many=False)
    tokens(parser, many=False)
    predictor(parser)
    readout(parser)
    size(parser, many=False)
    crop_pct(parser)
    text = "eager or compile; the ending of an exported file determines its runtime (default: eager)"
    parser.add_argument("--runtime", metavar="R", help=text)
    text = "fp32 or bf16 for a model that PyTorch runs; an exported file has its own (default: fp32)"
    parser.add_argument("--precision", metavar="P", help=text)
    threads(parser)


def opened(args: argparse.Namespace, *, features: bool) -> Any:
    """The arguments of `opening` as the library takes them."""
    from attendless.plugins import plugin_files
    from attendless.predict import Opening

    given = ("model", "runtime", "weights", "pretrained", "size", "attention", "tokens", "predictor", "crop_pct")
    found = {name: getattr(args, name) for name in (*given, "readout", "threads", "precision")}
    return Opening(**found, features=features, plugins=tuple(plugin_files()))


class Target(str):
    """A file or folder that a command will write, and its kind. `targets.check` inspects it before any work is done."""

    kind: str


def target(kind: str) -> Callable[[str], Target]:
    """The `type=` of an argument that names a file to write: `model`, `export`, `json` or `page`, a figure, or a
    folder: a `run`, a `comparison` or an `optimized` model.

    `-` is standard output.
    """

    def read(text: str) -> Target:
        found = Target("/dev/stdout" if text == "-" else text)
        found.kind = kind
        return found

    return read


def json(parser: argparse.ArgumentParser) -> None:
    text = "also write the result as JSON; - is standard output, and tables go to standard error (default: not written)"
    parser.add_argument("--json", metavar="F", type=target("json"), help=text)
    parser.add_argument("--force", action="store_true", help="overwrite existing files that attendless did not write")


def parse_size(text: str) -> Size:
    from attendless.errors import UserError
    from attendless.sizes import parse_size

    try:
        return parse_size(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share(text: str) -> float:
    return _number(text, "a number above 0 and up to 1", lambda found: 0 < found <= 1)


def percent(text: str) -> float:
    return _number(text, "a number above 0 and below 100", lambda found: 0 < found < 100)


def _number(text: str, expected: str, good: Callable[[float], bool]) -> float:
    """A finite number for which `good` holds; the error states what was `expected`."""
    try:
        found = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or not good(found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected {expected}")
    return found


def positive(text: str) -> int:
    return _whole(text, 1)


def count(text: str) -> int:
    return _whole(text, 0)


def port(text: str) -> int:
    return _whole(text, 0, 65535)


def _whole(text: str, least: int, most: int = 999_999_999) -> int:
    good = text.isascii() and text.isdecimal() and len(text) < 10
    if not good or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from {least} to {most}")
    return int(text)


def processes(text: str) -> int:
    """A number of processes; 0 is none."""
    return _bounded(text, 0)


def at_least_one(text: str) -> int:
    """A number of threads or processes."""
    return _bounded(text, 1)


def _bounded(text: str, least: int) -> int:
    from attendless.stamp import cores, most_at_once

    try:
        return _whole(text, least, most_at_once())
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, because this machine has {cores()} cores") from None


def finite(text: str) -> float:
    return _number(text, "a number", lambda found: True)


def above_zero(text: str) -> float:
    return _number(text, "a number above 0", lambda found: found > 0)


def not_negative(text: str) -> float:
    return _number(text, "a number that is 0 or more", lambda found: found >= 0)


def metric(parser: argparse.ArgumentParser, default: str) -> None:
    text = "module:function, (outputs, targets) to a score per image, higher is better; targets are the labels, or the "
    text += f"original's outputs (default: {default})"
    parser.add_argument("--metric", metavar="M", help=text)


def metric_function(text: str | None) -> Any:
    """The function that `module:function` names; the working directory is searched too."""
    if text is None:
        return None
    import importlib
    import os
    import sys

    from attendless.errors import UserError

    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--metric {text!r}: expected module:function, which can be imported here: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    return found
