"""Train a model on a folder of images. The output folder receives weights, metrics, curves and the recipe. The same
command on the same folder resumes, bit-identical to an uninterrupted run. Under torchrun it uses several processes.

--task detection reads COCO's JSON files; --task segmentation reads a folder of images/ and masks/, VOC or ADE20K. MODEL
is then the backbone, and --head the head on top of it.

examples:
  attendless train columnar_micro_patch4_32 --data scenes --recipe scenes --out runs/scenes
  attendless train deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.25 --data photos --size 384 --out runs/foveal
  attendless train deit_tiny_patch16_224 --data photos --recipe quick --set lr=5e-4 drop_path=0.1 --out runs/quick
  attendless train deit_tiny_patch16_224 --weights deit.safetensors --task segmentation --data pets --out runs/pets
  torchrun --nproc_per_node 8 -m attendless train deit_small_patch16_224 --data imagenet --recipe deit --out runs/deit
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
from typing import Any

from . import arguments, output, settings, tasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common(parser)
    arguments.attention(parser, many=False)
    arguments.tokens(parser, many=False)
    arguments.task(parser)
    text = "head for --task: retinanet (detection), semantic_fpn or upernet (segmentation), with options such as "
    text += "semantic_fpn:channels=64 (default: retinanet or semantic_fpn)"
    parser.add_argument("--head", metavar="H", help=text)
    text = "recipe, such as quick or quick:epochs=5; `attendless recipes` lists them (default: finetune for a model "
    text += "with weights, quick otherwise; small_detection, small_segmentation)"
    parser.add_argument("--recipe", metavar="R", help=text)
    settings.add(parser)


def common(parser: argparse.ArgumentParser) -> None:
    """The arguments that `train` and `distill` share."""
    arguments.model(parser)
    text = "folder of images, `scenes` (included), or a torchvision data set as NAME@DIR"
    parser.add_argument("--data", metavar="DIR", required=True, help=text)
    text = "folder for weights and metrics; a run in it is resumed"
    parser.add_argument("--out", metavar="DIR", type=arguments.target("run"), required=True, help=text)
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.dense.recipes import DenseRecipe
    from attendless.errors import UserError
    from attendless.train import Recipe, Run

    task = tasks.task_of(args.model, args.task)
    owner = f"a {task} recipe"
    options: dict[str, Any] = {}
    if task == "classification":
        from attendless.train import train as train_task

        if args.head:
            raise UserError(f"--head {args.head!r} is for --task detection or segmentation")
        fields, how = settings.read(args, owner, Recipe, Run)
    else:
        from attendless.dense.training import train as train_task

        fields, how = settings.read(args, owner, DenseRecipe, Run)
        options = {"task": task, "head": args.head}
    arguments.use_threads(args)
    result = train_task(
        args.model,
        args.data,
        **options,
        attention=args.attention,
        tokens=args.tokens,
        recipe=args.recipe,
        out=args.out,
        weights=args.weights,
        pretrained=args.pretrained,
        run=Run(**how),
        **fields,
    )
    return report(args, result)


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
    """The commands to run next on the files that a run wrote."""
    import shlex

    from attendless.convert.files import read_header
    from attendless.errors import UserError

    file = str(result.out / ("best.safetensors" if result.best is not None else "last.safetensors"))
    plain = [] if "top1" in result.metrics else ["--no-labels"]  # the labels of the images were not the model's classes
    try:
        if "task" in read_header(file):
            return [shlex.join(["attendless", "eval", file, "--data", data])]
    except UserError:  # weights alone, of a model that a file cannot describe
        return [shlex.join(["attendless", "eval", model, "--weights", file, "--data", data, *plain])]
    return [shlex.join(["attendless", "eval", file, "--data", data, *plain]), shlex.join(["attendless", "bench", file])]
