"""`zerotprune` against loops over its equations, and the attentions it works with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attendless import UserError
from attendless.attention import Context, Grid
from attendless.backbones import Columnar
from merging_loops import cosines, reducer


def importance_by_loops(scores: Tensor, there: list[int], prefix: int, votes: int) -> dict[int, float]:
    """One image, scores [H, N, N]: the importance of the patches among the tokens `there`."""
    heads, patches = [], [i for i in there if i >= prefix]
    for score in scores.tolist():
        signal = {i: math.sqrt(len(score)) if prefix and i == 0 else 1.0 for i in there}
        for _ in range(votes):
            given = dict.fromkeys(there, 0.0)
            for i in there:
                whole = sum(math.exp(score[i][j]) for j in there)
                for j in there:
                    given[j] += signal[i] * math.exp(score[i][j]) / whole
            signal = given
        mean = sum(signal[i] for i in patches) / len(patches)
        heads.append({i: signal[i] / mean for i in patches})
    spread = [sum((head[i] - 1) ** 2 for i in patches) / len(patches) for head in heads]
    used = [head for head, variance in zip(heads, spread, strict=True) if 0.01 <= variance <= 0.7] or heads
    return {i: math.sqrt(sum(head[i] ** 2 for head in used) / len(used)) for i in patches}


def kept_by_loops(scores: Tensor, keys: Tensor, prefix: int, redundant: int, left: int, votes: int) -> list[int]:
    there, similar = list(range(scores.shape[1])), cosines(keys)
    if redundant:
        first = importance_by_loops(scores, there, prefix, 1)
        ranked = sorted(first, key=lambda i: first[i])
        low, high = ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]
        gone = sorted(low, key=lambda i: -max(similar[i][j] for j in high))[:redundant]
        there = [i for i in there if i not in gone]
    rank = importance_by_loops(scores, there, prefix, votes)
    return sorted(sorted(rank, key=lambda i: -rank[i])[:left])


@pytest.mark.parametrize(("similar", "redundant"), [(0.0, 0), (0.5, 3), (1.0, 6)])
@pytest.mark.parametrize("sharpness", [0.05, 0.6, 4.0], ids=["no head informative", "some", "sharp"])
@pytest.mark.parametrize("grid", [Grid(3, 5, 2), Grid(3, 5), Grid(2, 3, 1, depth=2)], ids=str)
def test_equals_loops(grid: Grid, sharpness: float, similar: float, redundant: int) -> None:
    draws = torch.Generator().manual_seed(3)
    x, keys = torch.randn(2, grid.tokens, 8, generator=draws), torch.randn(2, 3, grid.tokens, 4, generator=draws)
    scores = sharpness * torch.randn(2, 3, 1, grid.tokens, generator=draws) * torch.tensor([0.2, 1, 2])[:, None, None]
    scores = scores + 0.3 * torch.randn(2, 3, grid.tokens, grid.tokens, generator=draws)
    out, context = reducer(f"zerotprune:r=6,similar={similar},votes=3")(x, Context(grid, keys=keys, scores=scores))
    for image in range(2):
        kept = kept_by_loops(scores[image], keys[image], grid.prefix, redundant, grid.patches - 6, 3)
        assert torch.equal(out[image], x[image, [*range(grid.prefix), *kept]])
        assert context.grid.cells[image].tolist() == [i - grid.prefix for i in kept]
    assert context.grid.sizes is None


def test_votes_by_layer() -> None:
    assert [reducer("zerotprune:r=1", layer, depth=12).votes for layer in (0, 2, 3, 8, 9, 11)] == [30, 30, 5, 5, 1, 1]


def test_what_is_refused() -> None:
    for given in ("until=2", "prop_attn=false"):
        with pytest.raises(UserError, match=f"zerotprune:{given} is not possible: the reducer drops patches"):
            reducer(f"zerotprune:r=1,{given}")
    with pytest.raises(UserError, match=r"one score for each pair of 9 tokens, .* shape \(1, 2, 4, 9\)"):
        reducer("zerotprune:r=1")(
            torch.randn(1, 9, 8), Context(Grid(2, 4, 1), keys=torch.randn(1, 2, 9, 4), scores=torch.randn(1, 2, 4, 9))
        )
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    with pytest.raises(UserError, match="reads the scores of foveal, which does not provide it"):
        Columnar(**small, attention="foveal", tokens="zerotprune:r=2")
