"""Performer attention against its estimator written out, and against the softmax it estimates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attendless import Attention, Context, Grid, create
from attendless.attention.full import full
from attendless.attention.performer import orthogonal_features, performer
from attention_checks import assert_equals, build


def reference(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Every pair of tokens by the mean of its feature products, without any stabiliser."""
    D = q.shape[-1]

    def phi(x: Tensor) -> Tensor:
        x = x / D**0.25
        products = [(x * w[None, :, None]).sum(-1) for w in module.features.unbind(1)]
        return torch.stack(products, -1).sub(x.square().sum(-1, keepdim=True) / 2).exp()

    phi_q, phi_k = phi(q), phi(k)
    rows = []
    for n in range(grid.tokens):
        kernel = (phi_q[:, :, n, None] * phi_k).mean(-1)
        rows.append((kernel[..., None] * v).sum(2) / kernel.sum(-1, keepdim=True))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("spec", ["performer", "performer:features=5,seed=3"])
@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(3, 3, 2)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    assert_equals(build(spec, grid), grid, reference)


def test_goes_to_softmax_attention_as_features_grow() -> None:
    heads = 32  # as many independent draws of the features
    q, k, v = torch.randn(3, 1, heads, 12, 8).unbind(0)
    exact = full(q / 2, k / 2, v, scale=8**-0.5)
    errors = []
    for count in (64, 1024, 16384):
        drawn = orthogonal_features(heads, count, 8, seed=0)
        errors.append((performer(q / 2, k / 2, v, drawn, scale=8**-0.5) - exact).square().mean().sqrt().item())
    # Sixteen times the features, a quarter of the error.
    assert 3 < errors[0] / errors[1] < 5
    assert 3 < errors[1] / errors[2] < 5
    assert errors[2] < 0.01


def test_features_are_orthogonal_with_gaussian_lengths() -> None:
    drawn = orthogonal_features(3, 40, 16, seed=0)
    gram = drawn[:, :16] @ drawn[:, :16].transpose(-2, -1)
    torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), atol=1e-4, rtol=0)
    lengths = orthogonal_features(8, 4096, 16, seed=1).square().sum(-1)
    assert abs(lengths.mean() - 16) < 0.2
    assert abs(lengths.var() - 32) < 3, "the squared length is chi-squared with 16 degrees of freedom"
    assert orthogonal_features(8, 4096, 16, seed=1).mean((0, 1)).abs().max() < 0.03, "no direction is preferred"


def test_features_follow_from_the_seed_and_travel_in_the_state_dict() -> None:
    grid = Grid(4, 4)
    first, again, other = (create(f"performer:seed={seed}", 16, 2, grid=grid) for seed in (1, 1, 2))
    assert torch.equal(first.features, again.features)
    assert not torch.equal(first.features, other.features)
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.features, other.features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_inputs_neither_overflow_nor_divide_by_nothing(dtype: torch.dtype) -> None:
    # Scores in the thousands: every feature of every key but the nearest underflows.
    q, k = (60 * torch.randn(2, 1, 2, 10, 8)).to(dtype).unbind(0)
    v = torch.randn(1, 2, 10, 8).to(dtype)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out = performer(q, k, v, orthogonal_features(2, 16, 8, seed=0), scale=8**-0.5)
    out.float().sum().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() + 1e-2, "outputs are averages of values"
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_autocast_computes_in_fp32() -> None:
    q, k, v = torch.randn(3, 1, 2, 10, 8).unbind(0)
    drawn = orthogonal_features(2, 16, 8, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(performer(q, k, v, drawn, scale=0.3), performer(q, k, v, drawn, scale=0.3))
        inside = performer(q, k, v, drawn, scale=0.3)
    assert torch.equal(inside, performer(q, k, v, drawn, scale=0.3))


def test_double_precision_is_kept() -> None:
    whole, merged = Grid(2, 3, 1), Grid(2, 3, 1, cells=torch.tensor([[0, 1]]), sizes=torch.tensor([[3, 1]]))
    module = build("performer:features=6", whole, dim=8).double()
    for grid in (whole, merged):
        x = torch.randn(1, grid.tokens, 8, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(lambda x, grid=grid: module(x, Context(grid))[0], x)
    # What single precision would lose of these scores is more than a billionth of them.
    q, k, v = torch.randn(3, 1, 2, 10, 8, dtype=torch.float64).unbind(0)
    found = performer(q, k, v, module.features.new_ones(2, 4, 8), scale=0.3)
    kernel = torch.exp(0.3**0.5 * k.sum(-1) - 0.3 * k.square().sum(-1) / 2)  # all features alike: queries do not matter
    expected = (kernel[..., None] * v).sum(2, keepdim=True) / kernel.sum(-1)[..., None, None]
    torch.testing.assert_close(found, expected.expand_as(found), atol=1e-13, rtol=1e-12)


def test_a_merged_token_counts_as_many_as_it_stands_for() -> None:
    whole, merged = Grid(1, 6), Grid(1, 6, cells=torch.tensor([[0, 1, 2]]), sizes=torch.tensor([[3, 1, 2]]))
    module = build("performer", whole)
    few = torch.randn(1, 3, 16)
    many = few.repeat_interleave(torch.tensor([3, 1, 2]), dim=1)
    expected = module(many, Context(whole))[0][:, [0, 3, 4]]
    torch.testing.assert_close(module(few, Context(merged))[0], expected, atol=1e-5, rtol=1e-5)
