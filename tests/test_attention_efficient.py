"""Efficient attention against loops over channels and tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attendless import Attention, Context, Grid
from attention_checks import assert_equals, build


def reference(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Sum the values by channel of k, then mix the sums by channel of q."""
    sums = []
    for d in range(q.shape[-1]):
        weights = k[..., d].exp() / k[..., d].exp().sum(-1, keepdim=True)
        sums.append(sum(weights[:, :, n, None] * v[:, :, n] for n in range(grid.tokens)))
    picks = q.exp() / q.exp().sum(-1, keepdim=True)
    return sum(picks[..., d, None] * sums[d][:, :, None] for d in range(q.shape[-1]))


@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(3, 3, 2)], ids=str)
def test_equals_the_reference(grid: Grid) -> None:
    assert_equals(build("efficient", grid), grid, reference)


def test_constant_keys_average_all_tokens() -> None:
    grid = Grid(4, 4)
    q, v = torch.randn(2, 1, 2, 16, 8).unbind(0)
    out, _ = build("efficient", grid).attend(q, torch.zeros_like(q), v, Context(grid))
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v))


def test_the_map_is_the_product_of_both_softmaxes() -> None:
    grid = Grid(3, 4, 1)
    module = build("efficient", grid)
    x = torch.randn(2, 13, 16)
    q, k, v = module.project(x)
    shown = module.map(x, Context(grid))
    torch.testing.assert_close(shown, torch.softmax(q, -1) @ torch.softmax(k, -2).transpose(-2, -1))
    torch.testing.assert_close(shown @ v, module.attend(q, k, v, Context(grid))[0], atol=1e-6, rtol=1e-5)


def test_a_merged_token_counts_as_many_as_it_stands_for() -> None:
    whole, merged = Grid(1, 6), Grid(1, 6, cells=torch.tensor([[0, 1, 2]]), sizes=torch.tensor([[3, 1, 2]]))
    module = build("efficient", whole)
    few = torch.randn(1, 3, 16)
    many = few.repeat_interleave(torch.tensor([3, 1, 2]), dim=1)
    expected = module(many, Context(whole))[0][:, [0, 3, 4]]
    torch.testing.assert_close(module(few, Context(merged))[0], expected, atol=1e-6, rtol=1e-5)


def test_fp16_neither_overflows_nor_vanishes() -> None:
    grid = Grid(64, 64)
    q = torch.full((1, 2, grid.tokens, 8), 300.0, dtype=torch.float16)
    out, _ = build("efficient", grid).attend(q, q, q, Context(grid))
    torch.testing.assert_close(out, q, atol=1, rtol=1e-2)
