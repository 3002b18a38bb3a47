"""Load weights from a file into a model of any input size and number of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..backbones.pyramid import Pyramid
from ..backbones.weights import fit_attention, from_pyramids
from ..errors import UserError
from ..sizes import image_config
from .official import from_official


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch checkpoint, read without unpickling code."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"weights {str(path)!r}: no such file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except Exception as error:  # a damaged header can make the reader fail in any way
            raise UserError(f"weights {str(path)!r} are damaged or not a safetensors file: {error}") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the reader raises many types for other files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"weights {str(path)!r} cannot be read as plain tensors: {reason}") from None
    for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"weights {str(path)!r} do not hold a state dict: names with their tensors")
    return {str(name).removeprefix("module."): value for name, value in found.items()}


def check_finite(tensors: Iterable[tuple[str, Tensor]], whose: str) -> None:
    """Raise if any of the named tensors holds NaN or infinity."""
    for name, value in tensors:
        if not value.is_floating_point() or value.is_meta:
            continue
        finite = torch.isfinite(value if value.element_size() > 1 else value.float())  # not supported for 8-bit floats
        if not bool(finite.all()):
            bad = int((~finite).sum())
            raise UserError(f"{whose}: {name} holds NaN or infinity ({bad} of {value.numel()} values)")


def other_kind(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Say of each tensor of a wrong kind what it is: real floating-point weights are expected where the model has them,
    and plain tensors everywhere."""
    wrong = [f"{name} is {value.layout}" for name, value in given.items() if value.layout is not torch.strided]
    return wrong + [
        f"{name} is {value.dtype}, and floating-point numbers are expected"
        for name, value in given.items()
        if name in own and own[name].is_floating_point() and not value.is_floating_point()
    ]


def reset_classifier(model: nn.Module, num_classes: int) -> None:
    """Give a timm model or a backbone a new classifier; 0 classes remove it."""
    classifier: Any = model
    classifier.reset_classifier(num_classes)


def load_weights(model: nn.Module, weights: dict[str, Tensor], num_classes: int | None = None) -> None:
    """Load `weights` into `model`, in place.

    Without `num_classes` the classifier is resized to the classes of the weights. With it, a classifier that does not
    fit keeps its initial weights. Everything else must fit.
    """
    heads = _classifiers(model)
    rows = [weights[name].shape for head in heads if (name := f"{head}.weight") in weights and weights[name].ndim]
    found = rows[0][0] if rows else None
    if found is not None and num_classes is None and found != model.num_classes:
        reset_classifier(model, found)
    try:
        adapted = _adapt(model, weights)
    except UserError:
        raise
    except Exception as error:  # timm's conversion code does not check the weights before it uses them
        told = f"{type(error).__name__}: {error}"[:200]
        raise UserError(f"these weights do not fit the model: they are of another one ({told})") from None
    own = model.state_dict()
    excused = tuple(f"{head}." for head in heads) if num_classes is not None else ()
    if num_classes is not None:
        adapted = {k: v for k, v in adapted.items() if not k.startswith(excused) or _fits(own, k, v)}
    load_strictly(model, adapted, excused)


def load_strictly(model: nn.Module, weights: dict[str, Tensor], excused: tuple[str, ...] = ()) -> None:
    """Load `weights` under the names of `model`, in place. Raise if one is missing, unexpected, of another shape, no
    real number or not finite; weights whose names begin with one of `excused` may be missing."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights and not name.startswith(excused or "\0")]
    wrong += [f"{name} is unexpected" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(value.shape)}, not {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and not _fits(own, name, value)
    ]
    wrong += other_kind(own, weights)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"these weights do not fit the model: {wrong[0]}{more}")
    check_finite(weights.items(), "these weights are damaged")
    model.load_state_dict(weights, strict=False)


def _adapt(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename published weights to the model's names, and resample positions to its grid."""
    weights = from_official(weights, model)
    if isinstance(model, VisionTransformer):
        return checkpoint_filter_fn(weights, model)
    return fit_attention(from_pyramids(weights), model) if isinstance(model, Pyramid) else weights


def _fits(own: dict[str, Tensor], name: str, value: Tensor) -> bool:
    return name in own and own[name].shape == value.shape


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    named = image_config(model).get("classifier") or "head"
    return (named,) if isinstance(named, str) else tuple(named)
