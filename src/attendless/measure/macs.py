"""Multiply-accumulates: by formula for attendless backbones, by running the model for any other.

A fused multiply-add counts once. The formulas count the function computed, whatever kernel computes it. Running counts
what PyTorch executes (its FlopCounterMode, halved). Both agree where PyTorch computes the whole product, and tests
compare them.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..attention import Attention, Macs
from ..backbones import is_backbone
from ..backbones.cost import Layer, parameters
from ..errors import UserError
from ..integrations.discovery import exchangeable, find_slots
from ..sizes import channels, input_size

#: Name of the row for the parts without a formula, in models whose blocks alone have formulas.
REST = "all else (counted by running)"


def layer_costs(model: nn.Module, size: int | tuple[int, int] | None = None) -> list[Layer]:
    """A model's cost layer by layer, for one image of `size` (its own size if none is given).

    attendless backbones are counted by formula. Of timm's Swin, PVT v2 and XCiT, at their own size, the blocks are
    counted by formula; the remainder of the model is counted by running it.
    """
    if is_backbone(model):
        return model.costs(to_2tuple(size) if size else None)
    if not exchangeable(model):
        raise UserError(f"{type(model).__name__} has no formulas for its layers: it can only be counted by running it")
    if size and to_2tuple(size) != input_size(model):
        raise UserError(f"{type(model).__name__} is counted at its own size, {input_size(model)}: resize it first")
    rows = []
    for slot in find_slots(model):
        choice = slot.attn.choice(slot.grid) if isinstance(slot.attn, Attention) else None
        rows.append(Layer(slot.name, slot.grid, slot.now + slot.others, parameters(slot.block), slot.spec, choice))
    rest = count_by_running(model).total - sum(row.macs.total for row in rows)
    weights = parameters(model) - sum(row.params for row in rows)
    return [*rows, Layer(REST, rows[0].grid, Macs(other=rest), weights)]


def count(model: nn.Module, size: int | tuple[int, int] | None = None) -> Macs:
    """Multiply-accumulates of one image: by formula if the model has one, otherwise by running it."""
    if is_backbone(model):
        return sum((layer.macs for layer in layer_costs(model, size)), start=Macs())
    return count_by_running(model, size)


def count_by_running(model: nn.Module, size: int | tuple[int, int] | None = None) -> Macs:
    """What PyTorch executes for one image, split by where in the model each product is computed."""
    height, width = to_2tuple(size) if size else input_size(model)
    parameter = next(model.parameters())
    image = torch.zeros(1, channels(model), height, width, device=parameter.device, dtype=parameter.dtype)
    was_training = model.training
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            model.eval()(image)
    finally:
        model.train(was_training)
    counts = {path: sum(ops.values()) // 2 for path, ops in counter.get_flop_counts().items()}
    products = {
        path: sum(n for op, n in ops.items() if _is_product(op)) // 2 for path, ops in counter.get_flop_counts().items()
    }
    total, attention = counts.get("Global", 0), _outermost(counts, "attn")
    mlp = sum(counts[path] for path in _outermost(counts, "mlp"))
    core = sum(products[path] for path in attention)
    projections = sum(counts[path] for path in attention) - core
    return Macs(core, projections, mlp, total - core - projections - mlp)


def _outermost(paths: Any, part: str) -> list[str]:
    """Paths whose last name is `part`, leaving out those inside another such part."""
    found = [path for path in paths if path.rsplit(".", 1)[-1] == part]
    return [path for path in found if not any(path.startswith(other + ".") for other in found)]


def _is_product(op: Any) -> bool:
    """Whether an op multiplies activations with activations, as attention cores do and linear layers do not."""
    name = str(op)
    return "bmm" in name or "attention" in name or name.startswith("attendless")
