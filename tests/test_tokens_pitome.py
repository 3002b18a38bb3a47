"""`pitome` against loops over its equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attendless.attention import Context, Grid
from attendless.tokens import create_reducers, parse_tokens
from merging_loops import cosines, means, reducer


def groups_by_loops(keys: Tensor, r: int, margin: float, alpha: float) -> list[list[int]]:
    """One image, keys [H, n, D]: the groups of patches, in the order of the first patch that stays."""
    similar, n = cosines(keys), keys.shape[1]
    energy = [sum(c if c >= margin else alpha * (math.exp(c - margin) - 1) for c in similar[i]) / n for i in range(n)]
    ranked = sorted(range(n), key=lambda i: -energy[i])[: 2 * r]
    a, b = ranked[0::2], ranked[1::2]
    groups = {i: [i] for i in range(n) if i not in a}
    for i in a:
        groups[max(b, key=lambda j: similar[i][j])].append(i)
    return [groups[i] for i in sorted(groups)]


@pytest.mark.parametrize(("layer", "margin"), [(0, 0.4), (1, 0.3), (3, 0.1)])
@pytest.mark.parametrize("grid", [Grid(3, 4, 2), Grid(3, 4), Grid(2, 3, 1, depth=2)], ids=str)
def test_equals_loops(grid: Grid, layer: int, margin: float) -> None:
    one = reducer("pitome:r=4,margin=0.4,alpha=0.7", layer)
    draws = torch.Generator().manual_seed(layer)
    x, keys = torch.randn(2, grid.tokens, 8, generator=draws), torch.randn(2, 2, grid.tokens, 4, generator=draws)
    out, context = one(x, Context(grid, keys=keys))
    for image in range(2):
        groups = groups_by_loops(keys[image, :, grid.prefix :], 4, margin, 0.7)
        expected, sizes = means(x[image], groups, grid.prefix)
        torch.testing.assert_close(out[image], expected)
        assert context.grid.sizes[image].tolist() == sizes
        assert context.grid.cells[image].tolist() == [group[0] for group in groups]
        assert [context.grid.owners[image, i] for group in groups for i in group] == [
            number for number, group in enumerate(groups) for _ in group
        ]


def test_isolated_patches_are_protected() -> None:
    """Six patches of one kind and two that resemble nothing: the latter stay as they are."""
    keys = torch.zeros(1, 1, 8, 4)
    keys[..., 0] = 1
    keys[0, 0, 2], keys[0, 0, 5] = torch.eye(4)[1], torch.eye(4)[2]
    x = torch.randn(1, 8, 8)
    out, context = reducer("pitome:r=3")(x, Context(Grid(2, 4), keys=keys))
    for patch in (2, 5):
        number = context.grid.cells[0].tolist().index(patch)
        assert context.grid.sizes[0, number] == 1
        assert torch.equal(out[0, number], x[0, patch])


def test_half_of_the_patches_can_leave_at_most() -> None:
    spec = parse_tokens("pitome:r=99")
    assert spec is not None
    grid = Grid(3, 5, 1)
    for one in create_reducers(spec, 8, 4, 2).values():
        grid = one.reduced(grid)
    assert grid.patches == 4
