"""Window attention against pairs of cells compared one by one, against full attention, and against timm's Swin."""

from __future__ import annotations

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor

from attendless import (
    Attention,
    Context,
    Grid,
    UserError,
    create,
)
from attention_checks import assert_equals, build


def reference(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Each query collects the keys it may see, one at a time."""
    size, shift, P = module.options.size, module.options.shift, grid.prefix

    def place(token: int) -> tuple[int, int]:
        return divmod(token - P, grid.width)

    def window_of(cell: int, side: int) -> int:
        return 0 if side <= size else (cell - shift) // size

    def sees(i: int, j: int) -> bool:
        if i < P or j < P:
            return True
        (yi, xi), (yj, xj) = place(i), place(j)
        same_row = window_of(yi, grid.height) == window_of(yj, grid.height)
        return same_row and window_of(xi, grid.width) == window_of(xj, grid.width)

    def bias(i: int, j: int) -> Tensor:
        if i < P or j < P or not module.options.bias:
            return q.new_zeros(q.shape[1])
        (yi, xi), (yj, xj) = place(i), place(j)
        return module.relative_position_bias_table[(yi - yj + size - 1) * (2 * size - 1) + xi - xj + size - 1]

    rows = []
    for i in range(grid.tokens):
        keys = [j for j in range(grid.tokens) if sees(i, j)]
        scores = torch.stack([(q[:, :, i] * k[:, :, j]).sum(-1) / q.shape[-1] ** 0.5 + bias(i, j) for j in keys], -1)
        rows.append((torch.softmax(scores, -1)[..., None] * v[:, :, keys]).sum(2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("spec", ["window:size=3", "window:size=3,shift=1", "window:size=4,shift=2,bias=false"])
@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(4, 7, 1), Grid(5, 3, 2), Grid(8, 4)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    assert_equals(build(spec, grid), grid, reference)


@pytest.mark.parametrize("grid", [Grid(4, 6), Grid(5, 5, 1)], ids=str)
@pytest.mark.parametrize("spec", ["window:size=6,bias=false", "window:size=9,shift=4", "window:size=6"])
def test_a_window_as_large_as_the_grid_is_full_attention(spec: str, grid: Grid) -> None:
    module, full = create(spec, 16, 2, grid=grid), create("full", 16, 2, grid=grid)
    full.load_state_dict(module.state_dict(), strict=False)
    x = torch.randn(2, grid.tokens, 16)
    torch.testing.assert_close(module(x, Context(grid))[0], full(x, Context(grid))[0], atol=1e-6, rtol=1e-5)


def test_timms_window_attention() -> None:
    theirs = WindowAttention(32, 4, window_size=7).eval()
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    ours = create("window", 32, 4, grid=Grid(7, 7)).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 49, 32)
    torch.testing.assert_close(ours(x, Context(Grid(7, 7)))[0], theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("shift", "height", "width"), [(0, 14, 21), (3, 14, 21), (3, 7, 14), (3, 7, 7)])
def test_timms_swin_block(shift: int, height: int, width: int) -> None:
    theirs = SwinTransformerBlock(32, (height, width), 4, window_size=7, shift_size=shift).eval()
    torch.nn.init.normal_(theirs.attn.relative_position_bias_table)
    grid = Grid(height, width)
    ours = create(f"window:shift={shift}", 32, 4, grid=grid).eval()
    ours.load_state_dict(theirs.attn.state_dict())
    x = torch.randn(2, grid.tokens, 32)
    expected = theirs._attn(x.unflatten(1, (height, width))).flatten(1, 2)
    torch.testing.assert_close(ours(x, Context(grid))[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize(("height", "width"), [(4, 14), (21, 5), (14, 1)])
def test_timms_swin_block_on_a_grid_with_one_short_side(shift: int, height: int, width: int) -> None:
    """timm makes the table for the window it cuts; in ours the same offsets stand in the middle."""
    theirs = SwinTransformerBlock(32, (height, width), 4, window_size=7, shift_size=shift).eval()
    torch.nn.init.normal_(theirs.attn.relative_position_bias_table)
    grid = Grid(height, width)
    ours = create(f"window:shift={shift}", 32, 4, grid=grid).eval()
    (h, w), table = theirs.window_size, ours.relative_position_bias_table.data.view(13, 13, 4)
    assert sorted((h, w)) == sorted((min(height, width), 7))
    table[7 - h : 6 + h, 7 - w : 6 + w] = theirs.attn.relative_position_bias_table.data.view(2 * h - 1, 2 * w - 1, 4)
    shared = {n: v for n, v in theirs.attn.state_dict().items() if "relative_position" not in n}
    assert not ours.load_state_dict(shared, strict=False).unexpected_keys
    x = torch.randn(2, grid.tokens, 32)
    expected = theirs._attn(x.unflatten(1, (height, width))).flatten(1, 2)
    torch.testing.assert_close(ours(x, Context(grid))[0], expected, atol=1e-5, rtol=1e-5)


def test_a_short_side_leaves_the_other_its_windows_and_its_shift() -> None:
    """Not as in Swin's own code, where 4 × 14 cells would be cut into squares of 4 and stay unshifted."""
    shown = build("window:shift=3,bias=false", Grid(4, 14)).map(torch.randn(1, 56, 16), Context(Grid(4, 14)))[0, 0]
    columns = (shown[0].view(4, 14) > 0).all(0).nonzero().flatten().tolist()
    assert columns == [0, 1, 2]
    columns = (shown[5].view(4, 14) > 0).all(0).nonzero().flatten().tolist()
    assert columns == list(range(3, 10))


def test_windows_do_not_leak_and_prefix_tokens_do() -> None:
    grid = Grid(8, 8, 1)
    module = build("window:size=4", grid)
    x = torch.randn(1, grid.tokens, 16)
    shown = module.map(x, Context(grid))[0, 0]
    assert (shown[0] > 0).all(), "the prefix token sees every token"
    assert (shown[:, 0] > 0).all(), "every token sees the prefix token"
    corner = shown[1, 1:].view(8, 8)
    assert (corner[:4, :4] > 0).all()
    assert corner[4:].abs().sum() + corner[:, 4:].abs().sum() == 0


def test_cost_is_windows_times_window() -> None:
    assert create("window", 32, 4, grid=Grid(14, 14)).core_macs(Grid(14, 14)) == 2 * 196 * 49 * 32
    assert create("window", 32, 4, grid=Grid(8, 8)).core_macs(Grid(8, 8)) == 2 * 196 * 49 * 32, "padding is computed"


def test_a_shift_of_a_whole_window_is_refused() -> None:
    with pytest.raises(UserError, match=r"window: option shift=7 is out of range: expected less than size=7"):
        create("window:shift=7", 32, 4, grid=Grid(14, 14))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_with_gradients(dtype: torch.dtype) -> None:
    grid = Grid(5, 6, 1)
    module = build("window:size=4,shift=2", grid).to(dtype)
    x = (20 * torch.randn(1, grid.tokens, 16)).to(dtype).requires_grad_()
    out, _ = module(x, Context(grid))
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
