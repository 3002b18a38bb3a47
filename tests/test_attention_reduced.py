"""Spatial-reduction attention against loops over blocks and queries, full attention, and timm's PVT v2."""

from __future__ import annotations

import pytest
import torch
from timm.models.pvt_v2 import Attention as TimmAttention
from torch import Tensor

from attendless import Attention, Context, Grid, create
from attention_checks import assert_same_with_gradients, build, textbook_heads


def blocks(grid: Grid, ratio: int, pool: int) -> list[list[tuple[int, int]]]:
    """The cells each key is made of."""
    if pool:
        rows, columns = (
            [(i * n // pool, -(-(i + 1) * n // pool)) for i in range(pool)] for n in (grid.height, grid.width)
        )
    else:
        rows, columns = ([(i * ratio, (i + 1) * ratio) for i in range(n // ratio)] for n in (grid.height, grid.width))
    return [[(y, x) for y in range(*r) for x in range(*c)] for r in rows for c in columns]


def reference(module: Attention, x: Tensor, grid: Grid) -> Tensor:
    """Make each key from its block of cells, one block at a time, then let each query look at the keys."""
    ratio, pool, P = module.options.ratio, module.options.pool, grid.prefix
    cells = x[:, P:].unflatten(1, (grid.height, grid.width))
    keys = [x[:, i] for i in range(P)]
    for block in blocks(grid, ratio, pool):
        if pool:
            mean = sum(cells[:, y, c] for y, c in block) / len(block)
            z = mean @ module.sr.weight[:, :, 0, 0].T + module.sr.bias
        else:
            z = module.sr.bias + sum(cells[:, y, c] @ module.sr.weight[:, :, y % ratio, c % ratio].T for y, c in block)
        z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        z = z * module.sr_norm.weight + module.sr_norm.bias
        keys.append(torch.nn.functional.gelu(z) if pool else z)
    q, _, _ = textbook_heads(x, module.qkv.weight, module.qkv.bias, module.num_heads)
    _, k, v = textbook_heads(torch.stack(keys, 1), module.qkv.weight, module.qkv.bias, module.num_heads)
    rows = []
    for i in range(grid.tokens):
        weights = torch.softmax((q[:, :, i, None] * k).sum(-1) / q.shape[-1] ** 0.5, -1)
        rows.append((weights[..., None] * v).sum(2))
    out = torch.cat(torch.stack(rows, 2).unbind(1), -1)
    return out @ module.proj.weight.T + module.proj.bias


@pytest.mark.parametrize("spec", ["reduced", "reduced:ratio=3", "reduced:pool=3"])
@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(4, 7, 1), Grid(5, 3, 2)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    module = build(spec, grid)
    x = torch.randn(2, grid.tokens, 16, requires_grad=True)
    assert_same_with_gradients(module, x, module(x, Context(grid))[0], reference(module, x, grid), 1e-5)


def test_ratio_one_is_full_attention() -> None:
    grid = Grid(4, 5, 1)
    module, full = build("reduced:ratio=1", grid), build("full", grid)
    full.load_state_dict(module.state_dict())
    x = torch.randn(2, grid.tokens, 16)
    torch.testing.assert_close(module(x, Context(grid))[0], full(x, Context(grid))[0], atol=1e-6, rtol=1e-5)


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    stacked = {f"qkv.{n}": torch.cat([state[f"q.{n}"], state[f"kv.{n}"]]) for n in ("weight", "bias")}
    rest = {name: value for name, value in state.items() if not name.startswith(("q.", "kv."))}
    return stacked | {name.replace("norm.", "sr_norm."): value for name, value in rest.items()}


@pytest.mark.parametrize("shape", [(14, 14), (9, 13)])
@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ("reduced", {"sr_ratio": 2}),
        ("reduced:ratio=8", {"sr_ratio": 8}),
        ("reduced:ratio=1", {"sr_ratio": 1}),
        ("reduced:pool=7", {"linear_attn": True}),
    ],
)
def test_timms_pvt_v2_attention(spec: str, arguments: dict[str, object], shape: tuple[int, int]) -> None:
    theirs, grid = TimmAttention(32, 4, **arguments).eval(), Grid(*shape)
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ours = create(spec, 32, 4, grid=grid).eval()
    ours.load_state_dict(from_timm(theirs.state_dict()))
    x = torch.randn(2, grid.tokens, 32)
    torch.testing.assert_close(ours(x, Context(grid))[0], theirs(x, shape), atol=1e-5, rtol=1e-5)


def test_the_convolution_starts_as_the_mean_of_its_block() -> None:
    grid = Grid(4, 6)
    module = create("reduced", 16, 2, grid=grid)
    x = torch.randn(1, 24, 16)
    mean = x.view(1, 2, 2, 3, 2, 16).mean((2, 4)).flatten(1, 2)
    torch.testing.assert_close(module.reduce(x, grid), module.sr_norm(mean))


@pytest.mark.parametrize("spec", ["reduced", "reduced:pool=2", "reduced:ratio=1"])
def test_the_map_spreads_a_key_over_its_block(spec: str) -> None:
    grid = Grid(4, 4, 1)
    module = build(spec, grid)
    shown = module.map(torch.randn(2, 17, 16), Context(grid))
    torch.testing.assert_close(shown.sum(-1), torch.ones(2, 2, 17))
    corner = shown[0, 0, 3, 1:].view(4, 4)[:2, :2].flatten()
    assert (corner == corner[0]).all() == (spec != "reduced:ratio=1")


def test_a_grid_shorter_than_the_ratio_has_one_key() -> None:
    grid = Grid(3, 2)
    module = build("reduced:ratio=4", grid)
    assert module.keys(grid) == 1
    assert module(torch.randn(2, 6, 16), Context(grid))[0].isfinite().all()


@pytest.mark.parametrize("spec", ["reduced:ratio=8", "reduced:pool=7"])
def test_fp16_does_not_overflow_at_many_tokens(spec: str) -> None:
    grid = Grid(64, 64, 1)
    module = create(spec, 16, 2, grid=grid).half()
    x = 20 * torch.randn(1, grid.tokens, 16).half()
    assert module(x, Context(grid))[0].isfinite().all()


@pytest.mark.parametrize("sides", [(4, 8), (7, 5)])
def test_the_map_where_the_ratio_does_not_divide_the_grid(sides: tuple[int, int]) -> None:
    grid = Grid(*sides, 1)
    layer = create("reduced:ratio=3", 16, 2, grid=grid).eval()
    found = layer.map(torch.randn(2, grid.tokens, 16), Context(grid))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, grid.tokens))
    beyond = sides[1] // 3 * 3
    assert not found[..., 1:].unflatten(-1, sides)[..., beyond:].any(), "patches beyond the last block are no keys"
