"""Search the token schedule and the attention of each layer that give the lowest latency within an accuracy drop, without
training and without labels. A few hundred images of the kind the model will see are enough: some serve the search, some
the choice, and the rest estimate the accuracy drop of the chosen model.

examples:
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --size 384 --max-drop 0.5
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --size 384 512 --report tuned.html
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --target-ms 20 --plot curve.png
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --batch 32 --max-drop 1
  attendless tune deit_tiny_patch16_224 --weights deit_tiny.safetensors --data photos/ --attention none --resume-dir runs/tune
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from . import arguments, output

if TYPE_CHECKING:
    from attendless.optimize.report import Tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of images; labels are not used")
    parser.add_argument(
        "--attention",
        metavar="A",
        default="foveal",
        help="a mechanism with a keep option (default: foveal); none: attentions stay unchanged",
    )
    parser.add_argument(
        "--tokens",
        metavar="T",
        default="rank",
        help="token reducer whose schedules are searched; a spec with options, such as tome:r=8, is taken as it is; "
        "none: tokens stay unchanged",
    )
    parser.add_argument(
        "--rates", metavar="R", type=arguments.share, nargs="+", help="keep rates to choose from (default: 0.05 to 0.5)"
    )
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument(
        "--max-drop",
        metavar="P",
        type=arguments.not_negative,
        help="largest expected accuracy drop, in percentage points of top-1 (default: 0.5)",
    )
    bound.add_argument(
        "--target-ms",
        metavar="T",
        type=arguments.above_zero,
        help="highest latency in ms per image, in place of --max-drop (default: no limit)",
    )
    parser.add_argument(
        "--accuracy",
        metavar="P",
        type=arguments.percent,
        help="the model's top-1 on such images in percent, if known: calibrates the confidence from which the accuracy "
        "drop is estimated (default: not calibrated)",
    )
    arguments.size(parser)
    arguments.crop_pct(parser)
    arguments.batch(parser, 1)
    parser.add_argument(
        "--images", metavar="N", type=arguments.positive, default=256, help="images to use (default: 256)"
    )
    parser.add_argument(
        "--budget",
        metavar="S",
        type=arguments.above_zero,
        default=10.0,
        help="seconds of timing for each candidate (default: 10)",
    )
    parser.add_argument(
        "--report",
        metavar="F",
        type=arguments.target("page"),
        help="write table and plot as one .html page (default: not written)",
    )
    parser.add_argument(
        "--plot",
        metavar="F",
        type=arguments.target("picture"),
        help="draw the trade-off to this file (default: not drawn)",
    )
    parser.add_argument(
        "--out",
        metavar="F",
        type=arguments.target("model"),
        help="save the converted model to this .safetensors file (default: not saved)",
    )
    parser.add_argument(
        "--resume-dir",
        metavar="DIR",
        help="folder for the log of measured values, from which the same search resumes (default: no log)",
    )
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.convert import open_model, save
    from attendless.convert.source import random_weights
    from attendless.data.opening import open_data
    from attendless.errors import UserError
    from attendless.measure.accuracy import load_images, preprocessing
    from attendless.optimize.goals import Goal
    from attendless.optimize.rates import RATES
    from attendless.optimize.tune import attentions_to_try, tune
    from attendless.sizes import input_size

    # Check all arguments before any work is done.
    Goal(args.max_drop, args.target_ms)
    attentions_to_try(args.attention, args.tokens, args.rates or RATES)
    if args.out and len(args.size) > 1:
        raise UserError(f"--out {args.out!r} with {len(args.size)} sizes: a file holds one model, so give one --size")
    if args.plot or args.report:
        from attendless.show.figures import new_figure

        new_figure()
    arguments.use_threads(args)
    source = open_data(args.data, "val", labels=False)
    opening = {"weights": args.weights, "pretrained": args.pretrained}
    models = [open_model(args.model, **opening, size=size) for size in args.size or [None]]
    notes = [WEIGHTLESS] if random_weights(args.model, **opening) else []
    for model in models if args.attention != "none" else ():
        _print_cap(model)
    found: list[Tuned] = []
    with output.steps() as say:

        def progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
            say(what)
            return output.progress(what, total)

        for model in models:
            images = load_images(source, preprocessing(model, input_size(model), args.crop_pct), args.images)
            asked = min(args.images, len(source))
            if len(images) < asked and not found:
                notes.append(f"{asked - len(images)} of {asked} images could not be read, and were left out")
            found += [
                tune(
                    model,
                    images,
                    attention=args.attention,
                    tokens=args.tokens,
                    rates=args.rates or RATES,
                    max_drop=args.max_drop,
                    target_ms=args.target_ms,
                    accuracy=args.accuracy,
                    batch=args.batch,
                    budget=args.budget,
                    resume=args.resume_dir,
                    progress=progress,
                )
            ]
            del images
    title = f"{args.model} · {found[0].images} images of {args.data}"
    _print(title, found, notes)
    commands = [_command(args, tuned) for tuned in found]
    for tuned, command in zip(found, commands, strict=True):
        print("", *tuned.findings, f"  {command}", sep="\n")
    if args.plot:
        from attendless.optimize.tradeoff import draw

        draw(found, args.plot)
        print(f"drawn: {args.plot}")
    if args.report:
        from attendless.optimize.tradeoff_page import page

        output.write_text(args.report, page(found, title, commands, notes))
        print(f"report: {args.report}")
    if args.out:
        save(found[0].convert(models[0]), args.out)
        print(f"saved: {args.out}, to be measured by: attendless bench {shlex.quote(args.out)}")
    rows = [{**c.as_dict(), "chosen": c == tuned.chosen} for tuned in found for c in tuned.candidates]
    output.write_json(args.json, {"rows": rows, "chosen": [tuned.as_dict() for tuned in found], "notes": notes})


WEIGHTLESS = "the weights are random: the accuracy drop is meaningless (give --weights F or --pretrained)"


def _print_cap(model: object) -> None:
    """Print the maximum speed-up by sparse attention alone (Amdahl's law), before anything is timed."""
    from attendless.measure.measurement import limit_by_macs
    from attendless.measure.timing import by_formula
    from attendless.sizes import input_size, size_text

    size = input_size(model)
    macs = by_formula(model, size)  # type: ignore[arg-type]
    if macs is not None:
        print(
            f"maximum speed-up at {size_text(size)} px of sparser attention alone: "
            f"{limit_by_macs(macs.cap, macs.share)}",
            flush=True,
        )


def _print(title: str, found: list[Tuned], notes: list[str]) -> None:
    from attendless.optimize.report import HOW_TO_READ, table

    columns, *rows = table(found)
    output.print_table(title, columns, rows, note="\n".join((*HOW_TO_READ, *notes)))


def _command(args: argparse.Namespace, tuned: Tuned) -> str:
    """The `convert` command of the chosen model."""
    from attendless.sizes import size_text

    if not tuned.chosen.changed:
        return f"nothing to convert: the unchanged model, {tuned.attention}"
    words = ["attendless", "convert", args.model, *(["--weights", args.weights] if args.weights else [])]
    words += ["--pretrained"] * args.pretrained + ["--size", size_text(tuned.chosen.setting.size)] * bool(args.size)
    words += ["--tokens", tuned.tokens] if tuned.tokens else []
    if tuned.layers:
        words += ["--attention", tuned.attention]
        words += (
            ["--layers", ",".join(map(str, tuned.layers))] if len(tuned.layers) < tuned.chosen.setting.depth else []
        )
    return shlex.join([*words, "--below-breakeven", "keep", "--out", args.out or "tuned.safetensors"])
