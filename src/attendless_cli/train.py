"""Train a model on a folder of images and leave weights, metrics, curves and the recipe in a folder. The same command
on the same folder continues where it stopped, bit for bit. Under torchrun it runs on many processes.

examples:
  attendless train columnar_micro_patch4_32 --data scenes --recipe scenes --out runs/scenes
  attendless train deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.25 --data photos --size 384 --out runs/foveal
  torchrun --nproc_per_node 8 -m attendless train deit_small_patch16_224 --data imagenet --recipe deit --out runs/deit
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
from typing import Any

from . import fields, output, words


def arguments(parser: argparse.ArgumentParser) -> None:
    from attendless.train.recipe import RECIPES, Recipe, summary

    common(parser)
    words.attention(parser, many=False)
    words.tokens(parser, many=False)
    recipes = "; ".join(f"{name}: {summary(name)}" for name in RECIPES)
    chosen = "finetune for a model that comes with weights, quick otherwise"
    parser.add_argument("--recipe", metavar="R", help=f"{recipes} (default: {chosen})")
    fields.add(parser, "the recipe's fields", Recipe)


def common(parser: argparse.ArgumentParser) -> None:
    """The words that `train` and `distill` share."""
    from attendless.train.recipe import Run

    words.model(parser)
    parser.add_argument(
        "--data", metavar="DIR", required=True, help="folder of images, `scenes`, or torchvision's NAME@DIR"
    )
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder for weights and metrics; a run in it is resumed"
    )
    words.threads(parser)
    words.json(parser)
    fields.add(parser, "how it is run", Run)


def run(args: argparse.Namespace) -> int:
    from attendless.train import Recipe, train

    result = train(
        args.model,
        args.data,
        attention=args.attention,
        tokens=args.tokens,
        recipe=args.recipe,
        out=args.out,
        weights=args.weights,
        pretrained=args.pretrained,
        run=prepare(args),
        **fields.given(args, Recipe),
    )
    return report(args, result)


def prepare(args: argparse.Namespace) -> Any:
    """Set the threads, and read how the run is to be carried out."""
    import torch

    from attendless.train import Run

    if args.threads:
        torch.set_num_threads(args.threads)
    return Run(**fields.given(args, Run))


def report(args: argparse.Namespace, result: Any) -> int:
    row = {"model": args.model, "attention": args.attention, "tokens": args.tokens, "data": args.data}
    row |= {"out": str(result.out), "steps": result.steps, "finished": result.finished, "best": result.best}
    row |= result.metrics
    output.write_json(args.json, {"rows": [row]})
    if not result.finished:
        return 130
    print(f"best {result.best:.4g} · {result.out}/best.safetensors" if result.best is not None else str(result.out))
    for command in following(args.model, args.data, result):
        print(f"next: {command}")
    return 0


def following(model: str, data: str, result: Any) -> list[str]:
    """The commands that use what a run has left."""
    import shlex

    from attendless.convert.files import read_header
    from attendless.errors import UserError

    file = str(result.out / ("best.safetensors" if result.best is not None else "last.safetensors"))
    plain = [] if "top1" in result.metrics else ["--no-labels"]  # the pictures' labels were not the model's
    try:
        read_header(file)
    except UserError:  # bare weights, of a model that no file can describe
        return [shlex.join(["attendless", "eval", model, "--weights", file, "--data", data, *plain])]
    return [shlex.join(["attendless", "eval", file, "--data", data, *plain]), shlex.join(["attendless", "bench", file])]
