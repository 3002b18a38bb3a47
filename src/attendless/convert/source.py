"""Open MODEL as the command line and Python take it: a timm name, a file of `save`, or a Hugging Face folder."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..attention.registry import named
from ..errors import UserError
from ..integrations.pretrained import create_pretrained
from ..integrations.rebuild import hf_weights
from ..integrations.resize import resize
from ..integrations.weights import load_weights, read_weights, reset_classifier
from ..sizes import parse_size
from ..tokens import parse_tokens
from .conversion import convert
from .exchange import BelowBreakeven
from .files import load, read_header

__all__ = ["comparable", "open_model", "parse_size", "random_weights", "resize", "unknown_model"]


def open_model(
    model: str | Path,
    *,
    attention: str | None = None,
    tokens: str | None = None,
    weights: str | Path | None = None,
    size: int | tuple[int, int] | str | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    layers: str | None = None,
    below_breakeven: BelowBreakeven = "full",
    predictor: str | Path | None = None,
    readout: bool | None = None,
    tasks: bool = False,
) -> nn.Module:
    """Build a model by name or file, load weights, set its input size and convert it.

    Args:
        model: A name that timm knows, a file that `save` wrote, or a folder in Hugging Face's format.
        attention: The attention to convert to, as in `convert`; default: the model's own.
        tokens: The token reducer, as in `convert`; default: the model's own.
        weights: A file of weights (safetensors or a PyTorch state dict).
        size: Input size; default: the model's own.
        num_classes: Number of classes. If the weights have another number, the classifier is initialised anew, to be
            trained. Default: that of the weights.
        pretrained: Whether to fetch timm's pretrained weights, if `weights` is not given.
        layers: The layers to convert, as in `convert`.
        below_breakeven: What to do with a layer where `attention` does not pay, as in `convert`.
        predictor: Trained predictors, as in `convert`.
        readout: Whether the last layer is computed for the class token alone, as in `convert`.
        tasks: Whether a file may hold a detector or segmentor, which is then returned as it is.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: there is no such model, or it cannot be converted.
    """
    target = None if size is None else parse_size(size)
    path = Path(model)
    if _on_disk(model):
        built = (load(path) if path.is_file() else hf_weights.open_folder(path)).float()  # images are fp32
        if hasattr(built, "task") and not tasks:
            raise UserError(
                f"{str(model)!r} holds a model for {built.task}: `eval`, `predict` and `train` take it, and "
                "`attendless.load` in Python; all else is for classifiers and their backbones"
            )
        if hasattr(built, "task"):
            return built
        if num_classes is not None and num_classes != built.num_classes:
            reset_classifier(built, num_classes)
        if weights is not None:
            load_weights(built, read_weights(weights), num_classes)
        if target is not None:
            resize(built, target)
    else:
        built = _create(str(model), attention if layers is None else None, num_classes, pretrained and weights is None)
        if weights is not None:
            _load_and_resize(built, read_weights(weights), num_classes, target)
        elif target is not None:
            resize(built, target)
    asked = (
        _is_ours(str(model)) and layers is None and below_breakeven == "keep" and predictor is None
    )  # the constructor has set the attention
    if asked:
        attention = None
    if attention is None and tokens is None and readout in (None, getattr(built, "readout", False)):
        return built.eval()
    return convert(
        built,
        attention,
        tokens=tokens,
        layers=layers,
        below_breakeven=below_breakeven,
        predictor=predictor,
        readout=readout,
    ).eval()


def comparable(opening: Mapping[str, Any], attentions: Sequence[str], tokens: Sequence[str]) -> dict[str, Any]:
    """Options for `open_model` under which several attentions and token reducers are compared.

    If `opening` does not set `readout` and any of the models would have a class-token-only last layer by default, all
    of them get it: it would otherwise count as a gain of the attention.
    """
    several = max(1, len(attentions)) * max(1, len(tokens)) > 1
    by_default = any(spec.name != "full" for text in attentions for spec in named(text))
    by_default = by_default or any(parse_tokens(text) is not None for text in tokens)
    shared = True if several and by_default else None
    return {**opening, "readout": shared if opening.get("readout") is None else opening["readout"]}


def random_weights(model: str | Path, *, weights: str | Path | None = None, pretrained: bool = False) -> bool:
    """Whether `open_model` returns a model whose weights were never trained."""
    if weights is not None:
        return False
    if Path(model).is_file():
        found = read_header(model).get("conversion")
        return isinstance(found, dict) and bool(found.get("random_weights"))
    return not pretrained and not _on_disk(model)


def _on_disk(model: str | Path) -> bool:
    """Whether MODEL is a file or folder; the name of a timm model takes precedence over a folder of that name."""
    path = Path(model)
    return bool(str(model)) and (path.is_file() or (path.is_dir() and not timm.is_model(str(model))))


def _create(name: str, attention: str | None, num_classes: int | None, pretrained: bool) -> nn.Module:
    if not timm.is_model(name):
        raise unknown_model(name)
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if _is_ours(name) and attention is not None:
        arguments["attention"] = attention
    return create_pretrained(name, **arguments) if pretrained else timm.create_model(name, **arguments)


def _is_ours(name: str) -> bool:
    """Whether the name is that of an attendless model, whose constructor takes the attention."""
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("attendless.")


def _load_and_resize(model: nn.Module, weights: Any, num_classes: int | None, size: tuple[int, int] | None) -> None:
    """Load and resize; position embeddings are resampled once, from the grid of the weights to that of `size`."""
    positions = weights.get("pos_embed")
    native = positions is None or getattr(model, "pos_embed", None) is None or positions.shape == model.pos_embed.shape
    if size is not None and not native:
        resize(model, size)
    load_weights(model, weights, num_classes)
    if size is not None and native:
        resize(model, size)


def unknown_model(name: str) -> UserError:
    """The error for a MODEL that is neither on disk nor known to timm, with similar names."""
    if "/" in name or name.endswith(".safetensors"):
        return UserError(f"model {name!r}: no such file, and no such name in timm")
    close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return UserError(f"unknown model {name!r}: neither a file nor a name timm knows.{hint}")
