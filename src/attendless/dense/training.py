"""`train` for detection and segmentation: a backbone with a head, trained on annotated images by a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from ..convert import convert, open_model
from ..convert.source import random_weights
from ..errors import UserError, unknown
from ..randomness import WEIGHTS, randomness
from ..sizes import input_size
from ..train.disk import goes_on_later
from ..train.recipe import Run
from ..train.state import Data, Phase
from ..train.training import (
    Begin,
    Result,
    finish,
    model_text,
    set_drop,
)
from ..train.worth import slower
from .coco import open_boxes
from .masks import open_masks
from .model import Dense, build, head_class, head_for
from .recipes import DEFAULT_RECIPES, DenseRecipe, dense_recipe
from .tasks import TASK, DenseObjective


def train(
    model: str | Path | nn.Module,
    data: str | Path,
    *,
    task: str,
    head: str | None = None,
    attention: str | None = None,
    tokens: str | None = None,
    recipe: str | DenseRecipe | None = None,
    out: str | Path = "attendless-out/train",
    weights: str | Path | None = None,
    pretrained: bool = False,
    run: Run | None = None,
    **fields: Any,
) -> Result:
    """Train a detector or segmentor. The same call with the same `out` resumes an interrupted training.

    Args:
        model: A backbone by name, as a file that `save` wrote or as a module; or a detector or segmentor from such a
            file, which keeps its head.
        data: A folder of annotated images.
        task: `detection` or `segmentation`.
        head: Spec of the head; default: `retinanet` or `semantic_fpn`.
        attention: The attention of the backbone; default: its own.
        tokens: The token reducer of the backbone; default: its own.
        recipe: Name of a recipe, or a recipe; default: the one for small data sets.
        out: The folder for weights, metrics and the recipe.
        weights: A file with weights of the backbone.
        pretrained: Download timm's pretrained weights of the backbone.
        run: How to run: device, workers, logging and checkpoints.
        fields: Fields of the recipe to replace, such as `epochs=5`.

    Returns:
        The folder's files and the final metrics.

    Raises:
        UserError: the arguments, the data and the model do not fit together.
    """
    chosen_head = head_for(task, head)
    head_class(chosen_head)  # its options, and the library it needs
    chosen = settle(recipe or DEFAULT_RECIPES[task], task, fields)
    train, val, note = (open_boxes if task == "detection" else open_masks)(data)
    remarks = [] if recipe else [f"recipe {DEFAULT_RECIPES[task]}: {chosen.epochs} epochs, lr {chosen.rate():g}"]
    if not isinstance(model, nn.Module) and random_weights(model, weights=weights, pretrained=pretrained):
        remarks.append("the backbone has random weights: training is much faster from --weights F")
    with randomness(WEIGHTS, chosen.seed):
        built = open_dense(
            model,
            chosen_head if head else None,
            task,
            len(train.classes),
            size=chosen.height_width,
            attention=attention,
            tokens=tokens,
            weights=weights,
            pretrained=pretrained,
        )
    set_drop(built.backbone, chosen)
    config = resolve_model_data_config(built.backbone)
    size = chosen.height_width or input_size(built.backbone)
    remarks.append(slower(built.backbone, size))
    pictures = Data(train, val, size, config["mean"], config["std"], len(train.classes), True, tuple(train.classes))
    about = {"task": task, "head": built.head_text}
    begin = Begin(built, model_text(model), data, built.attention, Path(out), run or Run(), note, remarks, about)
    with goes_on_later(begin.out):
        phase = Phase("train", chosen, {"extra": 1.0})
        return finish(begin.session(DenseObjective, [phase], pictures, task=TASK[task]))


def open_dense(
    model: str | Path | nn.Module,
    head: str | None,
    task: str,
    classes: int,
    *,
    size: tuple[int, int] | None = None,
    attention: str | None = None,
    tokens: str | None = None,
    weights: str | Path | None = None,
    pretrained: bool = False,
) -> Dense:
    """A detector or segmentor on a backbone given by name, file or module; an existing one keeps its head."""
    if isinstance(model, nn.Module):
        built: Any = with_attention(model, attention, tokens)
    else:
        built = open_model(
            model,
            attention=attention,
            tokens=tokens,
            weights=weights,
            pretrained=pretrained,
            size=None if size is None else whole_patches(size),
            below_breakeven="keep",
            tasks=True,
        )
        if isinstance(built, Dense):
            if weights is not None or pretrained:
                raise UserError(f"{str(model)!r} contains the weights of backbone and head: leave out --weights")
            built = with_attention(built, attention, tokens)
    if not isinstance(built, Dense):
        # timm's ViT is converted to our backbone, which supports every image size; other models are used as they are.
        backbone = convert(built, "full", below_breakeven="keep") if _plain_vit(built) else built
        return build(backbone, head_for(task, head), classes)
    if built.task != task or (head and head != built.head_text):
        raise UserError(
            f"the model is made for {built.task} with {built.head_text}, not for {task} with {head or task}"
        )
    if built.num_classes != classes:
        raise UserError(f"the model has {built.num_classes} classes, but the data has {classes}")
    return built


def with_attention(model: nn.Module, attention: str | None, tokens: str | None) -> Any:
    """The model (backbone, detector or segmentor) with another attention and token reduction in its backbone."""
    if attention is None and tokens is None:
        return model
    if not isinstance(model, Dense):
        return convert(model, attention, tokens=tokens, below_breakeven="keep")
    backbone = convert(model.backbone, attention, tokens=tokens, below_breakeven="keep")
    made = build(backbone, model.head_text, model.num_classes)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("features.backbone.")}
    made.load_state_dict(own, strict=False)
    made.pretrained_cfg = made.default_cfg = model.pretrained_cfg
    return made.train(model.training)


def whole_patches(size: tuple[int, int], multiple: int = 32) -> tuple[int, int]:
    """The size that images of `size` are padded to."""
    return size[0] + -size[0] % multiple, size[1] + -size[1] % multiple


def _plain_vit(model: nn.Module) -> bool:
    from timm.models.vision_transformer import VisionTransformer

    from ..backbones import is_backbone

    return isinstance(model, VisionTransformer) and not is_backbone(model)


def settle(text: str | DenseRecipe, task: str, fields: dict[str, Any]) -> DenseRecipe:
    """A recipe with some fields replaced; an unknown name raises an error that lists the valid ones."""
    known = [field.name for field in dataclasses.fields(DenseRecipe)]
    for name in fields:
        if name not in known:
            raise unknown(f"recipe field of {task}", name, known)
    return dataclasses.replace(dense_recipe(text, task), **fields)
