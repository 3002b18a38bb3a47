"""Blocks of SAM 2's Hiera, computed in bands of rows. The outputs are the same; memory and latency are lower.

At 1,024 px a block's hidden layer takes up to 100 MB. Windows do not see each other, so a windowed block can compute a
band of window rows from end to end, in memory that stays in the cache. Blocks that attend globally compute their MLP
in bands. Training, compiled and exported models compute whole blocks, and so do blocks with hooks inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import Mlp
from timm.models.hieradet_sam2 import HieraDet, MultiScaleBlock
from torch import Tensor, nn

from ...backbones.class_token_tail import observed

#: Elements of the hidden layer in a band, and the fewest tokens in it: matrix products of few rows are slow.
_HIDDEN, _TOKENS = 3 << 19, 1024


class BandedBlock(MultiScaleBlock):
    """A windowed block. Queries are pooled inside of windows, so the bands of the output follow each other too."""

    def forward(self, x: Tensor) -> Tensor:
        window: int = self.window_size[0]
        rows = window * max(1, _band(self.mlp) // (x.shape[0] * x.shape[2] * window))
        return _in_bands(self, super().forward, x, rows)


class BandedMlp(Mlp):
    """The MLP of a block that attends globally."""

    def forward(self, x: Tensor) -> Tensor:
        return _in_bands(self, super().forward, x, max(1, _band(self) // (x.shape[0] * x.shape[2])))


def _in_bands(module: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """`compute` of x [B, H, W, C], `rows` rows at a time where nothing expects all tokens at once."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or rows >= x.shape[1] or module.training or torch.is_grad_enabled() or observed(*module.children()):
        return compute(x)
    # Tokens that enter the first block are a view of a convolution's output, with channels outermost.
    return torch.cat([compute(band.contiguous()) for band in x.split(rows, dim=1)], dim=1)


def _band(mlp: Any) -> int:
    """Tokens of a band."""
    return max(_TOKENS, _HIDDEN // mlp.fc1.out_features)


_BANDED: dict[type[nn.Module], type[nn.Module]] = {MultiScaleBlock: BandedBlock, Mlp: BandedMlp}
_ORIGINAL = {banded: original for original, banded in _BANDED.items()}


def put(owner: nn.Module) -> None:
    """Let the blocks of `owner` compute in bands, if it is a Hiera."""
    for block in owner.blocks if isinstance(owner, HieraDet) else ():
        module: Any = block if block.is_windowed else block.mlp
        module.__class__ = _BANDED.get(type(module), type(module))


def take_out(owner: nn.Module) -> None:
    """Let the blocks of `owner` compute as timm does."""
    for module in owner.modules():
        module.__class__ = _ORIGINAL.get(type(module), type(module))
