"""Figures of how particular mechanisms choose what to look at: Sparsifiner's predictor, foveal's cells, fixed patterns,
and the tokens that reducers leave."""

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

#: What Sparsifiner's first figure sets beside it, and BBViT's parts of BigBird.
FIXED = {"windows": "window:size=7", "axial": "axial", "BigBird": "bigbird:block=2"}
PARTS = {
    "random": "bigbird:block=2,window=0,globals=0",
    "window": "bigbird:block=2,random=0,globals=0",
    "global": "bigbird:block=2,window=0,random=0",
    "all three": "bigbird:block=2",
}


def draw_patterns(scene: Scene) -> Figure:
    """patterns fixed beforehand beside the keys this model chooses (Sparsifiner's figure 1)"""
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
        raise UserError("fixed patterns are drawn on whole grids: choose a layer before tokens leave")
    attention = create(spec, 8, 1, grid=grid)
    return attention.sees(torch.randn(1, grid.tokens, 8), Context(grid), query)[0, 0]


def draw_bigbird(scene: Scene) -> Figure:
    """BigBird's parts and their sum, every query against every key (BBViT's figure 1)"""
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
    """full attention, Sparsifiner's low-rank guess, and the sparse map made by it (Sparsifiner's figure 5)"""
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
    """the sparse basis W_up, a row of it a panel (Sparsifiner's figure 6)"""
    found = []
    for given in _predicting(scene, scene.layers):
        grid = given.context.grid.whole()
        with torch.no_grad():
            rows = given.attention.sparse_basis(grid)[grid.prefix :]
        rows = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).round().long()]  # spread over all of them
        found.append(on_grid(rows[None], grid)[0])
    count = min(len(rows) for rows in found)
    figure, axes = panels.sheet(len(found), count, f"the sparse basis: {count} rows of W_up on the grid", 1.0)
    for row, maps in zip(axes, found, strict=True):
        for panel, values in zip(row, maps, strict=False):
            panels.heat(panel, scene, values, over=False)
    panels.heads_of(axes, [""] * count, [f"layer {layer}" for layer in scene.layers])
    return figure


def draw_coefficients(scene: Scene) -> Figure:
    """the coefficients of every query, layer by layer, of one head (Sparsifiner's figure 7)"""
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
        top = float(values[:, given.context.grid.prefix :].max())  # a class token would outshine the patches
        panel.imshow(values.numpy(), cmap=panels.HEAT, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        panel.set_xlabel(f"patches: up to {top:.1%}", fontsize=7)
        panel.set_title(f"layer {given.layer}", fontsize=8)
    for panel in axes.flat[len(found) :]:
        panel.remove()
    return figure


def _predicting(scene: Scene, layers: Sequence[int]) -> list[Any]:
    """What enters the layers, whose attentions must be sparsifiner's."""
    found = list(entries(scene.model, scene.image, layers))
    for given in found:
        if not isinstance(given.attention, HasPredictor):
            what = f"layer {given.layer} attends with {given.attention.spec}, which predicts nothing"
            raise UserError(f"{what}: this figure is of sparsifiner")
    return found


def draw_foveal(scene: Scene) -> Figure:
    """the picture as the patch sees it: sharp where it looks, blurred elsewhere"""
    rows = list(entries(scene.model, scene.image, scene.layers))
    heads = scene.heads or tuple(range(min(given.attention.num_heads for given in rows)))
    figure, axes = panels.sheet(len(rows), len(heads), f"as the patch sees it: {rows[0].attention.spec}", 2.0)
    height, width = scene.image.shape[-2:]
    for panel_row, given in zip(axes, rows, strict=True):
        grid, seen = given.context.grid, seen_closely(scene, given)
        side = getattr(given.attention, "layout", lambda grid: None)(grid)
        if side is None:
            raise UserError(f"layer {given.layer} attends with {given.attention.spec}: this figure is of foveal")
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
    """Each block of the picture in its mean colour."""
    out = np.empty_like(view)
    for y in range(0, view.shape[0], tall):
        for x in range(0, view.shape[1], wide):
            out[y : y + tall, x : x + wide] = view[y : y + tall, x : x + wide].mean((0, 1))
    return out


def draw_tokens(scene: Scene) -> Figure:
    """the tokens left in each layer: a merged one in its mean colour, a dropped one dark"""
    found = [(given.layer, given.context.grid) for given in entries(scene.model, scene.image, scene.layers)]
    figure, axes = panels.sheet(1, 1 + len(found), f"tokens left by {scene.model.tokens or 'nothing'}", 2.2)
    panels.picture(axes[0, 0], scene)
    for panel, (layer, grid) in zip(axes[0, 1:], found, strict=True):
        panel.imshow(_patchwork(scene, grid), interpolation="nearest")
        panel.set_title(f"layer {layer}: {grid.patches}", fontsize=8)
    axes[0, 0].set_title("picture", fontsize=8)
    return figure


def _patchwork(scene: Scene, grid: Grid) -> np.ndarray:
    """The picture, patch by patch, each in the mean colour of what its token stands for, with lines between tokens."""
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
