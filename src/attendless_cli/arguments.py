"""The words the commands share: the same name, meaning and help wherever they appear."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

Size = tuple[int, int]
BREAKEVEN = "where attending less cannot pay at this size: leave the layer full (default), or convert it anyway"
MODEL = "a timm or attendless model name, or a file attendless saved"


def model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    weights(parser)


def weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", metavar="F", help="safetensors with the model's weights (default: random weights)")
    parser.add_argument("--pretrained", action="store_true", help="fetch timm's pretrained weights (uses the network)")


def attention(parser: argparse.ArgumentParser, *, many: bool = True, required: bool = False) -> None:
    """`--attention`; left out, it is empty (or None), and the command takes the model as it is."""
    text = "attention specs, such as full or foveal:keep=0.1; `attendless list` shows them"
    text = text if many else text.replace("specs", "spec")
    text = text if required else f"{text} (default: the model's own)"
    if many:
        parser.add_argument("--attention", metavar="A", nargs="+", default=[], required=required, help=text)
    else:
        parser.add_argument("--attention", metavar="A", required=required, help=text)


def tokens(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    """`--tokens`; left out, what the model has of it stays."""
    text = (
        "token reducer, such as tome:r=8; none takes one away; `attendless list` shows them (default: the model's own)"
    )
    if many:
        parser.add_argument("--tokens", metavar="R", nargs="+", default=[], help=text.replace("reducer", "reducers", 1))
    else:
        parser.add_argument("--tokens", metavar="R", help=text)


def task(parser: argparse.ArgumentParser) -> None:
    text = "classification, detection or segmentation (default: the file's own, else classification)"
    parser.add_argument("--task", metavar="T", help=text)


def predictor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--predictor", metavar="F",
        help="what sparsifiner has learned about which keys matter: a file that distill left, or the name of one that "
        "comes with attendless",
    )  # fmt: skip


def size(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    text = "image size in pixels, S or HxW (default: the model's own)"
    if many:
        parser.add_argument("--size", metavar="S", nargs="+", type=parse_size, default=[], help=text)
    else:
        parser.add_argument("--size", metavar="S", type=parse_size, help=text)


def readout(parser: argparse.ArgumentParser, *, default: str = "where attention or tokens are reduced") -> None:
    """`--readout` and `--no-readout`; left out, None."""
    text = f"compute the last layer for the class token alone: the same outputs with fewer MACs (default: {default})"
    parser.add_argument("--readout", action=argparse.BooleanOptionalAction, help=text)


#: The default of `readout` in commands that compare attentions.
FOR_ALL = "for all rows, if attention or tokens are reduced in any"


def threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", metavar="T", type=positive, help="CPU threads (default: torch's own choice)")


def crop_pct(parser: argparse.ArgumentParser) -> None:
    text = "share of the resized image kept, more than 0 and at most 1 (default: the model's)"
    parser.add_argument("--crop-pct", metavar="P", type=share, help=text)


def opening(parser: argparse.ArgumentParser) -> None:
    """How a model is opened to answer: `opened` reads it."""
    weights(parser)
    attention(parser, many=False)
    tokens(parser, many=False)
    predictor(parser)
    readout(parser)
    size(parser, many=False)
    crop_pct(parser)
    text = "what computes it: eager (default) or compile; of an exported file its ending says it"
    parser.add_argument("--runtime", metavar="R", help=text)
    threads(parser)


def opened(args: argparse.Namespace, *, features: bool) -> Any:
    """The words of `opening` as the library takes them."""
    from attendless.plugins import plugin_files
    from attendless.predict import Opening

    given = ("model", "runtime", "weights", "pretrained", "size", "attention", "tokens", "predictor", "crop_pct")
    found = {name: getattr(args, name) for name in (*given, "readout", "threads")}
    return Opening(**found, features=features, plugins=tuple(plugin_files()))


class Target(str):
    """A file that a command will write, and its kind. `main` checks the path before any work is done."""

    kind: str


def target(kind: str) -> Callable[[str], Target]:
    """The `type=` of an argument that names a file to write: of a `model`, an `export`,
    `json`, a `picture` or a `page`.

    As usual `-` is standard output.
    """

    def read(text: str) -> Target:
        found = Target("/dev/stdout" if text == "-" else text)
        found.kind = kind
        return found

    return read


def json(parser: argparse.ArgumentParser) -> None:
    text = "also write the result as JSON to this file (-: standard output; what is for people goes to standard error)"
    parser.add_argument("--json", metavar="F", type=target("json"), help=text)
    parser.add_argument("--force", action="store_true", help="write over existing files that attendless did not write")


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
    """A finite number for which `good` holds, or the error that says what was `expected`."""
    try:
        found = float(text)
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


def above_zero(text: str) -> float:
    return _number(text, "a number above 0", lambda found: found > 0)


def not_negative(text: str) -> float:
    return _number(text, "a number that is 0 or more", lambda found: found >= 0)
