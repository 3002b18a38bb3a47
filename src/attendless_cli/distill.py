"""Teach a model that attends less, or keeps fewer tokens, to answer as the model it was made from: from its answers, its last tokens, its
attention maps, and from labels if there are any. The same command on the same folder continues where it stopped.

examples:
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --tokens evit:keep=0.7 --data photos --out runs/evit
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --attention foveal:keep=0.1 --data photos --out runs/foveal
  attendless distill deit_tiny_patch16_224 --weights deit.safetensors --attention linformer --data photos --out runs/lin --phase new:epochs=1 --phase all:epochs=3,tokens=1
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse

from . import arguments
from . import recipe_flags as fields
from .train import common, prepare, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from attendless.train.distilling import PHASES
    from attendless.train.recipe import Recipe

    common(parser)
    parser.add_argument(
        "--attention", metavar="A", help="attention spec, such as foveal:keep=0.1 (default: full, as the teacher's)"
    )
    arguments.tokens(parser, many=False)
    arguments.predictor(parser)
    names = ", ".join(PHASES)
    parser.add_argument(
        "--recipe", metavar="R", default="imitate", help=f"phases to go through: {names} (default: imitate)"
    )
    parser.add_argument(
        "--phase", metavar="P", action="append", default=[],
        help="change one phase's recipe fields, loss weights (label, logits, tokens, maps, patches, extra, "
        "temperature, mixtoken) or what is trained (new, old: parameters the teacher lacks or has), such as "
        "all:epochs=3,tokens=1,trained=old; may be repeated",
    )  # fmt: skip
    fields.add(parser, "recipe fields, for every phase", Recipe)


def run(args: argparse.Namespace) -> int:
    from attendless.train import Recipe, distill

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
        run=prepare(args),
        **fields.given(args, Recipe),
    )
    return report(args, result)
