"""timm's pre-norm block around an attention that takes and returns the context."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from ..attention import Attention, Context, Grid, Spec, create
from ..errors import UserError


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), each through LayerScale and stochastic depth where present."""

    def __init__(self, attn: Attention, parts: nn.Module) -> None:
        """Take over every part of timm's block `parts` except its attention."""
        super().__init__()
        # timm's order, so that a state dict lists its keys as timm's does.
        self.norm1 = parts.norm1
        self.attn = attn
        self.ls1 = parts.ls1
        self.drop_path1 = parts.drop_path1
        self.norm2 = parts.norm2
        self.mlp = parts.mlp
        self.ls2 = parts.ls2
        self.drop_path2 = parts.drop_path2

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        out, context = self.attn(self.norm1(x), context)
        x = self.attn.refine(x + self.drop_path1(self.ls1(out)), context)
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, context


def rebuild_block(block: nn.Module, spec: Spec, grid: Grid) -> Block:
    """timm's block with its attention replaced by `spec`, taking over every weight of the same name and shape."""
    if type(block) is not TimmBlock:
        raise UserError(f"block type {type(block).__name__} is not supported: only timm's pre-norm Block is")
    attn = create_like(block.attn, spec, grid)
    return Block(attn, block)


def create_like(attn: Any, spec: Spec, grid: Grid) -> Attention:
    """An attention of the same width, heads, biases, norms and dropouts as a timm `Attention`, and with its weights."""
    if getattr(attn, "gate", None) is not None or not hasattr(attn, "qkv"):
        raise UserError(
            f"attention type {type(attn).__name__} is not supported: only timm's Attention without a gate is"
        )
    weight = attn.qkv.weight
    norm = next((n for n in (attn.q_norm, attn.norm) if not isinstance(n, nn.Identity)), None)
    ours = create(
        spec,
        weight.shape[1],
        attn.num_heads,
        grid=grid,
        head_dim=attn.head_dim,
        qkv_bias=attn.qkv.bias is not None,
        qk_norm=not isinstance(attn.q_norm, nn.Identity),
        scale_norm=not isinstance(attn.norm, nn.Identity),
        proj_bias=attn.proj.bias is not None,
        attn_drop=attn.attn_drop.p,
        proj_drop=attn.proj_drop.p,
        device=weight.device,
        dtype=weight.dtype,
        **({} if norm is None else {"norm_layer": _norm_like(norm)}),
    )
    take_weights(ours, attn.state_dict())
    return ours.train(attn.training)


def take_weights(module: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Load the weights whose name and shape fit; return their names."""
    own = module.state_dict()
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    module.load_state_dict(fitting, strict=False)
    return list(fitting)


def _norm_like(norm: Any) -> Callable[..., nn.Module]:
    return partial(type(norm), eps=norm.eps)
