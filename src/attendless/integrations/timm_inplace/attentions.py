"""The attention classes that are known, each with the few lines by which it is adapted."""

from __future__ import annotations

from typing import Any

from timm.layers import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.hiera import MaskUnitAttention
from timm.models.hieradet_sam2 import MultiScaleAttention
from timm.models.vision_transformer import Attention as VitAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import get_rel_pos
from torch import Tensor, nn

from ...attention import Grid
from . import rel_pos as decomposed
from .adapted import Adapted, AdaptedMap, AdaptedTokens


class Vit(AdaptedTokens, VitAttention):  # type: ignore[misc]
    original = VitAttention


class Rope(AdaptedTokens, AttentionRope):  # type: ignore[misc]
    original = AttentionRope


class Eva(AdaptedTokens, EvaAttention):  # type: ignore[misc]
    original = EvaAttention


class Hiera(AdaptedMap, MultiScaleAttention):  # type: ignore[misc]
    original = MultiScaleAttention


class Folded(AdaptedMap):
    """Of an attention with SAM's relative positions: they go to the core folded into q and k, and to full attention as
    they are."""

    folds = True
    #: Its own forward must not build the bias. (As with `fused_attn`, the instance keeps its own.)
    use_rel_pos = property(lambda self: False)

    def table(self, side: int, weights: Tensor) -> Tensor:
        """The positions of a side of the grid [side, side, D], by query and key."""
        raise NotImplementedError(f"{type(self).__name__} does not define table")

    def placed(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "rel_pos_h"):
            return q, k
        return decomposed.fold(q, k, *decomposed.biases(q, *self.tables(grid)), self.core.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if self.core.name != "full" or not hasattr(self, "rel_pos_h"):
            return super().attend(q, k, v, grid)
        r, c = decomposed.biases(q, *self.tables(grid))
        return decomposed.full(q, k, v, r, c, scale=self.core.scale, dropout=self.core.dropout)

    def tables(self, grid: Grid) -> tuple[Tensor, Tensor]:
        module: Any = self
        return self.table(grid.height, module.rel_pos_h), self.table(grid.width, module.rel_pos_w)


class Sam(Folded, SamAttention):  # type: ignore[misc]
    original = SamAttention

    def table(self, side: int, weights: Tensor) -> Tensor:
        return get_rel_pos(side, side, weights)


ADAPTED: dict[type[nn.Module], type[Adapted]] = {cls.original: cls for cls in (Vit, Rope, Eva, Hiera, Sam)}

_BIAS = "its relative position bias is a number for every pair of tokens, which no core takes"
#: Attentions that are known, and why they cannot be adapted.
REFUSED: dict[type[nn.Module], str] = {
    BeitAttention: _BIAS,
    RelPosAttention: _BIAS,
    MaskUnitAttention: "its tokens are ordered by the unit they are masked in, not row by row",
}
