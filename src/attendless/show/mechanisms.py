"""Figures of particular mechanisms: Sparsifiner's predictor, foveal's cells, fixed patterns, and the tokens that remain
after token reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Context, Grid, create
from ..attention.selection import HasPredictor
from ..errors import UserError
from ..maps import (
    entries,
    entry,
    numbers,
    on_grid,
    patches_under,
)
from . import panels
from .looking import seen_closely
from .scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The fixed patterns in Sparsifiner's first figure, and the parts of BigBird in BBViT's.
FIXED = {"windows": "window:size=7", "axial": "axial", "BigBird": "bigbird:block=2"}
PARTS = {
    "random": "bigbird:block=2,window=0,globals=0",
    "window": "bigbird:block=2,random=0,globals=0",
    "global": "bigbird:block=2,window=0,random=0",
    "all three": "bigbird:block=2",
}


def draw_patterns(scene: Scene) -> Figure:
    """Fixed patterns beside the keys that this model selects (Sparsifiner's figure 1)."""
    given = entry(scene.model, scene.image, scene.layers[-1])
    grid = given.context.grid
    (query,) = patches_under(scene.query, grid, scene.image)
    figure, axes = panels.sheet(
        1, len(FIXED) + 2, f"layer {given.layer}: fixed patterns and {given.attention.name}", 2.0
    )
    panels.picture(axes[0, 0], scene, grid)
    found = {name: _fixed(spec, grid, query) for name, spec in FIXED.items()}
    found[given.attention.name] = seen_closely(scene, given)[(scene.heads or (0,))[0]]
    for panel, mask in zip(axes[0, 1:], found.values(), strict=True):
        panels.heat(panel, scene, on_grid(mask[None, None].float(), grid)[0, 0], most=1)
        panels.mark(panel, scene, grid)
        panel.set_xlabel(f"{float(mask.float().mean()):.0%} of the keys", fontsize=7)
    panels.heads_of(axes, ["query", *found], [""])
    return figure


def _fixed(spec: str, grid: Grid, query: int) -> Tensor:
    if grid.reduced:
        raise UserError("fixed patterns need a complete grid: select a layer before token reduction")
    attention = create(spec, 8, 1, grid=grid)
    return attention.sees(torch.randn(1, grid.tokens, 8), Context(grid), query)[0, 0]


def draw_bigbird(scene: Scene) -> Figure:
    """The parts of BigBird's pattern and their union, queries × keys (BBViT's figure 1)."""
    grid = entry(scene.model, scene.image, scene.layers[0]).context.grid.whole()
    figure, axes = panels.sheet(2, len(PARTS), "BigBird on this model's grid", 2.0)
    for column, spec in zip(axes.T, PARTS.values(), strict=True):
        attention = create(spec, 8, 1, grid=grid)
        with torch.no_grad():
            pairs = attention.map(torch.randn(1, grid.tokens, 8), Context(grid))[0, 0] > 0
        (query,) = patches_under(scene.query, grid, scene.image)
        column[0].imshow(pairs.numpy(), cmap=panels.HEAT, vmin=0, vmax=1, interpolation="nearest")
        column[0].set_xlabel(f"{float(pairs.float().mean()):.0%} of the pairs", fontsize=7)
        panels.heat(column[1], scene, on_grid(pairs[query][None, None].float(), grid)[0, 0], most=1)
        panels.mark(column[1], scene, grid)
    panels.heads_of(axes, list(PARTS), ["all pairs", "one patch"])
    return figure


def draw_low_rank(scene: Scene) -> Figure:
    """Full attention, Sparsifiner's low-rank prediction, and the sparse map (Sparsifiner's figure 5)."""
    ours, full = scene.maps(), scene.maps(dense=True)
    figure, axes = panels.sheet(len(ours), 4, "full, low-rank and sparse, averaged over heads")
    for row, one, dense, given in zip(axes, ours, full, _predicting(scene, scene.layers), strict=True):
        (query,) = patches_under(scene.query, one.grid, scene.image)
        with torch.no_grad():
            q, k, _ = given.attention.project(given.x)
            guess = given.attention.connectivity(q, k, one.grid)[:, :, query].mean(1, keepdim=True)
        panels.picture(row[0], scene, one.grid)
        shown = (dense.on_grid()[0, :, 0].mean(0), on_grid(guess, one.grid)[0, 0], one.on_grid()[0, :, 0].mean(0))
        for panel, values in zip(row[1:], shown, strict=True):
            panels.heat(panel, scene, values)
            panels.mark(panel, scene, one.grid)
            panels.most(panel, values)
    panels.heads_of(axes, ["query", "full", "low-rank", "sparse"], [f"layer {one.layer}" for one in ours])
    return figure


def draw_basis(scene: Scene, most: int = 12) -> Figure:
    """The sparse basis W_up, one row per panel (Sparsifiner's figure 6)."""
    found = []
    for given in _predicting(scene, scene.layers):
        grid = given.context.grid.whole()
        with torch.no_grad():
            rows = given.attention.sparse_basis(grid)[grid.prefix :]
        rows = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).round().long()]  # evenly spaced
        found.append(on_grid(rows[None], grid)[0])
    count = min(len(rows) for rows in found)
    figure, axes = panels.sheet(len(found), count, f"the sparse basis: {count} rows of W_up on the grid", 1.0)
    for row, maps in zip(axes, found, strict=True):
        for panel, values in zip(row, maps, strict=False):
            panels.heat(panel, scene, values, over=False)
    panels.heads_of(axes, [""] * count, [f"layer {layer}" for layer in scene.layers])
    return figure


def draw_coefficients(scene: Scene) -> Figure:
    """The coefficients of every query in one head, per layer (Sparsifiner's figure 7)."""
    head = (scene.heads or (0,))[0]
    found = _predicting(scene, numbers(scene.model, None))
    columns = min(6, len(found))
    rows = -(-len(found) // columns)
    figure, axes = panels.sheet(
        rows, columns, f"coefficients of head {head}: queries down, averages of keys across (prefix tokens first)", 1.9
    )
    for panel, given in zip(axes.flat, found, strict=False):
        with torch.no_grad():
            q, k, _ = given.attention.project(given.x)
            values = given.attention.coefficients(q, k, given.context.grid)[0, head]
        top = float(values[:, given.context.grid.prefix :].max())  # the class token has larger values than the patches
        panel.imshow(values.numpy(), cmap=panels.HEAT, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        panel.set_xlabel(f"patches: up to {top:.1%}", fontsize=7)
        panel.set_title(f"layer {given.layer}", fontsize=8)
    for panel in axes.flat[len(found) :]:
        panel.remove()
    return figure


def _predicting(scene: Scene, layers: Sequence[int]) -> list[Any]:
    """The inputs of the layers; raises unless their attention is sparsifiner."""
    found = list(entries(scene.model, scene.image, layers))
    for given in found:
        if not isinstance(given.attention, HasPredictor):
            what = f"layer {given.layer} has attention {given.attention.spec}"
            raise UserError(f"{what}: this figure needs sparsifiner")
    return found


def draw_foveal(scene: Scene) -> Figure:
    """The image as one patch sees it: some cells sharp, the others blurred."""
    rows = list(entries(scene.model, scene.image, scene.layers))
    heads = scene.heads or tuple(range(min(given.attention.num_heads for given in rows)))
    figure, axes = panels.sheet(len(rows), len(heads), f"the image as one patch sees it: {rows[0].attention.spec}", 2.0)
    height, width = scene.image.shape[-2:]
    for panel_row, given in zip(axes, rows, strict=True):
        grid, seen = given.context.grid, seen_closely(scene, given)
        side = getattr(given.attention, "layout", lambda grid: None)(grid)
        if side is None:
            raise UserError(f"layer {given.layer} has attention {given.attention.spec}: this figure needs foveal")
        blurred = _blurred(scene.view, side.cell * height // grid.height, side.cell * width // grid.width)
        for panel, head in zip(panel_row, heads, strict=True):
            mask = on_grid(seen[head][None, None].float(), grid)[0, 0] > 0
            sharp = mask.numpy().repeat(-(-height // grid.height), 0).repeat(-(-width // grid.width), 1)
            shown = np.where(sharp[:height, :width, None], scene.view, 0.75 * blurred)
            panel.imshow(shown, extent=(0, width, height, 0))
            panels.mark(panel, scene, grid)
    panels.heads_of(axes, [f"head {head}" for head in heads], [f"layer {given.layer}" for given in rows])
    return figure


def _blurred(view: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Each block of the image in its mean colour."""
    out = np.empty_like(view)
    for y in range(0, view.shape[0], tall):
        for x in range(0, view.shape[1], wide):
            out[y : y + tall, x : x + wide] = view[y : y + tall, x : x + wide].mean((0, 1))
    return out


def draw_tokens(scene: Scene) -> Figure:
    """The remaining tokens of each layer: a merged one in its mean colour, a dropped one dark."""
    found = [(given.layer, given.context.grid) for given in entries(scene.model, scene.image, scene.layers)]
    figure, axes = panels.sheet(1, 1 + len(found), f"tokens after {scene.model.tokens or 'no reduction'}", 2.2)
    panels.picture(axes[0, 0], scene)
    for panel, (layer, grid) in zip(axes[0, 1:], found, strict=True):
        panel.imshow(_patchwork(scene, grid), interpolation="nearest")
        panel.set_title(f"layer {layer}: {grid.patches}", fontsize=8)
    axes[0, 0].set_title("image", fontsize=8)
    return figure


def _patchwork(scene: Scene, grid: Grid) -> np.ndarray:
    """The image with each patch in the mean colour of its token, and lines between tokens."""
    view = torch.from_numpy(scene.view.copy()).permute(2, 0, 1)[None]
    small = torch.nn.functional.adaptive_avg_pool2d(view, (grid.height, grid.width)).flatten(2).transpose(1, 2)
    whole = torch.cat([small.new_zeros(1, grid.prefix, 3), grid.averaged(small)], dim=1)
    shown = grid.restore(whole)[0, grid.prefix :].reshape(grid.height, grid.width, 3)
    token = grid.restore(torch.arange(1.0, 1 + grid.tokens)[None, :, None])[0, grid.prefix :, 0]
    token = token.reshape(grid.height, grid.width)
    scale = max(4, 224 // grid.height)
    large = shown.numpy().repeat(scale, 0).repeat(scale, 1)
    number = token.numpy().repeat(scale, 0).repeat(scale, 1)
    edge = np.zeros(number.shape, dtype=bool)
    edge[1:] |= number[1:] != number[:-1]
    edge[:, 1:] |= number[:, 1:] != number[:, :-1]
    large[edge] = 1.0
    return large
