"""Linformer against loops over averages, against full attention, and its projections on other grids."""

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
from attendless.attention.linformer import resample
from attention_checks import assert_equals, build


def reference(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Sum up each average token by token, then let each query look at the averages."""
    down, bias = module.down, module.down_bias
    for_keys, for_values = down[0], down[0] if module.options.shared else down[1]

    def averages(weights: Tensor, tokens: Tensor, which: int) -> Tensor:
        rows = [sum(row[n] * tokens[:, :, n] for n in range(grid.tokens)) for row in weights]
        return torch.stack([r if bias is None else r + bias[which, m, 0] for m, r in enumerate(rows)], 2)

    keys, values = averages(for_keys, k, 0), averages(for_values, v, -1)
    out = []
    for n in range(grid.tokens):
        weights = torch.softmax((q[:, :, n, None] * keys).sum(-1) / q.shape[-1] ** 0.5, -1)
        out.append((weights[..., None] * values).sum(2))
    return torch.stack(out, 2)


@pytest.mark.parametrize("spec", ["linformer:keys=7", "linformer:keys=3,shared", "linformer:ratio=4,shared,bias"])
@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(3, 3, 2)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    assert_equals(build(spec, grid), grid, reference)


@pytest.mark.parametrize("shared", ["", ",shared"])
def test_an_identity_projection_is_full_attention(shared: str) -> None:
    grid = Grid(4, 5, 1)
    module, full = build(f"linformer:keys=21{shared}", grid), build("full", grid)
    module.down.data[:] = torch.eye(21)
    full.load_state_dict({n: w for n, w in module.state_dict().items() if n != "down"})
    x = torch.randn(2, 21, 16)
    torch.testing.assert_close(module(x, Context(grid))[0], full(x, Context(grid))[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(module.map(x, Context(grid)), full.map(x, Context(grid)), atol=1e-6, rtol=1e-5)


def test_the_map_times_the_values_is_the_output() -> None:
    grid = Grid(3, 4, 1)
    module = build("linformer:keys=5", grid)
    x = torch.randn(2, 13, 16)
    q, k, v = module.project(x)
    expected = module.attend(q, k, v, Context(grid))[0]
    torch.testing.assert_close(module.map(x, Context(grid)) @ v, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("new", [Grid(8, 10, 2), Grid(3, 3, 2), Grid(4, 6, 2), Grid(1, 1, 2)], ids=str)
def test_resampled_rows_keep_their_sum_and_their_prefix(new: Grid) -> None:
    old = Grid(4, 5, 2)
    down = torch.randn(2, 3, old.tokens)
    found = resample(down, old, new)
    assert found.shape == (2, 3, new.tokens)
    torch.testing.assert_close(found.sum(-1), down.sum(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[..., :2], down[..., :2])


def test_resampling_keeps_double_precision() -> None:
    down = torch.randn(1, 2, 21, dtype=torch.float64)
    found = resample(down, Grid(4, 5, 1), Grid(7, 3, 1))
    torch.testing.assert_close(found.sum(-1), down.sum(-1), atol=1e-14, rtol=1e-14)


def test_resampling_goes_by_place_on_the_grid() -> None:
    old, new = Grid(4, 4), Grid(8, 8)
    corner = torch.zeros(1, 1, 4, 4)
    corner[..., 0, 3] = 1
    found = resample(corner.flatten(2), old, new).view(8, 8)
    assert found.argmax() in (6, 7, 14, 15), "the weight stays in its corner"
    even = resample(torch.full((1, 1, 16), 1 / 16), old, new)
    torch.testing.assert_close(even, torch.full((1, 1, 64), 1 / 64))


def test_another_grid_on_the_fly_is_the_resized_layer() -> None:
    old, new = Grid(4, 4, 1), Grid(6, 5, 1)
    module = build("linformer:ratio=2", old)
    x = torch.randn(2, new.tokens, 16)
    on_the_fly = module(x, Context(new))[0]
    module.resize(new)
    assert str(module.spec) == "linformer:keys=8"
    assert module.down.shape == (2, 8, new.tokens)
    torch.testing.assert_close(module(x, Context(new))[0], on_the_fly, atol=0, rtol=0)
    again = create(str(module.spec), 16, 2, grid=new)
    again.load_state_dict(module.state_dict())


def test_other_prefixes_and_missing_patches_are_refused() -> None:
    module = build("linformer", Grid(4, 4, 1))
    with pytest.raises(UserError, match="made for 1 prefix tokens"):
        module(torch.randn(1, 16, 16), Context(Grid(4, 4)))
    with pytest.raises(UserError, match="lacks patches"):
        module(torch.randn(1, 10, 16), Context(Grid(4, 4, 1, cells=torch.arange(9)[None])))


def test_fp16_does_not_overflow_at_many_tokens() -> None:
    grid = Grid(64, 64)
    module = create("linformer", 16, 2, grid=grid).half()
    x = 20 * torch.randn(1, grid.tokens, 16).half()
    assert module(x, Context(grid))[0].isfinite().all()
