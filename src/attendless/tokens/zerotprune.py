"""Zero-TPrune (Wang et al., 2024): patches that the attention graph ranks low, or that are redundant, are dropped.
Requires no training.

    A = softmax(scores) of each head is a graph in which every token votes for the tokens that it attends to:
    s ← Aᵀ s, some times; at the start all tokens are equal, but a class token has √N times their weight
    importance = √(mean over heads of s²), of the heads whose variance of s over the patches is in [0.01, 0.7]

    in each layer, after attention:
    1. one vote ranks the patches; the less important half is compared with the other half by cosines of keys, and the
       share `similar` of the r patches to remove are those most similar to any patch of the other half
    2. on the graph of the remaining tokens, `votes` votes rank the patches; the least important are dropped

Step 1 prevents that many similar patches vote for one another. The root mean square prefers patches that matter much in
a few heads. The variance, taken of scores with mean 1, excludes heads that are nearly uniform or that look at a few
patches alone; if it excludes all heads, all are used. The authors give 30 to 50 votes for the first three layers, 1 for
the last three and 5 to 10 between; `votes=0` takes 30, 1 and 5. How many patches leave in step 1 is a setting of the
authors; the default of `similar` is ours.

The reducer reads `scores`, which only attentions with one score per pair of tokens can provide. Of those, `full`
attends to reduced token sets. Dropped patches cannot be restored, so that `until` and `prop_attn` are refused.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import options
from ..attention import Context, Grid, Macs
from ..errors import UserError
from .interface import SearchSpace
from .joining import unit_keys
from .keeping import keep
from .registry import register_reducer
from .schedule import ScheduledReducer, ScheduleOptions

#: The variances between which a head counts.
VARIANCE = (0.01, 0.7)


@dataclasses.dataclass(frozen=True)
class ZeroTPruneOptions(ScheduleOptions):
    similar: float = options.option(0.75, "share of the removed patches that similarity selects", low=0, high=1)
    votes: int = options.option(0, "iterations of the ranking; 0: 30, 5 or 1, by layer", low=0)

    def __post_init__(self) -> None:
        if self.until or not self.prop_attn:
            given = f"until={self.until}" if self.until else "prop_attn=false"
            raise UserError(f"zerotprune:{given} is not possible: the reducer drops patches and merges none")


@register_reducer
class ZeroTPrune(ScheduledReducer):
    name = "zerotprune"
    Options = ZeroTPruneOptions
    entries = frozenset({"scores", "keys"})
    drops = True
    examples = ("zerotprune", "zerotprune:r=1/3,votes=2", "zerotprune:keep=0.3,start=1,similar=0.5")
    search_space = SearchSpace("r", {"similar": (0.5, 0.75, 1.0)})

    def setup(self) -> None:
        super().setup()
        if not self.options.similar:
            self.reads = frozenset({"scores"})

    @property
    def votes(self) -> int:
        if self.options.votes:
            return int(self.options.votes)
        return 30 if self.layer < 3 else 1 if self.layer >= self.depth - 3 else 5

    def redundant(self, patches: int) -> int:
        """The number of patches that similarity removes."""
        return min(int(self.options.similar * self.removing(patches)), patches // 2)

    def macs(self, grid: Grid) -> Macs:
        n, heads = grid.patches, self.dim // self.head_dim
        if not self.removing(n):
            return Macs()
        redundant = self.redundant(n) > 0
        compared = (n // 2) * (n - n // 2) * self.head_dim if redundant else 0
        return Macs(other=compared + (self.votes + redundant) * heads * grid.tokens**2)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, scores = context.grid, context.scores
        n, r = grid.patches, self.removing(grid.patches)
        if not r:
            return x, context
        assert scores is not None
        if scores.shape[2:] != (grid.tokens, grid.tokens):
            raise UserError(
                f"zerotprune reads one score for each pair of {grid.tokens} tokens, but the attention provides scores "
                f"of shape {tuple(scores.shape)}: use full attention in the layers that drop patches"
            )
        with torch.no_grad():
            stays = torch.ones_like(grid.places(x), dtype=torch.bool)
            if redundant := self.redundant(n):
                first = importance(scores, stays, grid.prefix, votes=1)
                stays = stays.scatter(1, most_similar(first, unit_keys(context), redundant), False)
            score = importance(scores, stays, grid.prefix, votes=self.votes)
        x, left = keep(x, grid, score.masked_fill(~stays, -torch.inf), n - r)
        return x, context.replace(grid=left)


def importance(scores: Tensor, stays: Tensor, prefix: int, *, votes: int) -> Tensor:
    """The importance of each patch [B, n] in the graph of the patches that stay [B, n] and of the prefix tokens, for
    scores [B, H, N, N]."""
    there = torch.nn.functional.pad(stays, (prefix, 0), value=True)[:, None]
    graph = scores.float().masked_fill(~there[:, :, None], -torch.inf).softmax(dim=-1).transpose(2, 3)
    signal = there.float().expand(-1, scores.shape[1], -1)
    if prefix:
        weight = torch.ones_like(signal[0, 0])
        weight[0] = signal.shape[2] ** 0.5
        signal = signal * weight
    signal = signal[..., None]
    for _ in range(votes):
        signal = graph @ signal
    count = stays.sum(1)[:, None, None]
    patch = signal[:, :, prefix:, 0] * stays[:, None]
    patch = patch / (patch.sum(2, keepdim=True) / count)
    variance = ((patch - 1).square() * stays[:, None]).sum(2, keepdim=True) / count
    informative = ((variance >= VARIANCE[0]) & (variance <= VARIANCE[1])).float()
    informative = torch.where(informative.sum(1, keepdim=True) > 0, informative, 1.0)
    return ((patch.square() * informative).sum(1) / informative.sum(1)).sqrt()


def most_similar(score: Tensor, unit: Tensor, count: int) -> Tensor:
    """Of the less important half of the patches, the `count` most similar to any patch of the other half [B, count],
    for scores [B, n] and unit keys [B, n, D]."""
    order = score.argsort(dim=1, stable=True)
    low, high = order.split([score.shape[1] // 2, score.shape[1] - score.shape[1] // 2], dim=1)
    keys = [unit.gather(1, half[..., None].expand(-1, -1, unit.shape[2])) for half in (low, high)]
    likeness = (keys[0] @ keys[1].transpose(1, 2)).amax(dim=2)
    return low.gather(1, likeness.argsort(dim=1, descending=True, stable=True)[:, :count])
