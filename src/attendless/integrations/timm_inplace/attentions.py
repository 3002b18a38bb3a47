"""The attention classes that are exchanged in place, each with its subclass of `Adapted`."""

from __future__ import annotations

import functools
from typing import Any, cast

from timm.layers import AttentionRope
from timm.models.eva import EvaAttention
from timm.models.hieradet_sam2 import MultiScaleAttention
from timm.models.vision_transformer import Attention as VitAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import get_rel_pos
from torch import Tensor, nn

from ...attention import Grid
from ..support import hf_family, is_published_sam
from . import rel_pos
from .adapted import Adapted, AdaptedMap, AdaptedTokens


class Vit(AdaptedTokens, VitAttention):  # type: ignore[misc]
    original = VitAttention


class Rope(AdaptedTokens, AttentionRope):  # type: ignore[misc]
    original = AttentionRope


class Eva(AdaptedTokens, EvaAttention):  # type: ignore[misc]
    original = EvaAttention


class Hiera(AdaptedMap, MultiScaleAttention):  # type: ignore[misc]
    original = MultiScaleAttention
    folds = True  # its blocks compute in bands (`bands.py`)


class Folded(AdaptedMap):
    """For an attention with SAM's relative positions: folded into q and k for a core, computed as they are for
    full attention."""

    folds = True
    #: Keeps the module's forward from building the bias. The value in the instance stays, behind this property.
    use_rel_pos = property(lambda self: False)

    def table(self, side: int, weights: Tensor) -> Tensor:
        """Return the positions of one side of the grid [side, side, D], by query and key."""
        raise NotImplementedError(f"{type(self).__name__} does not define table")

    def placed(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "rel_pos_h"):
            return q, k
        return rel_pos.fold(q, k, *rel_pos.biases(q, *self.tables(grid)), self.core.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if self.core.name != "full" or not hasattr(self, "rel_pos_h"):
            return super().attend(q, k, v, grid)
        r, c = rel_pos.biases(q, *self.tables(grid))
        return rel_pos.full(q, k, v, r, c, scale=self.core.scale, dropout=self.core.dropout)

    def tables(self, grid: Grid) -> tuple[Tensor, Tensor]:
        module: Any = self
        return self.table(grid.height, module.rel_pos_h), self.table(grid.width, module.rel_pos_w)


class Sam(Folded, SamAttention):  # type: ignore[misc]
    original = SamAttention

    def table(self, side: int, weights: Tensor) -> Tensor:
        return get_rel_pos(side, side, weights)


class HfSam(Folded):
    """For Hugging Face's SAM, whose attention does not go through transformers' `AttentionInterface`."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, **kwargs)

    def table(self, side: int, weights: Tensor) -> Tensor:
        module: Any = self
        return module.get_rel_pos(side, side, weights)


class PublishedSam(Folded):
    """For SAM's published code (`segment_anything`), which computes its scores itself; Cellpose-SAM has it inside."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        grid, (B, H, W, _) = self.grid_of(x), x.shape
        self.core.check(grid)
        q, k, v = module.qkv(x).reshape(B, H * W, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.attend(q, k, v, grid).transpose(1, 2)
        return cast(Tensor, module.proj(out.reshape(B, H, W, -1)))

    def table(self, side: int, weights: Tensor) -> Tensor:
        return get_rel_pos(side, side, weights)


_OF_TIMM: dict[type[nn.Module], type[Adapted]] = {cls.original: cls for cls in (Vit, Rope, Eva, Hiera, Sam)}


def adapted_class(module: nn.Module) -> type[Adapted] | None:
    """The class that a module gets when its attention is exchanged; None if it cannot be exchanged in place."""
    if isinstance(module, Adapted):
        return type(module)
    if type(module) in _OF_TIMM:
        return _OF_TIMM[type(module)]
    family = hf_family(module)
    kind: Any = type(module)
    if is_published_sam(kind):
        return _mixed(PublishedSam, kind)
    return _mixed(HfSam, kind) if family is not None and family.patch == "timm_inplace" else None


@functools.cache
def _mixed(adapted: type[Adapted], attention: type) -> type[Adapted]:
    return type(f"Adapted{attention.__name__}", (adapted, attention), {"original": attention})
