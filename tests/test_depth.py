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
from attendless.tokens import create_reducers, parse_tokens


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


@pytest.mark.parametrize("grid", [Grid(8, 8, depth=4), Grid(7, 7, depth=3), Grid(6, 4, 1, depth=5)])
def test_foveal_sees_the_tokens_it_weighs_one_by_one(grid: Grid) -> None:
    """Tokens of one blurred cell share one key, so their weights are equal; those of the chosen cells differ."""
    torch.manual_seed(0)
    layer = create("foveal:keep=0.1,cell=4,tile=4,coarse=0,order=0", 16, 2, grid=grid).eval()
    layer.double().qkv.weight.data.mul_(4)
    x, places = torch.randn(2, grid.tokens, 16).double(), canvas.places(grid.depth, grid.height, grid.width)
    wide = canvas.sides(grid.depth, grid.height, grid.width)[1]
    cell = places // wide // 4 * wide + places % wide // 4
    for query in range(0, grid.tokens, 7):
        with torch.no_grad():
            seen, weight = layer.sees(x, Context(grid), query), layer.map(x, Context(grid), query)[:, :, 0]
        sharp = torch.ones_like(seen)
        for number in cell.unique():
            inside = grid.prefix + (cell == number).nonzero()[:, 0]
            spread = weight[..., inside].amax(-1) - weight[..., inside].amin(-1)
            sharp[..., inside] = (spread > 1e-6 * weight[..., inside].amax(-1))[..., None]
        assert torch.equal(seen, sharp | (query < grid.prefix)), f"query {query}"


@pytest.mark.parametrize(
    "spec",
    [
        "tome:r=9",
        "tome:r=9,window=2",
        "tome:r=9,protect=0.1",
        "evit:keep=0.5,at=0",
        "evit:keep=0.5,at=0,fuse=false",
        "dynamicvit:keep=0.5,at=0",
    ],
)
def test_reducers_reduce_the_frames_together_and_keep_their_number(spec: str) -> None:
    grid, chosen = Grid(4, 3, 1, depth=3), parse_tokens(spec)
    reducer = create_reducers(chosen, 16, 8, 1)[0].eval()
    x = torch.randn(2, grid.tokens, 16)
    context = Context(
        grid, keys=torch.randn(2, 2, grid.tokens, 8), class_attention=torch.rand(2, 2, grid.tokens).softmax(-1)
    )
    out, context = reducer(x, context)
    left = context.grid
    assert (left.depth, left.tokens, out.shape[1]) == (3, reducer.reduced(grid).tokens, left.tokens)
    assert left.patches < 36
    assert left.restore(out).shape == x.shape
    assert left.whole() == grid
    frames = left.owners.unflatten(1, (3, 12))
    assert (frames >= 0).any(2).all(), "tokens of every frame are left"


def test_tome_puts_the_tokens_of_every_frame_back() -> None:
    grid = Grid(4, 3, depth=3)
    merging, restoring = create_reducers(parse_tokens("tome:r=6,until=1"), 16, 8, 2).values()
    x = torch.randn(2, 36, 16)
    merged, context = merging(x, Context(grid, keys=torch.randn(2, 2, 36, 8)))
    restored, context = restoring(merged, context)
    assert context.grid == grid
    assert restoring.remaining(merging.reduced(grid)) == 36
    torch.testing.assert_close(
        restored, merged.gather(1, restored_from(merged, restored)[..., None].expand(-1, -1, 16))
    )


def restored_from(merged: Tensor, restored: Tensor) -> Tensor:
    """The merged token that each restored one equals."""
    return torch.cdist(restored, merged).argmin(-1)
