"""timm's pre-norm block around an attention that takes and returns the context."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from timm.models._manipulate import checkpoint
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from ..attention import (
    Attention,
    Context,
    Grid,
    Macs,
    Spec,
    create,
)
from ..attention.fitting import fitted
from ..errors import UserError
from ..sparse.dispatch import carried
from ..tokens import Reducer
from .cost import Layer, parameters, weight_macs


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), each through LayerScale and stochastic depth where present.

    Between the two, or before them, a `reducer`, if there is one, drops or merges tokens.
    """

    def __init__(
        self,
        attn: Attention,
        norm1: nn.Module,
        norm2: nn.Module,
        mlp: nn.Module,
        *,
        ls1: nn.Module | None = None,
        ls2: nn.Module | None = None,
        drop_path1: nn.Module | None = None,
        drop_path2: nn.Module | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__()
        # timm's order, so that a state dict lists its keys as timm's does.
        self.norm1 = norm1
        self.attn = attn
        self.ls1 = ls1 or nn.Identity()
        self.drop_path1 = drop_path1 or nn.Identity()
        self.norm2 = norm2
        self.mlp = mlp
        self.ls2 = ls2 or nn.Identity()
        self.drop_path2 = drop_path2 or nn.Identity()
        self.reducer = reducer

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        before, between = self.reducers()
        wants = context.wants
        asked = wants if between is None else wants | between.reads
        if before is not None:
            x, context = before(x, context)
        out, context = self.attn(self.norm1(x), context.only(self.attn.reads | self.attn.takes).wanting(asked))
        missing = [entry for entry in asked if getattr(context, entry) is None]
        if missing:
            raise UserError(f"attention {self.attn.spec} must provide {', '.join(missing)}, but did not")
        x = self.attn.refine(x + self.drop_path1(self.ls1(out)), context)
        if between is not None:
            x, context = between(x, context)
        # Entries that the next layer does not read are dropped, so at most one layer's scores are in memory.
        context = context.only(wants).wanting(wants)
        x = x + self.drop_path2(self.ls2(self.feed_forward(self.norm2(x), context.grid)))
        return x, context

    def reducers(self) -> tuple[Reducer | None, Reducer | None]:
        """The reducer that runs before attention, and the one that runs after it."""
        return (self.reducer, None) if self.reducer is not None and self.reducer.first else (None, self.reducer)

    def feed_forward(self, x: Tensor, grid: Grid) -> Tensor:
        return self.mlp(x)

    def mlp_macs(self, grid: Grid) -> int:
        return weight_macs(self.mlp, grid.tokens)

    def check(self, grid: Grid) -> Grid:
        """Raise if the attention does not support the grid that enters the block; return the grid after the block."""
        after = self.grid_after(grid)
        serves = after if self.reducer is not None and self.reducer.first else grid
        if serves.reduced:
            self.attn.check(serves)
        return after

    def grid_after(self, grid: Grid) -> Grid:
        """The grid that leaves the block."""
        return grid if self.reducer is None else self.reducer.reduced(grid)

    def cost(self, name: str, grid: Grid, wants: Collection[str] = (), batch: int = 1) -> Layer:
        """The block's row in its backbone's cost: MACs of one image, and the backend for `batch` images."""
        before, between = self.reducers()
        reducing = sum((r.macs(grid) for r in (before, between) if r is not None), start=Macs())
        grid = grid if before is None else before.reduced(grid)
        after = grid if between is None else between.reduced(grid)
        wants = wants if between is None else {*wants, *between.reads}
        macs = self.attn.macs(grid, wants) + Macs(mlp=self.mlp_macs(after)) + reducing
        return Layer(name, grid, macs, parameters(self), self.attn.spec, self.attn.choice(grid, batch))


class ConvBlock(Block):
    """A block whose MLP also convolves over the grid, as PVT v2's does."""

    def check(self, grid: Grid) -> Grid:
        after = super().check(grid)
        if after.reduced:
            raise UserError(f"tokens cannot be removed before an MLP that convolves over the grid of {grid.whole()}")
        return after

    def feed_forward(self, x: Tensor, grid: Grid) -> Tensor:
        return self.mlp(x, [grid.height, grid.width])


def run_block(block: nn.Module, x: Tensor, context: Context, *, checkpointing: bool = False) -> tuple[Tensor, Context]:
    """Run a block. With `checkpointing`, store only its input and run the block again in the backward pass."""
    return checkpoint(carried(block.__call__), x, context) if checkpointing else block(x, context)


def rebuild_block(block: nn.Module, spec: Spec, grid: Grid, kind: type[Block] = Block) -> Block:
    """timm's block as a block of `kind` with attention `spec`, and with every weight of the same name and shape."""
    if type(block) is not TimmBlock:
        raise UserError(f"block type {type(block).__name__} is not supported: only timm's pre-norm Block is")
    names = ("norm1", "norm2", "mlp", "ls1", "ls2", "drop_path1", "drop_path2")
    return kind(create_like(block.attn, spec, grid), **{name: getattr(block, name) for name in names})


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
        proj_bias=getattr(attn.proj, "bias", None) is not None,
        attn_drop=attn.attn_drop.p,
        proj_drop=attn.proj_drop.p,
        device=weight.device,
        dtype=weight.dtype,
        **({} if norm is None else {"norm_layer": _norm_like(norm)}),
    )
    if isinstance(attn.proj, nn.Identity):  # a backbone's choice, as BBViT's
        ours.proj = nn.Identity()
    take_weights(ours, attn.state_dict())
    return ours.train(attn.training)


def take_weights(module: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Load the weights whose name and shape fit; return their names."""
    own = module.state_dict()
    weights = fitted(module, weights) if isinstance(module, Attention) else weights
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    module.load_state_dict(fitting, strict=False)
    return list(fitting)


def frozen_alike(ours: Attention, theirs: nn.Module) -> Attention:
    """Weights that are frozen in the attention replaced stay frozen."""
    trainable = {name: value.requires_grad for name, value in theirs.named_parameters()}
    for name, value in ours.named_parameters():
        value.requires_grad_(trainable.get(name, True))
    return ours


def _norm_like(norm: Any) -> Callable[..., nn.Module]:
    return lambda dim: type(norm)(dim, eps=norm.eps)
