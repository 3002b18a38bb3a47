"""Fastformer's additive attention against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attendless import (
    Attention,
    Context,
    Grid,
    UserError,
    create,
)
from attention_checks import assert_same_with_gradients, build, textbook_heads


def reference(module: Attention, x: Tensor, grid: Grid) -> Tensor:
    """One head at a time: global query, global key, then each token alone."""
    D, N = module.head_dim, grid.tokens
    q, k, v = textbook_heads(x, module.qkv.weight, module.qkv.bias, module.num_heads)
    mixed = []
    for h in range(module.num_heads):
        alpha = torch.softmax(torch.stack([q[:, h, n] @ module.w_q[h] / D**0.5 for n in range(N)], -1), -1)
        g = sum(alpha[:, n, None] * q[:, h, n] for n in range(N))
        p = [g * k[:, h, n] for n in range(N)]
        beta = torch.softmax(torch.stack([p[n] @ module.w_k[h] / D**0.5 for n in range(N)], -1), -1)
        summed = [k[:, h, n] for n in range(N)] if module.options.plain else p
        key = sum(beta[:, n, None] * summed[n] for n in range(N))
        mixed.append(torch.stack([key * v[:, h, n] for n in range(N)], 1))
    out = torch.cat(mixed, -1) @ module.proj.weight.T + module.proj.bias
    return out + torch.cat(q.unbind(1), -1)


@pytest.mark.parametrize("spec", ["fastformer", "fastformer:plain"])
@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(3, 3, 2)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    module = build(spec, grid)
    x = torch.randn(2, grid.tokens, 16, requires_grad=True)
    assert_same_with_gradients(module, x, module(x, Context(grid))[0], reference(module, x, grid), 1e-5)


def test_without_directions_the_global_key_is_the_mean() -> None:
    grid = Grid(3, 4)
    module = build("fastformer:plain", grid)
    module.w_q.data.zero_()
    module.w_k.data.zero_()
    q, k, v = torch.randn(3, 2, 2, 12, 8).unbind(0)
    out, _ = module.attend(q, k, v, Context(grid))
    torch.testing.assert_close(out, k.mean(2, keepdim=True) * v)


def test_the_map_is_the_weight_of_each_token_in_the_global_key() -> None:
    grid = Grid(3, 3, 1)
    module = build("fastformer", grid)
    module.w_k.data.zero_()
    shown = module.map(torch.randn(2, 10, 16), Context(grid))
    torch.testing.assert_close(shown, torch.full((2, 2, 10, 10), 0.1))


def test_a_merged_token_counts_as_many_as_it_stands_for() -> None:
    whole, merged = Grid(1, 6), Grid(1, 6, cells=torch.tensor([[0, 1, 2]]), sizes=torch.tensor([[3, 1, 2]]))
    module = build("fastformer", whole)
    few = torch.randn(1, 3, 16)
    many = few.repeat_interleave(torch.tensor([3, 1, 2]), dim=1)
    expected = module(many, Context(whole))[0][:, [0, 3, 4]]
    torch.testing.assert_close(module(few, Context(merged))[0], expected, atol=1e-5, rtol=1e-5)


def test_heads_that_are_not_as_wide_as_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="expected heads 16 wide in all, got 24"):
        create("fastformer", 16, 2, grid=Grid(2, 2), head_dim=12)


def test_fp16_does_not_overflow_at_many_tokens() -> None:
    grid = Grid(64, 64)
    module = build("fastformer", grid).half()
    x = torch.randn(1, grid.tokens, 16).half()
    assert module(x, Context(grid))[0].isfinite().all()
