"""Figures of the attention of a patch, for any attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UserError
from ..maps import (
    Entry,
    entry,
    maps,
    on_grid,
    patches_under,
    rollout,
)
from . import panels
from .scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_maps(scene: Scene) -> Figure:
    """Attention of one patch, per layer and head."""
    found = scene.maps()
    heads = scene.heads or range(max(one.weights.shape[1] for one in found))
    figure, axes = panels.sheet(len(found), 1 + len(heads), f"{scene.name}: attention of one patch")
    for row, one in zip(axes, found, strict=True):
        panels.picture(row[0], scene, one.grid)
        maps_of_layer = one.on_grid()[0, :, 0]
        for panel, values in zip(row[1:], maps_of_layer, strict=False):
            panels.heat(panel, scene, values)
            panels.mark(panel, scene, one.grid)
            panels.most(panel, values)
        for panel in row[1 + len(maps_of_layer) :]:  # stages can have different numbers of heads
            panel.set_axis_off()
    panels.heads_of(axes, ["query", *(f"head {head}" for head in heads)], [f"layer {one.layer}" for one in found])
    return figure


def draw_sparse(scene: Scene) -> Figure:
    """Query patch, selected keys, the map, and the map of full attention (Sparsifiner's figure 3).

    Heads are averaged; selected heads have a row each.
    """
    rows = []
    for ours, full in zip(scene.maps(), scene.maps(dense=True), strict=True):
        seen = seen_closely(scene, entry(scene.model, scene.image, ours.layer)).float()
        mask = on_grid(seen[None], ours.grid)[0]
        sparse, dense = (one.on_grid()[0, :, 0] for one in (ours, full))
        for i, head in enumerate(scene.heads or ()):
            rows.append((f"layer {ours.layer}, head {head}", ours.grid, mask[head], sparse[i], dense[i]))
        if scene.heads is None:
            rows.append((f"layer {ours.layer}", ours.grid, mask.mean(0), sparse.mean(0), dense.mean(0)))
    figure, axes = panels.sheet(len(rows), 4, f"{scene.name} beside full attention")
    for row, (_, grid, mask, sparse, dense) in zip(axes, rows, strict=True):
        panels.picture(row[0], scene, grid)
        panels.heat(row[1], scene, mask, most=1, over=False)
        row[1].set_xlabel(f"{float(mask.mean()):.0%} of the patches", fontsize=7)
        for panel, values in ((row[2], sparse), (row[3], dense)):
            panels.heat(panel, scene, values)
            panels.most(panel, values)
        for panel in row[1:]:
            panels.mark(panel, scene, grid)
    closely = "selected" if scene.heads else "selected (share of heads)"
    panels.heads_of(axes, ["query", closely, scene.attention_text, "full"], [name for name, *_ in rows])
    return figure


def seen_closely(scene: Scene, given: Entry) -> Tensor:
    """Tokens that the query patch sees without approximation, per head: bool [H, N]."""
    (query,) = patches_under(scene.query, given.context.grid, scene.image)
    with torch.no_grad():
        return given.attention.sees(given.x, given.context, query)[0]


def draw_rollout(scene: Scene) -> Figure:
    """Attention rollout of the class token through all layers."""
    whose = "class token" if scene.model.num_prefix_tokens else "mean token"
    models = {scene.name: scene.model, "full attention": scene.dense}
    if scene.name == "full":
        del models["full"]
    figure, axes = panels.sheet(1, 1 + len(models), f"rollout of the {whose}", cell=2.4)
    panels.picture(axes[0, 0], scene)
    for panel, model in zip(axes[0, 1:], models.values(), strict=True):
        mixed = rollout(model, scene.image)
        row = mixed[:, :1] if scene.model.num_prefix_tokens else mixed.mean(1, keepdim=True)
        values = on_grid(row, entry(model, scene.image, 0).context.grid)[0, 0]
        panels.heat(panel, scene, values)
        panels.most(panel, values)
    panels.heads_of(axes, ["image", *models], [""])
    return figure


def draw_saturation(scene: Scene) -> Figure:
    """Similarity of the layers' maps, and the share of each map on its diagonal (LaViT's observation)."""
    from .figures import new_figure

    alike, diagonal = saturation(scene)
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.12})
    shown = left.imshow(alike.numpy(), cmap=panels.HEAT, vmin=0, vmax=1)
    figure.colorbar(shown, ax=left, label="cosine of their maps")
    left.set(xlabel="layer", ylabel="layer", title="similarity of layers")
    right.plot(diagonal.numpy(), "o-", color="#0072b2")
    right.axhline(1, color="grey", linestyle=":", label="uniform attention")
    right.set(xlabel="layer", ylabel="attention to itself (1: mean of a row)", title="diagonality", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"{scene.name}: saturation", fontsize=10)
    return figure


def saturation(scene: Scene) -> tuple[Tensor, Tensor]:
    """Cosine of the maps of every two layers, averaged over heads, [L, L]; and N · mean A_ii of each layer [L]."""
    found = [one.weights[0].flatten(1) for one in maps(scene.model, scene.image)]
    if len({one.shape for one in found}) > 1:
        raise UserError("saturation compares layers with the same grid and number of heads; those of this model differ")
    stack = torch.nn.functional.normalize(torch.stack(found), dim=-1)
    tokens = round(found[0].shape[1] ** 0.5)
    diagonal = torch.stack(found).unflatten(-1, (tokens, tokens)).diagonal(dim1=-2, dim2=-1).mean((1, 2))
    return torch.einsum("lhn,mhn->lmh", stack, stack).mean(-1), tokens * diagonal
