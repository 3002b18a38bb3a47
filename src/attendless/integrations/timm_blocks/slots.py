"""Slots of timm's Swin, PVT v2 and XCiT: a whole block is exchanged.

`window+window:shift=3`, `reduced:ratio=8/…` and `xca` are the attentions of these models, and compute the same as
before. Other attentions drop the weights that they have no use for (relative position biases, reductions, temperatures)
and need training. They must not read anything from other layers. The report lists the dropped weights.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.pvt_v2 import Attention as PvtAttention
from torch import Tensor, nn

from ...attention import Attention, Macs, Spec, create, parse
from ...backbones.block import frozen_alike, take_weights
from ...backbones.cost import weight_macs
from ...errors import UserError
from ...sizes import Size, input_size
from ..slot import Slot
from ..user_code import check_projections, refuse_user_code
from .blocks import KINDS, Kind, TimmBlock


def supports(model: nn.Module) -> bool:
    return type(model) in KINDS


def find(model: nn.Module, size: Size | None = None) -> list[Slot]:
    """Every attention layer of such a model, at the model's own size."""
    kind, own = KINDS[type(model)], input_size(model)
    found = []
    for name, grid in kind.layers(model, own):
        block: Any = model.get_submodule(name)
        check_projections(block.attn, f"{name}.attn")
        convolution = getattr(block, "local_mp", None)
        other = 0 if convolution is None else weight_macs(convolution, grid.tokens)
        others = Macs(mlp=weight_macs(block.mlp, grid.tokens), other=other)
        found.append(Slot(name, grid, model, BlockExchange(model, name, kind), own, others, full=False))
    return found


class BlockExchange:
    """Adapter that exchanges a block of timm's for a `TimmBlock`."""

    def __init__(self, model: nn.Module, name: str, kind: Kind) -> None:
        parent, _, index = name.rpartition(".")
        self.blocks: Any = model.get_submodule(parent)
        self.index, self.kind = int(index), kind
        self.original: nn.Module | None = None

    @property
    def block(self) -> Any:
        return self.blocks[self.index]

    @property
    def attn(self) -> nn.Module:
        return self.block.attn

    @property
    def weights(self) -> dict[str, Tensor]:
        found = dict(self.attn.state_dict(keep_vars=True))
        if isinstance(self.attn, PvtAttention):
            # In attendless `norm` normalises the output; PVT's normalises the reduced keys.
            found |= {f"sr_{name}": found.pop(name) for name in list(found) if name.startswith("norm.")}
            for end in ("weight", "bias"):
                if f"q.{end}" in found:
                    found[f"qkv.{end}"] = torch.cat([found.pop(f"q.{end}"), found.pop(f"kv.{end}")])
        return found

    def make(self, slot: Slot, spec: Spec) -> Attention:
        attn: Any = self.attn
        weights = self.weights
        qkv = weights["qkv.weight"]
        ours = create(
            spec,
            qkv.shape[1],
            attn.num_heads,
            grid=slot.grid,
            head_dim=qkv.shape[0] // 3 // attn.num_heads,
            qkv_bias="qkv.bias" in weights,
            attn_drop=attn.attn_drop.p,
            proj_drop=attn.proj_drop.p,
            device=qkv.device,
            dtype=qkv.dtype,
        )
        if ours.reads:
            raise UserError(
                f"attention {spec} cannot be put into {slot.name}: timm's {type(slot.model).__name__} does not pass on "
                f"the {', '.join(sorted(ours.reads))} it reads"
            )
        take_weights(ours, weights)
        return frozen_alike(ours.train(attn.training), attn)

    def put(self, slot: Slot, attention: Attention) -> None:
        refuse_user_code(self.attn, f"{slot.name}.attn")
        if isinstance(self.block, TimmBlock):
            self.block.attn = attention
        else:
            refuse_user_code(self.block, slot.name, inside=False)
            self.original = self.block
            self.blocks[self.index] = self.kind.block(self.block, attention)

    def restore(self, slot: Slot) -> None:
        if self.original is not None:
            self.blocks[self.index], self.original = self.original, None
        elif isinstance(self.block, TimmBlock):  # exchanged earlier: the original block no longer exists
            self.put(slot, self.make(slot, parse("full")))

    def cost(self, slot: Slot, attention: Attention | None) -> Macs:
        return self.kind.macs(self.block, slot.grid) if attention is None else attention.macs(slot.grid)
