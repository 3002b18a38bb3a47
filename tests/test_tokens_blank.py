"""`blank`: redundant neighbours merge before the first layer; where their tokens are equal, nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attendless import UserError
from attendless.attention import Context, Grid
from attendless.backbones import Columnar
from attendless.convert import convert
from merging_loops import means, reducer

SHAPE = {"img_size": 48, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 7}


def groups_by_loops(x: Tensor, grid: Grid, r: int, window: int) -> list[list[int]]:
    """One image, patches x [n, C]: groups of patches, by their first patch."""
    area, found = grid.height * grid.width, {}
    for i in range(len(x)):
        frame, row, column = i // area, i // grid.width % grid.height, i % grid.width
        for place, step in ((column, 1), (row, grid.width), (frame, area)):
            if place % (window or 99):
                found.setdefault(i, []).append((float((x[i] - x[i - step]).square().sum()), i - step))
    parent = {i: min(found[i])[1] for i in sorted(found, key=lambda i: min(found[i])[0])[:r]}
    groups: dict[int, list[int]] = {}
    for i in range(len(x)):
        root = i
        while root in parent:
            root = parent[root]
        groups.setdefault(root, []).append(i)
    return list(groups.values())


@pytest.mark.parametrize("window", [0, 2, 3])
@pytest.mark.parametrize("grid", [Grid(4, 5, 1), Grid(4, 6), Grid(2, 3, 2, depth=4)], ids=str)
def test_equals_loops(grid: Grid, window: int) -> None:
    x = torch.randn(2, grid.tokens, 8, generator=torch.Generator().manual_seed(window))
    out, context = reducer(f"blank:keep=0.6,window={window}")(x, Context(grid))
    left = round(0.6 * grid.patches)
    for image in range(2):
        groups = groups_by_loops(x[image, grid.prefix :], grid, grid.patches - left, window)
        expected, sizes = means(x[image], groups, grid.prefix)
        torch.testing.assert_close(out[image], expected)
        assert context.grid.sizes[image].tolist() == sizes
        assert context.grid.cells[image].tolist() == [group[0] for group in groups]


def test_a_patch_of_each_window_stays() -> None:
    grid = Grid(5, 6, 1, depth=2)
    assert reducer("blank:keep=0,window=4").remaining(grid) == 4
    assert reducer("blank:keep=0,window=0").remaining(grid) == 1


def page(blank: int = 26) -> Tensor:
    """Images of 6 × 6 patches, of which the first `blank` rows-first patches are white."""
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).reshape(2, 3, 36, 8, 8)
    patches[:, :, :blank] = 1.0
    return patches.reshape(2, 3, 6, 6, 8, 8).transpose(3, 4).reshape(2, 3, 48, 48)


def model(positions: bool, **changes: object) -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**SHAPE, **changes, attention="full").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    if not positions:
        model.pos_embed.data.zero_()
    return model


@pytest.mark.parametrize(
    "pool", [{}, {"class_token": False, "global_pool": "avg"}, {"reg_tokens": 2}], ids=["class", "mean", "registers"]
)
@pytest.mark.parametrize("attention", ["full", "foveal:keep=1"])
def test_exact_where_equal_patches_are_equal_tokens(pool: dict[str, object], attention: str) -> None:
    plain, images = model(positions=False, **pool), page()
    fast = convert(plain, attention, tokens="blank:keep=0.4,window=0,exact=true", below_breakeven="keep").eval()
    with torch.inference_mode():
        x, context = fast.forward_context(images)
        torch.testing.assert_close(fast(images), plain(images), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(context.grid.restore(x), plain.forward_features(images), atol=2e-5, rtol=1e-4)
    assert x.shape[1] == plain.num_prefix_tokens + 14
    assert context.grid.sizes.amax() > 5


def test_exact_is_refused_where_tokens_differ() -> None:
    spec = "blank:keep=0.4,window=0,exact=true"
    few = r"was to merge 22 of 36 patches, but an image has only 10 whose token equals that of a neighbour"
    with torch.inference_mode():
        with pytest.raises(UserError, match=few):
            convert(model(positions=False), tokens=spec)(page(blank=11))
        with pytest.raises(UserError, match=r"only 0 whose token equals .* Position embeddings make the tokens"):
            convert(model(positions=True), tokens=spec)(page())
        convert(model(positions=True), tokens="blank:keep=0.4,window=0")(page())


def test_blank_patches_are_those_that_merge() -> None:
    """With position embeddings too, and white patches as good as any other."""
    fast = convert(model(positions=True), tokens="blank:keep=0.7")
    with torch.inference_mode():
        _, context = fast.forward_context(page())
    for image in range(2):
        stays = set(context.grid.cells[image].tolist())
        assert set(range(36)) - stays <= set(range(26))
