"""The model of a variant. Weights that it shares with full attention start from the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from torch import nn

from attendless.backbones.block import take_weights
from attendless.convert import convert, load
from attendless.convert.source import unknown_model
from attendless.errors import UserError
from attendless.integrations.resize import check_patches, resize
from attendless.integrations.weights import reset_classifier
from attendless.randomness import WEIGHTS, randomness
from attendless.sizes import input_size

from .variants import Setting, Variant


def build(variant: Variant, classes: int, seed: int = 0) -> Any:
    """The model to train: every weight that `full` has with the same name and shape starts from the same values."""
    model = _draw(variant.setting, variant.attention, classes, seed)
    take_weights(model, dense(variant.setting, classes, seed).state_dict())
    return model


def dense(setting: Setting, classes: int, seed: int = 0) -> Any:
    """The setting's model with full attention."""
    return _draw(setting, "full", classes, seed)


def _draw(setting: Setting, attention: str, classes: int, seed: int) -> nn.Module:
    with randomness(WEIGHTS, seed):
        model: Any = _create(setting, attention, classes)
    size = setting.recipe.height_width
    if size is not None and tuple(getattr(model.patch_embed, "img_size", size)) != size:
        resize(model, size)
    check_patches(model.patch_embed, input_size(model))
    return model


def _create(setting: Setting, attention: str, classes: int) -> nn.Module:
    if Path(setting.model).is_file():
        model = load(setting.model)
        if setting.patch:
            raise UserError(f"{setting.model!r} is a file with patches of its own: leave --patch out")
        if model.num_classes != classes:
            reset_classifier(model, classes)
        return convert(model, attention, below_breakeven="keep", readout=True)  # for every attention, `full` too
    if not timm.is_model(setting.model):
        raise unknown_model(setting.model)
    arguments: dict[str, Any] = {"num_classes": classes}
    if setting.patch:
        arguments["patch_size"] = setting.patch
    if setting.recipe.height_width:
        arguments["img_size"] = setting.recipe.height_width
    ours = timm.model_entrypoint(setting.model).__module__.startswith("attendless.")
    try:
        if ours:
            return timm.create_model(setting.model, attention=attention, **arguments)
        model = timm.create_model(setting.model, **arguments)
    except TypeError as error:
        raise UserError(f"model {setting.model!r} does not take {', '.join(arguments)}: {error}") from None
    return convert(model, attention, below_breakeven="keep", readout=True)
