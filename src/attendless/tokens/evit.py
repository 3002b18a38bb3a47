"""EViT: keep the patches with the most attention of the class token; drop the others, or fuse them into one token.

    score = class token's attention, averaged over heads (no class token: `attention.provided`)
    ⌈keep · n⌉ of n patches stay, in their order; with `fuse`, Σ score · x of the others is one more token, the last

in the layers `at`. Later layers treat the fused token like any other. Training can start with keep=1 and decrease it
to the given share along a cosine (`anneal`), as in the authors' code.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from .. import options
from ..attention import Context, Grid
from .interface import Reducer
from .keeping import keep
from .registry import register_reducer


@dataclasses.dataclass(frozen=True)
class EViTOptions(options.Options):
    keep: float = options.option(0.7, "share of the patches that stay each time", low=0, high=1)
    at: tuple[int, ...] = options.option((3, 6, 9), "layers that remove patches", low=0)
    fuse: bool = options.option(True, "fuse the removed patches into one token")


@register_reducer
class EViT(Reducer):
    name = "evit"
    Options = EViTOptions
    reads = frozenset({"class_attention"})
    examples = ("evit:keep=0.5,at=1", "evit:keep=0.7,at=0/1,fuse=false")
    not_searched = "evit keeps one share of the patches in a few layers and has no option by layer"

    @classmethod
    def layers(cls, given: EViTOptions, depth: int) -> list[int]:
        return list(given.at) if given.keep < 1 else []

    def setup(self) -> None:
        self.drops = not self.options.fuse
        self.progress = 1.0

    def anneal(self, progress: float) -> None:
        self.progress = progress

    def staying(self, patches: int) -> int:
        share = self.options.keep
        if self.training:
            share += (1 - share) * (1 + math.cos(math.pi * self.progress)) / 2
        return max(1, math.ceil(share * patches))

    def remaining(self, grid: Grid) -> int:
        staying = self.staying(grid.patches)
        return staying + int(self.options.fuse and staying < grid.patches)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, P = context.grid, context.grid.prefix
        assert context.class_attention is not None
        score = context.class_attention.mean(1)[:, P:]
        staying = self.staying(grid.patches)
        if staying == grid.patches:
            return x, context
        x, left = keep(x, grid, score, staying, fuse=self.options.fuse)
        return x, context.replace(grid=left)
