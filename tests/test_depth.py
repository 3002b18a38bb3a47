"""Frames × height × width: attentions that serve them, against what they do frame by frame or box by box."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attendless import (
    Context,
    Grid,
    UserError,
    create,
    execution,
)
from attendless.attention.values import Macs
from attendless.sparse import canvas


def tokens(grid: Grid, batch: int = 2, heads: int = 2, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, heads, grid.tokens, width).unbind(0)
    return q, k, v


def attend(spec: str, grid: Grid, *qkv: Tensor) -> Tensor:
    core = create(spec, qkv[0].shape[1] * qkv[0].shape[3], qkv[0].shape[1], grid=grid, projections=False)
    return core.attend(*qkv, Context(grid))[0]


def test_a_grid_of_frames() -> None:
    grid = Grid(3, 5, 1, depth=4)
    assert (grid.patches, grid.tokens, str(grid)) == (60, 61, "1+4x3x5")
    assert grid.whole() == grid
    assert str(Grid(3, 5)) == "3x5"
    leaves, structure = torch.utils._pytree.tree_flatten(grid)
    assert torch.utils._pytree.tree_unflatten(leaves, structure) == grid


@pytest.mark.parametrize(("depth", "height", "width"), [(8, 8, 8), (4, 6, 2), (3, 5, 7), (2, 4, 4), (9, 3, 2)])
def test_every_patch_has_its_place_on_the_canvas(depth: int, height: int, width: int) -> None:
    places, (tall, wide) = canvas.places(depth, height, width), canvas.sides(depth, height, width)
    assert len(places.unique()) == depth * height * width
    assert int(places.max()) < tall * wide


@pytest.mark.parametrize(("side", "box"), [(2, (1, 2, 2)), (4, (4, 2, 2)), (8, (4, 4, 4))])
def test_square_blocks_of_the_canvas_are_boxes_in_space_and_time(side: int, box: tuple[int, int, int]) -> None:
    depth, height, width = 8, 8, 8
    places, wide = canvas.places(depth, height, width), canvas.sides(depth, height, width)[1]
    block = (places // wide // side * wide + places % wide // side).view(depth, height, width)
    frame, y, x = torch.meshgrid(*(torch.arange(n) for n in (depth, height, width)), indexing="ij")
    boxes = (frame // box[0] * height + y // box[1]) * width + x // box[2]
    for number in block.unique():
        assert len(boxes[block == number].unique()) == 1
    assert len(block.unique()) == len(boxes.unique())


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_foveal_attention_on_frames_is_that_of_their_canvas(backend: str) -> None:
    grid = Grid(4, 6, 1, depth=8)
    q, k, v = tokens(grid)
    flat = Grid(*canvas.sides(8, 4, 6), 1)
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + canvas.places(8, 4, 6).argsort()])
    with execution(backend):
        for spec in ("foveal:keep=0.1", "foveal:keep=0.2,cell=2,tile=4,coarse=4", "foveal:keep=0.2,cell=4,tile=2"):
            expected = attend(spec, flat, *(x[:, :, order] for x in (q, k, v)))
            torch.testing.assert_close(attend(spec, grid, q, k, v)[:, :, order], expected, atol=1e-5, rtol=1e-4)


def test_foveal_attention_that_sees_everything_is_full_attention() -> None:
    for grid in (Grid(4, 6, 1, depth=4), Grid(5, 7, 2, depth=3), Grid(3, 3, depth=2)):
        q, k, v = (x.requires_grad_() for x in tokens(grid))
        ours, full = attend("foveal:keep=1", grid, q, k, v), attend("full", grid, q, k, v)
        torch.testing.assert_close(ours, full, atol=1e-5, rtol=1e-4)
        slopes = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, full)]
        torch.testing.assert_close(*slopes, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["window:size=3,bias=false", "window:size=2,shift=1,bias=false", "window:size=3"])
def test_windows_are_those_of_each_frame(spec: str) -> None:
    grid, frame = Grid(4, 5, 1, depth=3), Grid(4, 5, 1)
    q, k, v = tokens(grid)
    out = attend(spec, grid, q, k, v)
    for number in range(3):
        seen = [0, *range(1 + 20 * number, 21 + 20 * number)]
        expected = attend(spec, frame, *(x[:, :, seen] for x in (q, k, v)))
        torch.testing.assert_close(out[:, :, seen][:, :, 1:], expected[:, :, 1:])
    torch.testing.assert_close(out[:, :, :1], attend("full", grid, q, k, v)[:, :, :1])


def test_costs_count_every_frame() -> None:
    def cost(spec: str, grid: Grid) -> Macs:
        return create(spec, 16, 2, grid=grid, projections=False).macs(grid)

    video, frame = Grid(6, 6, depth=4), Grid(6, 6)
    assert cost("full", video).core == 16 * cost("full", frame).core
    assert cost("window:size=3,bias=false", video).core == 4 * cost("window:size=3,bias=false", frame).core
    assert cost("foveal:keep=0.1,order=0", video).core < 0.5 * cost("full", video).core


@pytest.mark.parametrize("spec", ["axial", "bigbird", "reduced", "linformer", "performer", "topk:keep=0.5"])
def test_others_say_that_they_take_one_frame(spec: str) -> None:
    with pytest.raises(UserError, match="cannot serve grid 4x6x6: it takes one frame at a time"):
        create(spec, 16, 2, grid=Grid(6, 6, depth=4))
