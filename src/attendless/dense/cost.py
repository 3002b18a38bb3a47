"""MACs of a detector or segmentor: the backbone by formula, the head by running it on the meta device."""

from __future__ import annotations

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..attention import Macs
from ..measure.macs import count
from .model import Dense


def dense_macs(model: Dense, size: tuple[int, int], *, learning: bool = False) -> Macs:
    """Multiply-accumulates for one image of `size` (height, width) after padding. `core` is that of the backbone's
    attention. `learning` includes layers that are used in training only."""
    features = model.features
    height, width = (side + -side % features.multiple for side in size)
    batch = 2 if learning else 1  # batch norm needs more than one image
    head = copy.deepcopy(model).to("meta").train(learning)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        head.decode(head.features.levels(head.features.empty((height, width), batch)))
    return count(model.backbone, (height, width)) + Macs(other=counter.get_total_flops() // 2 // batch)
