"""Train a model on a folder of images and leave weights, metrics, curves and the recipe in a folder. The same command
on the same folder continues where it stopped, bit for bit. Under torchrun it runs on many processes.

--task detection takes COCO's JSON files, --task segmentation a folder of images/ and masks/, VOC's or ADE20K's; MODEL is
then the backbone, and --head what stands on it.

examples:
  attendless train columnar_micro_patch4_32 --data scenes --recipe scenes --out runs/scenes
  attendless train deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.25 --data photos --size 384 --out runs/foveal
  attendless train deit_tiny_patch16_224 --weights deit.safetensors --task segmentation --data pets --out runs/pets
  torchrun --nproc_per_node 8 -m attendless train deit_small_patch16_224 --data imagenet --recipe deit --out runs/deit
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
from typing import Any

from . import arguments, output, tasks
from . import recipe_flags as fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from attendless.dense import recipes as theirs
    from attendless.train.recipe import RECIPES, Recipe, summary

    common(parser)
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.task(parser)
    text = "retinanet for detection; semantic_fpn (default) or upernet for segmentation; semantic_fpn:channels=64"
    parser.add_argument("--head", metavar="H", help=text)
    recipes = "; ".join(f"{name}: {summary(name)}" for name in RECIPES)
    recipes += "".join(
        f"; {name}: {theirs.summary(task, name)}" for task in theirs.RECIPES for name in theirs.RECIPES[task]
    )
    chosen = "finetune for a model that comes with weights, quick otherwise; small_detection, small_segmentation"
    parser.add_argument("--recipe", metavar="R", help=f"{recipes} (default: {chosen})")
    fields.add(parser, "the recipe's fields", Recipe)
    fields.add(parser, "fields of detection and segmentation alone", theirs.DenseRecipe, but=Recipe)


def common(parser: argparse.ArgumentParser) -> None:
    """The words that `train` and `distill` share."""
    from attendless.train.recipe import Run

    arguments.model(parser)
    parser.add_argument(
        "--data", metavar="DIR", required=True, help="folder of images, `scenes`, or torchvision's NAME@DIR"
    )
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder for weights and metrics; a run in it is resumed"
    )
    arguments.threads(parser)
    arguments.json(parser)
    fields.add(parser, "how it is run", Run)


def run(args: argparse.Namespace) -> int:
    from attendless.dense.recipes import DenseRecipe
    from attendless.errors import UserError
    from attendless.train import Recipe

    task = tasks.task_of(args.model, args.task)
    if task == "classification":
        from attendless.train import train as learn

        if args.head:
            raise UserError(f"--head {args.head!r} is for --task detection or segmentation")
        kind, more = Recipe, {}
    else:
        from attendless.dense.training import train as learn  # type: ignore[assignment]

        kind, more = DenseRecipe, {"task": task, "head": args.head}
    for other in (Recipe, DenseRecipe):
        fields.refuse(args, other, kind, task)
    result = learn(
        args.model,
        args.data,
        **more,
        attention=args.attention,
        tokens=args.tokens,
        recipe=args.recipe,
        out=args.out,
        weights=args.weights,
        pretrained=args.pretrained,
        run=prepare(args),
        **fields.given(args, kind),
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
        if "task" in read_header(file):
            return [shlex.join(["attendless", "eval", file, "--data", data])]
    except UserError:  # bare weights, of a model that no file can describe
        return [shlex.join(["attendless", "eval", model, "--weights", file, "--data", data, *plain])]
    return [shlex.join(["attendless", "eval", file, "--data", data, *plain]), shlex.join(["attendless", "bench", file])]
