"""ATC (Haurum et al., 2024): patches are clustered from the bottom up, and each cluster becomes one token. Requires no
training.

    in each layer, after attention: every patch starts as a cluster; r times, the two closest clusters become one
    distance of two patches: 1 − cos of their keys, averaged over heads
    distance of two clusters: the average, the largest (`complete`) or the smallest (`single`) distance of their patches

A cluster becomes the mean of its tokens, weighted by the patches that they represent, at the cell of its first token.
As in the authors' code, clusters start anew in each layer, and every token counts once in an average distance.

The r steps follow one another, so that r is also the length of the traced graph. Each step costs a pass over n² numbers
for n patches. The schedule's options are those of `tokens.schedule`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from .. import options
from .interface import SearchSpace
from .joining import JoiningReducer, numbers
from .registry import register_reducer
from .schedule import ScheduleOptions


@dataclasses.dataclass(frozen=True)
class ATCOptions(ScheduleOptions):
    linkage: Literal["average", "complete", "single"] = options.option("average", "distance of two clusters")


@register_reducer
class ATC(JoiningReducer):
    name = "atc"
    Options = ATCOptions
    examples = ("atc", "atc:r=1/3", "atc:keep=0.3,start=1,linkage=complete", "atc:r=2,linkage=single,prop_attn=false")
    search_space = SearchSpace("r")

    def targets(self, cosine: Tensor, r: int) -> Tensor:
        return clusters(1 - cosine, r, self.options.linkage)


def clusters(distance: Tensor, r: int, linkage: str) -> Tensor:
    """The first patch of the cluster of each patch [B, n], after r steps on distances [B, n, n]. `linkage`
    is average, complete or single."""
    count = distance.shape[1]
    image, label = torch.arange(distance.shape[0], device=distance.device), numbers(distance, count)
    members = torch.ones_like(distance[:, 0])
    # A cluster has the row and the column of its first patch; those of the others are infinite, as is the diagonal.
    distance = distance.masked_fill(torch.eye(count, dtype=torch.bool, device=distance.device), torch.inf)
    for _ in range(r):
        pair = distance.flatten(1).argmin(dim=1)
        first, second = torch.minimum(pair // count, pair % count), torch.maximum(pair // count, pair % count)
        to_first, to_second = distance[image, first], distance[image, second]
        if linkage == "average":
            one, other = members[image, first, None], members[image, second, None]
            linked = (one * to_first + other * to_second) / (one + other)
            members[image, first] = (one + other)[:, 0]
        else:
            linked = torch.maximum(to_first, to_second) if linkage == "complete" else torch.minimum(to_first, to_second)
        linked[image, first] = torch.inf
        distance[image, first], distance[image, :, first] = linked, linked
        distance[image, second], distance[image, :, second] = torch.inf, torch.inf
        label = torch.where(label == second[:, None], first[:, None], label)
    return label
