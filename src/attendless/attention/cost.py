"""The cost of an attention layer in multiply-accumulates (MACs) per image.

A mechanism must write `core_macs`. The other parts have defaults for a layer that projects q, k, v and its output.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from torch import nn

from .provided import class_attention_macs
from .values import Grid, Macs


class Cost:
    """The part of `Attention` that counts multiply-accumulates.

    The counts describe the function computed. They do not depend on the backend that computes it.
    """

    #: Why the PyTorch backend may execute more multiply-accumulates than `macs` counts; empty if it does not.
    executes_more: ClassVar[str] = ""
    projected: ClassVar[int]
    dim: int
    attn_dim: int

    def core_macs(self, grid: Grid) -> int:
        """MACs of `attend` on `grid`, key selection included."""
        raise NotImplementedError(f"{type(self).__name__} does not define core_macs")

    def extra_macs(self, grid: Grid) -> int:
        """MACs of the mechanism's own layers outside the core, such as a convolution."""
        return 0

    def projection_macs(self, grid: Grid) -> int:
        """MACs of the `qkv` and `proj` layers."""
        return grid.tokens * self.dim * self.projected * self.attn_dim + grid.tokens * self.attn_dim * self.dim

    def leaving_macs(self, grid: Grid, wants: Collection[str]) -> int:
        """MACs of the context entries in `wants` that the layer computes in addition to its output."""
        return class_attention_macs(grid, self.attn_dim) if "class_attention" in wants else 0

    def macs(self, grid: Grid, wants: Collection[str] = ()) -> Macs:
        """MACs of the whole layer; `wants` names the context entries that the next layer or a reducer reads."""
        core = self.core_macs(grid) + self.leaving_macs(grid, wants)
        # Some backbones replace the output projection by the identity.
        absent: Any = isinstance(getattr(self, "proj", None), nn.Identity)
        missing = grid.tokens * self.attn_dim * self.dim if absent else 0
        return Macs(core, self.projection_macs(grid) - missing, other=self.extra_macs(grid))
