"""Train a model with efficient attention or token reduction to reproduce the model it was made from: from the teacher's
predictions, last-layer tokens and attention maps, and from labels where there are any. The same command on the same
folder resumes.

examples:
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --tokens evit:keep=0.7 --data photos --out runs/evit
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.1 --data photos --out runs/foveal
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --attention linformer --data photos --out runs/lin --phase new:epochs=1 --phase all:epochs=3,loss.tokens=1
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse

from . import arguments, settings
from .train import common, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common(parser)
    text = "attention spec of the student, such as foveal:keep=0.1 (default: full, as in the teacher)"
    parser.add_argument("--attention", metavar="A", help=text)
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    text = "phases to run: imitate, sparsifiner, evit or dynamicvit; `attendless recipes` describes them"
    parser.add_argument("--recipe", metavar="R", default="imitate", help=text)
    text = "change one phase: recipe fields, loss weights (loss.logits=1) or what is trained (new or old: parameters "
    text += "that the teacher lacks or has), such as all:epochs=3,loss.tokens=1,trained=old; may be repeated "
    text += "(default: none)"
    parser.add_argument("--phase", metavar="P", action="append", default=[], help=text)
    settings.add(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.train import Recipe, Run, distill

    fields, how = settings.read(args, "a classification recipe", Recipe, Run)
    arguments.use_threads(args)
    result = distill(
        args.model,
        args.data,
        attention=args.attention,
        tokens=args.tokens,
        weights=args.weights,
        pretrained=args.pretrained,
        recipe=args.recipe,
        predictor=args.predictor,
        change=dict(text.partition(":")[::2] for text in args.phase),
        out=args.out,
        run=Run(**how),
        **fields,
    )
    return report(args, result)
