"""How a model's weights begin, and how often its branches are dropped, where that follows from what it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from timm.layers import DropPath
from torch import nn


def start_attentions(blocks: Iterable[Any]) -> None:
    """Every attention's own weights as its authors start them, for training from scratch."""
    for block in blocks:
        block.attn.init_weights()


def share_drop_path(blocks: Iterable[Any]) -> None:
    """Branches of an attention's own (XCiT's local patch interaction) are dropped as often as the block's others."""
    for block in blocks:
        for branch in block.attn.modules():
            if isinstance(branch, DropPath):
                branch.drop_prob = getattr(block.drop_path1, "drop_prob", 0.0)


def start_convolutions(model: nn.Module) -> None:
    """Every convolution from N(0, 2 / fan out), its bias at zero, as PVT v2 and Twins do (so does timm).

    The fan out of a convolution in groups is that of one group: k² · outputs / groups.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = math.prod(layer.kernel_size) * layer.out_channels // layer.groups
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
