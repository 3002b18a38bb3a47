"""PiToMe (Tran et al., 2024): patches with many similar patches merge, the others are protected. Requires no training.

    in each layer, after attention, for keys averaged over heads:
    energy of patch i:  E_i = mean over j of f(cos(k_i, k_j)),   f(c) = c if c ≥ m, else α (exp(c − m) − 1)
    margin of layer l:  m = margin · (1 − l / depth)
    the 2r patches of the highest energy, in its order, go alternately to A and B; each patch of A joins the most
    similar of B

A patch in a large uniform region has a high energy, an isolated patch a low one. f is the equation of the paper. The
authors' code subtracts m above the margin too, which closes the jump of f at m. The schedule's options are those of
`tokens.schedule`.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .. import options
from .interface import SearchSpace
from .joining import JoiningReducer, numbers
from .registry import register_reducer
from .schedule import ScheduleOptions


@dataclasses.dataclass(frozen=True)
class PiToMeOptions(ScheduleOptions):
    margin: float = options.option(0.9, "cosine above which patches count as similar in the first layer", low=0, high=1)
    alpha: float = options.option(1.0, "weight of patches that are not similar", low=0)


@register_reducer
class PiToMe(JoiningReducer):
    name = "pitome"
    Options = PiToMeOptions
    examples = ("pitome", "pitome:r=1/3", "pitome:keep=0.3,start=1", "pitome:r=2,margin=0.5,prop_attn=false")
    search_space = SearchSpace("r")

    def most(self, patches: int) -> int:
        return patches // 2  # each needs a partner

    def targets(self, cosine: Tensor, r: int) -> Tensor:
        order = self.energy(cosine).argsort(dim=1, descending=True, stable=True)
        a, b = order[:, : 2 * r : 2], order[:, 1 : 2 * r : 2]
        count = cosine.shape[1]
        pairs = cosine.gather(1, a[..., None].expand(-1, -1, count)).gather(2, b[:, None].expand(-1, r, -1))
        return numbers(cosine, count).scatter(1, a, b.gather(1, pairs.argmax(dim=2)))

    def energy(self, cosine: Tensor) -> Tensor:
        """The energy of each patch [B, n], for cosines [B, n, n]."""
        margin = self.options.margin * (1 - self.layer / self.depth)
        other = self.options.alpha * ((cosine - margin).exp() - 1)
        return cosine.where(cosine >= margin, other).mean(2)
