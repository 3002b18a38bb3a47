"""Axial attention against a loop over queries that looks up rows and columns one key at a time."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attendless import Context, Grid, UserError, create
from attendless.attention import axial as axial_file
from attendless.attention.axial import axial
from attendless.attention.full import full
from attendless.sparse.patterns import axial_pattern


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_axial_equals_its_definition(height: int, width: int, prefix: int, seed: int) -> None:
    torch.manual_seed(seed)
    N = prefix + height * width
    q, k = torch.randn(2, 2, 1, N, 4, requires_grad=True).unbind(0)
    v, weight = torch.randn(2, 1, N, 3, requires_grad=True), torch.randn(2, 1, N, 3)
    out = axial(q, k, v, height, width, prefix=prefix, scale=0.7)
    with mock.patch.object(axial_file, "_SCORES", 1):
        one_image_at_a_time = axial(q, k, v, height, width, prefix=prefix, scale=0.7)
    torch.testing.assert_close(one_image_at_a_time, out, atol=1e-6, rtol=1e-5)
    rows = []
    for i in range(N):
        y, x = divmod(i - prefix, width)
        seen = [j for j in range(N) if min(i, j) < prefix or y == (j - prefix) // width or x == (j - prefix) % width]
        scores = 0.7 * torch.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, seen])
        rows.append(torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), v[:, :, seen]))
    reference = torch.stack(rows, dim=2)
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((reference * weight).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1)])
def test_a_single_row_or_column_is_full_attention(shape: tuple[int, int]) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind(0)
    out = axial(q, k, v, *shape, prefix=2, scale=0.5)
    torch.testing.assert_close(out, full(q, k, v, scale=0.5), atol=1e-5, rtol=1e-5)


def test_cost_is_two_products_per_pair_the_pattern_shows() -> None:
    grid = Grid(5, 9, 3)
    module = create("axial", 32, 4, grid=grid)
    assert module.core_macs(grid) == 2 * axial_pattern(5, 9, 3).edges(4) * 8


def test_dropout_is_unbiased_and_only_in_training() -> None:
    grid = Grid(4, 4, 1)
    module = create("axial", 16, 2, grid=grid, attn_drop=0.3)
    x = torch.randn(1, 17, 16).expand(4000, -1, -1)
    with torch.no_grad():
        dropped, kept = module.train()(x, Context(grid))[0], module.eval()(x[:1], Context(grid))[0]
    assert dropped.std(0).max() > 0.01
    torch.testing.assert_close(dropped.mean(0), kept[0], atol=0.02, rtol=0)


def test_a_reduced_grid_is_refused() -> None:
    grid = Grid(4, 4, cells=torch.arange(9)[None], sizes=torch.ones(1, 9))
    with pytest.raises(UserError, match="a row or column needs all its cells; tokens were dropped or merged"):
        create("axial", 16, 2, grid=grid)
