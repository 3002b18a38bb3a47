"""Predictor add-ons: small files with the trained predictors of attentions that select their keys.

A predictor is trained with the model frozen, so it is used with the stock weights of the model it was trained for:
`convert(model, "sparsifiner:keep=0.25", predictor="deit_tiny_patch16_224")`, where the name is one that comes with
attendless, or a path. The file is safetensors; its header names the model, the grid and the training.

The best keys depend on `rest`, the treatment of the other keys, so each predictor that comes with attendless was
trained for one `rest`. A model's name takes, for each layer, the predictor for its `rest`;
`deit_tiny_patch16_224-dropped` takes that one for every `rest`. A layer for whose `rest` there is none keeps its
initial predictor, with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..attention import Grid
from ..attention.selection import HasPredictor
from ..errors import UserError
from ..integrations.slot import Slot
from ..storage import read_described, write_described

_KEY = "attendless-predictor"


def shipped() -> dict[str, Path]:
    """The predictors that come with attendless, by `MODEL-REST`."""
    folder = Path(__file__).parents[1] / "predictors"
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


def shipped_models() -> list[str]:
    """The models for which predictors come with attendless."""
    return sorted({name.rpartition("-")[0] for name in shipped()})


def predicts(attention: nn.Module) -> bool:
    """Whether an attention has a trainable predictor."""
    return isinstance(attention, HasPredictor)


def save_predictor(slots: Sequence[Slot], model: str, path: str | Path, card: Mapping[str, Any] | None = None) -> None:
    """Write the predictors of a model's attentions; `card` describes the training."""
    found = {i: slot for i, slot in enumerate(slots) if predicts(slot.attn)}
    if not found:
        raise UserError("no attention of this model has a predictor to save")
    tensors = {
        f"{i}.{name}": value.detach().cpu().clone().contiguous()
        for i, slot in found.items()
        for name, value in slot.attn.predictor().items()
    }
    grid = next(iter(found.values())).grid
    header = {"model": model, "layers": len(slots), "grid": [grid.height, grid.width, grid.prefix], "card": card or {}}
    write_described(path, _KEY, json.dumps(header), tensors)


def read_predictor(name: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the weights of a predictor, given by its path or by the name of a shipped one."""
    known = shipped()
    path = known.get(str(name), Path(name))
    if not path.is_file():
        there = f"attendless comes with {', '.join((*shipped_models(), *known))}"
        raise UserError(f"predictor {str(name)!r}: no such file, and {there}")
    otherwise = "is not a predictor: `attendless distill` writes them as predictor.safetensors"
    text, tensors = read_described(path, _KEY, otherwise)
    return json.loads(text), tensors


def put_predictor(slots: Sequence[Slot], name: str | Path) -> None:
    """Load a predictor into every attention that has one, resampled to the grid of its layer."""
    places = {i: slot for i, slot in enumerate(slots) if predicts(slot.attn)}
    if not places:
        raise UserError(f"predictor {str(name)!r} was given, but no attention here has one: sparsifiner has")
    by_rest = str(name) in shipped_models()
    for one, some in (_for_each_rest(places, str(name)) if by_rest else {name: places}).items():
        _put(slots, some, one)


def _for_each_rest(places: Mapping[int, Slot], model: str) -> dict[str | Path, dict[int, Slot]]:
    """The predictors of a model, and the layers whose `rest` each was trained for."""
    found: dict[str | Path, dict[int, Slot]] = {}
    for rest in sorted({_rest(slot) for slot in places.values()}):
        if f"{model}-{rest}" in shipped():
            found[f"{model}-{rest}"] = {i: slot for i, slot in places.items() if _rest(slot) == rest}
            continue
        others = " or ".join(repr(other) for other in shipped() if other.startswith(f"{model}-"))
        warnings.warn(
            f"no predictor of {model} was trained for rest={rest}: these layers keep their initial predictor, which is "
            f"better than one trained for another rest. To use one of those, name it: {others}",
            stacklevel=4,
        )
    return found


def _rest(slot: Slot) -> str:
    """The treatment of keys that are not selected."""
    return str(getattr(slot.attn.options, "rest", "dropped"))


def _put(slots: Sequence[Slot], places: Mapping[int, Slot], name: str | Path) -> None:
    header, tensors = read_predictor(name)
    if header["layers"] != len(slots):
        raise UserError(
            f"predictor {str(name)!r} was trained for {header['layers']} layers of {header['model']}, "
            f"this model has {len(slots)}"
        )
    grid = Grid(*header["grid"])
    for i, slot in places.items():
        mine = {key.partition(".")[2]: value for key, value in tensors.items() if key.partition(".")[0] == str(i)}
        if not mine:
            raise UserError(f"predictor {str(name)!r} has no weights for {slot.name}")
        slot.attn.take_predictor(mine, grid)
