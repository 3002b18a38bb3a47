"""Classify images with a model and its weights, a file that attendless saved, or one that it exported. Folders are
searched recursively. An image that cannot be read is named and counted, and the exit code is 1. A detector or segmentor
from `train --task` draws its predictions; --out DIR is then the folder for the images.

--out DIR writes the predictions as Parquet, shard by shard; the same command resumes. --ray ADDRESS hands the shards to
a Ray cluster; images, model and DIR must then be on a file system that its machines share.

examples:
  attendless predict deit_tiny_patch16_224 dog.jpg --weights deit.safetensors
  attendless predict fast.onnx photos/ --topk 3 --json answers.json
  attendless predict fast.safetensors photos/ --features --out answers/ --ray auto
  attendless predict runs/coco/best.safetensors photos/ --score 0.4 --out found/ --json found.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from . import arguments, output, tasks

#: Images whose predictions are printed.
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.opening(parser)
    parser.add_argument("images", metavar="IMAGE|DIR", nargs="+", help="images, or folders of images")
    text = "predictions per image"
    parser.add_argument("--topk", metavar="K", type=arguments.positive, default=5, help=text)
    arguments.features(parser)
    arguments.batch(parser, 32)
    text = "folder for the predictions as Parquet; a run in it is resumed (default: print them)"
    parser.add_argument("--out", metavar="DIR", help=text)
    text = "images per Parquet file of --out"
    parser.add_argument("--shard", metavar="N", type=arguments.positive, default=1024, help=text)
    text = "compute on a Ray cluster: its address, `auto` or `local`; needs --out (default: on this machine)"
    parser.add_argument("--ray", metavar="ADDRESS", help=text)
    text = "detectors: lowest score of a box that is drawn (default: 0.5)"
    parser.add_argument("--score", metavar="P", type=arguments.share, help=text)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.errors import UserError
    from attendless.predict import find_pictures, predict

    if tasks.task_of(args.model) != "classification":
        return tasks.predict(args, find_pictures(args.images))
    if args.score is not None:
        raise UserError("--score is for detectors, which `attendless train --task detection` makes")
    if args.ray and not args.out:
        raise UserError("--ray needs --out DIR, a folder that all machines of the cluster share")
    if args.out and args.json:
        raise UserError("--out DIR holds the predictions, which --json would repeat: give one of the two")
    images = find_pictures(args.images)
    opening = arguments.opened(args, features=args.features)
    if args.out:
        return _into_folder(args, opening, images)
    predictor = opening.open()
    _tell(predictor.card)

    answers: list[Any] = []
    with output.progress("images", len(images)) as step:
        for part in predict(predictor, images, batch=args.batch, topk=args.topk):
            answers += part
            step(len(part))
    _print(answers)
    output.write_json(args.json, {"rows": [_about(predictor.card) | answer.as_dict() for answer in answers]})
    return _count([answer.error for answer in answers if answer.error], len(images))


def _into_folder(args: argparse.Namespace, opening: Any, images: tuple[str, ...]) -> int:
    from attendless.predict.onray import compute_on_ray
    from attendless.predict.shards import Plan, begin, compute_here, unreadable

    images = tuple(map(os.path.abspath, images))
    plan = Plan(opening, images, args.topk, args.batch, args.shard)
    missing = begin(plan, args.out)
    left = sum(len(shard.images) for shard in missing)
    if left < len(images):
        print(f"{len(images) - left:,} of {len(images):,} images were predicted before", file=sys.stderr)
    if missing:
        predictor = opening.open()  # errors are reported here, not on the cluster
        _tell(predictor.card)
        done = compute_on_ray(args.ray, plan, missing) if args.ray else compute_here(predictor, plan, missing)
        with output.progress("images", left) as step:
            for count in done:
                step(count)
    print(f"predictions for {len(images):,} images, in {args.out}")
    return _count(unreadable(plan.shards(Path(args.out))), len(images))


def _tell(card: Any) -> None:
    if card.random:
        print("random weights: these predictions mean nothing. Give --weights F", file=sys.stderr)


def _about(card: Any) -> dict[str, Any]:
    found = card.description
    return {
        "model": found.model,
        "attention": found.attention,
        "tokens_spec": found.tokens or None,
        "runtime": card.runtime,
        "size": list(found.size),
        "weights": "random" if card.random else "given",
    }


def _print(answers: list[Any]) -> None:
    for answer in [answer for answer in answers if not answer.error][:SHOWN]:
        print(answer.image)
        for c, name, probability in zip(answer.classes, answer.names, answer.probabilities, strict=True):
            print(f"  {output.percent(probability):>7}  {name} ({c})")
        if answer.features is not None:
            shown = ", ".join(f"{value:.3f}" for value in answer.features[:4])
            print(f"  features: {shown}, … ({len(answer.features)} numbers)")
    if len(answers) > SHOWN:
        print(f"… {len(answers):,} images in all: --json F or --out DIR stores every prediction")


def _count(bad: list[str], tried: int) -> int:
    """Name the first images that could not be read, and count them; returns the exit code."""
    for reason in bad[:5]:
        print(f"skipped: {reason}", file=sys.stderr)
    if bad:
        print(f"{len(bad)} of {tried} images could not be read", file=sys.stderr)
    return 1 if bad else 0
