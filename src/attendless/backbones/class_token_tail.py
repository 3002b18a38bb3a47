"""The class-token-only last layer.

A classifier that reads the class token alone does not depend on the patches that leave its last block. The last block
then computes for the prefix tokens alone: one row of full attention for each, its projection, its MLP. Patches of that
layer contribute keys and values only. The logits are those of the whole layer up to rounding.

`forward` of an isotropic backbone uses the tail if three conditions hold:

    `readout` is set                  by `convert`, by a saved file or by the user
    `needs_patches()` is empty        pool, head and last norms are known to read prefix tokens alone
    the last block is not observed    no hook and no replaced `forward` in the block or the last norm (`observed`)

Training, `forward_features`, `forward_intermediates`, attention maps and dense heads always run the whole block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import timm.layers
import torch
from torch import Tensor, nn

from ..attention import Choice, Context, Grid, Macs
from .block import Block
from .cost import Layer, parameters
from .probe import replaced

# A backbone is a module, but the mixin has no base of its own at run time: a subclass brings timm's or PyTorch's.
if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object
#: The option's name in saved files and in JSON.
READOUT = "readout"
_NORMS = ("LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32", "SimpleNorm", "SimpleNormFp32")
#: Norms of each token by itself, if they normalise one dimension.
_PER_TOKEN = {
    nn.Identity,
    nn.LayerNorm,
    nn.RMSNorm,
    *(getattr(timm.layers, n) for n in _NORMS if hasattr(timm.layers, n)),
}


class ClassTokenTail(Block):
    """The last block of an isotropic backbone. With `prefix_rows` it computes the prefix tokens alone."""

    def forward(self, x: Tensor, context: Context, *, prefix_rows: bool = False) -> tuple[Tensor, Context]:
        """x [B, N, C] → [B, N, C]; with `prefix_rows` → [B, P, C], the first rows of the same result."""
        if not prefix_rows:
            return super().forward(x, context)
        before, _ = self.reducers()
        if before is not None:
            x, context = before(x, context)
        given = context.only(self.attn.reads | self.attn.takes).wanting(frozenset())
        rows = {"prefix_rows": True} if self.attends_rows and given.residual is None else {}
        out, context = self.attn(self.norm1(x), given, **rows)
        x = self.attn.refine(x[:, : out.shape[1]] + self.drop_path1(self.ls1(out)), context)
        x = x[:, : context.grid.prefix]
        return x + self.drop_path2(self.ls2(self.feed_forward(self.norm2(x), context.grid))), context

    @property
    def attends_rows(self) -> bool:
        """Whether the attention too computes prefix rows alone; if not, only the MLP skips the patches."""
        qkv = self.attn.qkv
        return self.attn.prefix_is_full and type(qkv) is nn.Linear and not replaced(qkv)

    def prefix_cost(self, name: str, grid: Grid, batch: int = 1) -> Layer:
        """`cost` of the prefix tokens alone."""
        before, _ = self.reducers()
        reducing = Macs() if before is None else before.macs(grid)
        grid = grid if before is None else before.reduced(grid)
        if self.attends_rows:
            attending, choice = (
                self.attn.prefix_macs(grid),
                Choice("sdpa", "one row of full attention for each prefix token"),
            )
        else:
            attending, choice = self.attn.macs(grid), self.attn.choice(grid, batch)
        macs = attending + Macs(mlp=self.mlp_macs(grid.reduced_to(0))) + reducing
        return Layer(name, grid, macs, parameters(self), self.attn.spec, choice)


class TailedBackbone(_Module):
    """The part of `Backbone` that handles the class-token-only last layer."""

    blocks: Any
    #: Whether `forward` computes the last layer for the class token alone, if nothing else is read.
    readout: bool = False

    def needs_patches(self) -> str:
        """Why the output depends on patches that leave the last block; empty if it reads prefix tokens alone."""
        return f"the head of {type(self).__name__} reads patches"

    @property
    def tail(self) -> ClassTokenTail | None:
        """The last block, if `forward` computes it for the prefix tokens alone."""
        return self.blocks[-1] if self.readout and not self.needs_patches() else None

    def use_tail(self, on: bool) -> bool:
        """Set `readout`; return its former value."""
        before, self.readout = self.readout, on
        return before


def mixes_tokens(norm: nn.Module) -> bool:
    """Whether a norm may compute statistics over several tokens. Norms of unknown classes may."""
    return type(norm) not in _PER_TOKEN or len(getattr(norm, "normalized_shape", (0,))) != 1 or replaced(norm)


def observed(*modules: nn.Module) -> bool:
    """Whether a hook or a replaced `forward` anywhere in `modules` expects all tokens.

    Hooks can be registered at any time, so every `forward` runs this check: about 15 µs for a block. A compiled graph
    skips it, so a hook in a compiled model sees the prefix tokens alone.
    """
    if torch.compiler.is_compiling():
        return False
    waiting: list[Any] = list(modules)
    while waiting:
        module = waiting.pop()
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return True
        if "forward" in own and replaced(module):
            return True
        waiting += [part for part in own["_modules"].values() if part is not None]
    return False
