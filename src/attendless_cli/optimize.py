"""Search, export and verify the fastest file of a model that keeps its accuracy: one command from a checkpoint and a
folder of images to a folder that `predict`, `serve`, `eval` and `bench` take.

The search combines attention, token merging, precision (fp32, bf16, int8) and runtime (eager PyTorch, ONNX Runtime,
OpenVINO). Every variant is timed in the runtime, precision, batch and threads in which it will run, and the unmodified
model takes part in all of them. Accuracy drops are against the original fp32 model; the final one is measured on images
that took no part in calibration, search or choice. If the folder of images has labels, they are used.

Ctrl-C ends the search with the best variant so far; the same command resumes a search that was killed. Measured values
are cached, so that another goal for the same model and images takes seconds rather than minutes.

examples:
  attendless optimize deit_tiny_patch16_224 --weights deit.safetensors --data imagenet/val --max-drop 1.0 --out fast/
  attendless optimize fast.safetensors --data photos/ --min-agreement 0.98 --runtime openvino --threads 1 --out fast/
  attendless optimize deit_tiny_patch16_224 --weights deit.safetensors --data photos/ --quick --out fast/
  attendless optimize deit_tiny_patch16_224 --weights deit.safetensors --data photos/ --target-ms 10 --budget 1h --out fast/
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from . import arguments, output
from .tune import WEIGHTLESS

if TYPE_CHECKING:
    from attendless.optimize.optimized import Optimized

#: The most bytes of preprocessed images that are held at once.
_MEMORY = 1.2e9
#: Images that are read unless a number is given: for a search, and for a quick one, which judges few of them.
_MOST, _QUICK = 2000, 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    text = "folder of images as the model will meet them; labels are used if there are any"
    parser.add_argument("--data", metavar="DIR", required=True, help=text)
    text = "folder to write: model file, manifest.json and report.html"
    parser.add_argument("--out", metavar="DIR", type=arguments.target("optimized"), required=True, help=text)
    bound = parser.add_mutually_exclusive_group()
    text = "largest accuracy drop, in percentage points of top-1, or of 100 times --metric (default: 1.0)"
    bound.add_argument("--max-drop", metavar="P", type=arguments.not_negative, help=text)
    text = "smallest share of images with the original's prediction, in place of --max-drop (default: no limit)"
    bound.add_argument("--min-agreement", metavar="A", type=arguments.share, help=text)
    text = "highest latency in ms per image, in place of --max-drop (default: no limit)"
    bound.add_argument("--target-ms", metavar="T", type=arguments.above_zero, help=text)
    arguments.metric(parser, "top-1; cosine similarity for models without a classifier")
    parser.add_argument("--no-labels", action="store_true", help="estimate the accuracy drop without labels")
    text = "eager, compile, onnx, onnx-kernels, openvino (default: all that are installed, except for compile)"
    parser.add_argument("--runtime", metavar="R", nargs="+", help=text)
    text = "fp32, bf16, int8 (default: all that this CPU computes)"
    parser.add_argument("--precision", metavar="P", nargs="+", help=text)
    text = "a mechanism with a keep option (default: foveal); none: attentions stay unchanged"
    parser.add_argument("--attention", metavar="A", default="foveal", help=text)
    text = "token reducer whose schedules are searched (default: rank); none: tokens stay unchanged"
    parser.add_argument("--tokens", metavar="T", default="rank", help=text)
    arguments.size(parser, many=False)
    arguments.crop_pct(parser)
    arguments.batch(parser, 1)
    arguments.images(parser, f"at most {_MOST}, with --quick {_QUICK}")
    text = "time that the search may take, such as 90s, 15m or 1h"
    parser.add_argument("--budget", metavar="T", default="15m", help=text)
    parser.add_argument("--quick", action="store_true", help="take settings from the presets: about a minute")
    text = "folder of the prepared files, from which the same search resumes; it is deleted at the end "
    text += "(default: OUT.work)"
    parser.add_argument("--work", metavar="DIR", help=text)
    text = "folder of the measured values, which a search of the same model with another goal reads too "
    text += "(default: in the user's cache folder)"
    parser.add_argument("--cache", metavar="DIR", help=text)
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import shutil

    from attendless.convert import open_model
    from attendless.convert.source import random_weights
    from attendless.optimize.goals import Goal
    from attendless.optimize.optimize import optimize
    from attendless.optimize.pace import seconds_of
    from attendless.stamp import stamp_line
    from attendless.storage import cache_folder

    # Check all arguments before any work is done.
    Goal(args.max_drop, args.target_ms, args.min_agreement)
    seconds_of(args.budget)
    metric = arguments.metric_function(args.metric)
    arguments.use_threads(args)
    opening = {"weights": args.weights, "pretrained": args.pretrained}
    model = open_model(args.model, **opening, size=args.size)
    images, labels, notes = _images(args, model)
    if random_weights(args.model, **opening):
        notes.append(WEIGHTLESS)
    work = args.work or f"{args.out.rstrip('/')}.work"
    with output.steps() as say:

        def progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
            say(what)
            return output.progress(what, total)

        found = optimize(
            model,
            images,
            labels,
            max_drop=args.max_drop,
            min_agreement=args.min_agreement,
            target_ms=args.target_ms,
            metric=metric,
            runtimes=args.runtime,
            precisions=args.precision,
            attention=args.attention,
            tokens=args.tokens,
            batch=args.batch,
            threads=args.threads,
            budget=args.budget,
            quick=args.quick,
            resume=work,
            cache=args.cache or cache_folder() / "optimize",
            progress=progress,
        )
    _print(args, found, notes)
    file = found.save(args.out, name=args.model, command=_command(args))
    shutil.rmtree(work, ignore_errors=True)
    print(f"wrote {args.out}: {file.name}, manifest.json, report.html")
    print(f"try: attendless predict {shlex.quote(args.out)} IMAGE · attendless serve {shlex.quote(args.out)}")
    print(stamp_line(found.stamp))
    payload = found.as_dict() | {"notes": [*found.notes, *notes], "out": args.out, "file": file.name}
    output.write_json(args.json, {"rows": [one.as_dict() for one in found.outcomes], **payload})


def _images(args: argparse.Namespace, model: Any) -> tuple[Any, list[int] | None, list[str]]:
    """Preprocessed images, their labels or None, and notes on both."""
    import math

    from attendless.data.labels import NO_LABELS, match_labels
    from attendless.data.opening import open_data
    from attendless.errors import UserError
    from attendless.measure.accuracy import load_labelled, preprocessing
    from attendless.sizes import channels, input_size

    notes, classes = list[str](), NO_LABELS
    try:
        source = open_data(args.data, "val", labels=not args.no_labels)
        classes = match_labels(source.classes, model) if not args.no_labels else NO_LABELS
    except UserError as error:
        source = open_data(args.data, "val", labels=False)
        notes.append(f"labels were not used: {error}")
    size = input_size(model)
    most = int(_MEMORY / (4 * channels(model) * math.prod(size)))
    limit = min(args.images or (_QUICK if args.quick else _MOST), most, len(source))
    with output.progress(f"reading {limit} images", 1) as step:
        images, labels = load_labelled(source, preprocessing(model, size, args.crop_pct), limit)
        step(1)
    if len(images) < limit:
        notes.append(f"{limit - len(images)} of {limit} images could not be read, and were left out")
    return images, [classes.classes[one] for one in labels] if classes.classes else None, notes


def _print(args: argparse.Namespace, found: Optimized, notes: list[str]) -> None:
    columns, *rows = found.table()
    title = f"{args.model} · {found.images} images of {args.data} · batch {found.setting.batch}"
    output.print_table(title, columns, rows, note="\n".join((*found.how_to_read, *notes)))
    print("", *found.findings, sep="\n")


def _command(args: argparse.Namespace) -> str:
    """The command that reproduces the folder."""
    from attendless.sizes import size_text

    words = ["attendless", "optimize", args.model, "--data", args.data, "--out", args.out]
    words += ["--size", size_text(args.size)] if args.size else []
    for name in ("weights", "max_drop", "min_agreement", "target_ms", "metric", "crop_pct", "images", "threads"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for name, default in (("attention", "foveal"), ("tokens", "rank"), ("batch", 1), ("budget", "15m")):
        value = getattr(args, name)
        words += [f"--{name}", str(value)] if value != default else []
    for name in ("runtime", "precision"):
        words += [f"--{name}", *getattr(args, name)] if getattr(args, name) else []
    flags = ("pretrained", "quick", "no_labels")
    return shlex.join([*words, *(f"--{name.replace('_', '-')}" for name in flags if getattr(args, name))])
