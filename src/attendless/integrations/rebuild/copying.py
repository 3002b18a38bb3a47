"""Copy a model into one that computes the same and whose attentions can be exchanged."""

from __future__ import annotations

import copy
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ...backbones.columnar import replaced_outputs
from ...errors import UserError
from ...sizes import image_config
from ..discovery import exchangeable, find_in_place, why_none
from ..support import convertible
from ..user_code import refuse_user_code
from . import hf_weights
from .architecture import Description, describe


def backbone_copy(model: nn.Module, *, in_place: bool = False) -> nn.Module:
    """Return a copy of `model` that computes the same and whose attentions can be exchanged.

    timm's `VisionTransformer` and some Hugging Face models are rebuilt as attendless backbones; the copies of other
    models stay what they are. With `in_place` this includes models that no file can describe, such as detectors and
    most models of Hugging Face.
    """
    if hf_weights.supports(model):
        refuse_user_code(model)
        return hf_weights.columnar(model)
    if exchangeable(model):
        return copy.deepcopy(model)
    if isinstance(model, VisionTransformer):
        return _take_over(_described(model).build(), model)
    served = bool(find_in_place(model)[0])
    if served and in_place:
        return copy.deepcopy(model)
    if served:
        raise UserError(
            f"{type(model).__name__} is not supported here: attendless.convert and attendless.patch serve it"
        )
    timm_names = [name for name in convertible() if not name.startswith("Hugging Face")]
    raise UserError(
        f"{type(model).__name__} is not supported: {why_none(model)}. There are: {', '.join(timm_names)}, attendless "
        "models and many of Hugging Face; `attendless list` prints all"
    )


def _described(model: VisionTransformer) -> Description:
    try:
        refuse_user_code(model, carried=replaced_outputs(model))
        return describe(model)
    except UserError as error:
        patch = "; attendless.patch exchanges its attentions in place"
        raise UserError(f"{error}{patch if find_in_place(model)[0] else ''}") from None


def _take_over(ours: Any, model: nn.Module) -> nn.Module:
    """Copy weights, device, precision, training mode, frozen weights and preprocessing of `model`."""
    first = next(model.parameters())
    ours.to(device=first.device, dtype=first.dtype)
    ours.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    for name, value in ours.named_parameters():
        value.requires_grad_(name not in frozen)
    ours.pretrained_cfg = ours.default_cfg = image_config(model)
    ours.set_grad_checkpointing(model.grad_checkpointing)
    if hasattr(model, "distilled_training"):
        ours.set_distilled_training(model.distilled_training)
    for name in replaced_outputs(model):  # `deepcopy` binds methods of `model` to `ours`
        setattr(ours, name, copy.deepcopy(vars(model)[name], {id(model): ours}))
    return ours.train(model.training)
