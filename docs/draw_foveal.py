"""Draw the figures of docs/foveal.md from one layer of a pretrained DeiT-Tiny and a public-domain photograph.

    python docs/draw_foveal.py deit_tiny_patch16_224.safetensors docs/foveal

Every panel is computed with `attendless.sparse.foveal`, the definition that the kernels are tested against. The script
prints the numbers that the page quotes. The photograph (Grace Hopper, U.S. Navy) is part of Matplotlib's wheel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attendless import Columnar, convert
from attendless.convert.source import open_model
from attendless.data.source import load_image
from attendless.measure.accuracy import preprocessing
from attendless.sparse import foveal

mpl.use("Agg")
from matplotlib import cbook
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

SIZE, PATCH, KEEP = 384, 16, 0.1
#: The layer, head and query tile (row and column of its upper left patch) that the first two figures show.
LAYER, HEAD, TILE = 6, 0, (4, 8)
ORANGE = "#e8871e"


class Layer(NamedTuple):
    """The inputs of one attention layer: q, k, v [1, heads, tokens, width] and the scale of the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    def full(self) -> Tensor:
        return self.weights() @ self.v

    def weights(self) -> Tensor:
        return (self.scale * self.q @ self.k.transpose(-2, -1)).softmax(dim=-1)

    def foveal(self, layout: foveal.Layout) -> Tensor:
        return foveal.attend(self.q, self.k, self.v, self.chosen(layout), layout, scale=self.scale)

    def chosen(self, layout: foveal.Layout) -> Tensor:
        return foveal.select(self.q, self.k, layout, scale=self.scale)


def main(weights: str, folder: str) -> None:
    target = Path(folder)
    target.mkdir(exist_ok=True)
    photograph, layers = trace(weights)
    side = SIZE // PATCH
    layout = foveal.layout(side, side, 1, keep=KEEP)
    sharp(photograph, layers[LAYER], layout, target / "sharp.jpg")
    blurred(photograph, layers[LAYER], layout, target / "blurred.jpg")
    correction(layers, layout, target / "correction.jpg")


@torch.inference_mode()
def trace(weights: str) -> tuple[np.ndarray, list[Layer]]:
    """The photograph as the model sees it, [SIZE, SIZE, 3] in 0 to 1, and q, k, v of every layer (full attention)."""
    model = open_model("deit_tiny_patch16_224", weights=weights, size=SIZE).eval()
    source = load_image(str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)))
    image = preprocessing(model, (SIZE, SIZE), 1.0)(source)
    backbone: Any = convert(model, "full")
    assert isinstance(backbone, Columnar)
    layers = []
    for block, step in zip(backbone.blocks, backbone.walk(*backbone.embed(image[None])), strict=False):
        layers.append(Layer(*block.attn.project(block.norm1(step.x)), block.attn.scale))
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy(), layers


def seen(layer: Layer, layout: foveal.Layout) -> tuple[np.ndarray, np.ndarray]:
    """For the tile of the figures: which patches it sees exactly, bool [side, side], and its full attention weights
    over the patches, the mean of its queries, [side, side]."""
    side = layout.height
    tiles = foveal.block_of(layout, layout.tile)[0].reshape(side, side)
    tile = int(tiles[TILE])
    cells = layer.chosen(layout)[0, HEAD, tile].long()
    exact = torch.isin(foveal.block_of(layout, layout.cell)[0], cells).reshape(side, side)
    queries = 1 + torch.nonzero(tiles.flatten() == tile)[:, 0]
    return exact.numpy(), layer.weights()[0, HEAD, queries, 1:].mean(0).reshape(side, side).numpy()


# Figures -------------------------------------------------------------------------------------------------------------


def sharp(photograph: np.ndarray, layer: Layer, layout: foveal.Layout, path: Path) -> None:
    exact, weights = seen(layer, layout)
    figure, (left, middle, right) = panels("query tile", "full attention of the tile", "cells seen exactly")
    left.imshow(photograph)
    middle.imshow(photograph.mean(2), cmap="gray", alpha=0.35)
    middle.imshow(enlarge(weights**0.5), cmap="inferno", alpha=0.8)
    right.imshow(photograph * np.where(enlarge(exact), 1, 0.25)[..., None])
    for axis in (left, middle, right):
        outline(axis, layout)
    save(figure, path)
    share = weights[exact].sum() / weights.sum()
    print(f"sharp: {layout.budget} of {layout.cells} cells hold {100 * share:.0f} % of the tile's weight on patches")


def blurred(photograph: np.ndarray, layer: Layer, layout: foveal.Layout, path: Path) -> None:
    exact, weights = seen(layer, layout)
    large = foveal.layout(layout.height, layout.width, layout.prefix, keep=KEEP, cell=4, tile=4)
    names = ("all tokens", f"cells of 2 × 2: {keys(layout)} keys", f"cells of 4 × 4: {keys(large)} keys")
    figure, axes = panels(*names)
    views = [photograph, *(fovea(photograph, seen(layer, plan)[0], plan) for plan in (layout, large))]
    for axis, view in zip(axes, views, strict=True):
        axis.imshow(view)
        outline(axis, layout)
    save(figure, path)
    print(f"blurred: {100 * (1 - weights[exact].sum() / weights.sum()):.0f} % of the weight lies on blurred cells")


def keys(layout: foveal.Layout) -> int:
    return foveal.keys_seen(layout, layout.patches)


def correction(layers: list[Layer], layout: foveal.Layout, path: Path) -> None:
    means = foveal.layout(layout.height, layout.width, layout.prefix, keep=KEEP, order=0)
    errors = {plan.order: [error(layer, plan) for layer in layers] for plan in (means, layout)}
    figure, (left, middle, right) = panels("error of means alone", "with the first-order correction", "all layers")
    top = np.quantile(errors[0][LAYER], 0.995)
    for axis, order in ((left, 0), (middle, 1)):
        axis.imshow(enlarge(errors[order][LAYER]), cmap="inferno", vmin=0, vmax=top)
    each = {order: [100 * float(one.mean()) for one in found] for order, found in errors.items()}
    right.axis("on")
    right.set_xticks(range(1, len(layers) + 1, 2))
    right.bar([1 + n - 0.2 for n in range(len(layers))], each[0], 0.4, color="#9aa0a6", label="means alone")
    right.bar([1 + n + 0.2 for n in range(len(layers))], each[1], 0.4, color=ORANGE, label="with correction")
    right.set(xlabel="layer", ylabel="relative error, %", box_aspect=0.85)
    right.legend(frameon=False)
    save(figure, path)
    for order, found in each.items():
        print(f"order {order}: layer {LAYER + 1} {found[LAYER]:.1f} %, mean of the layers {np.mean(found):.1f} %")


def error(layer: Layer, layout: foveal.Layout) -> np.ndarray:
    """‖foveal − full‖ / ‖full‖ of each patch over all heads: [side, side]."""
    found, wanted = (x[0, :, layout.prefix :].transpose(0, 1).flatten(1) for x in (layer.foveal(layout), layer.full()))
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).reshape(layout.height, layout.width).numpy()


# Drawing -------------------------------------------------------------------------------------------------------------


def panels(*titles: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(1, len(titles), figsize=(9, 3.3), layout="constrained")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.axis("off")
    return figure, axes


def outline(axis: Any, layout: foveal.Layout) -> None:
    side = layout.tile * PATCH
    row, column = (x * PATCH - 0.5 for x in TILE)
    axis.add_patch(Rectangle((column, row), side, side, fill=False, edgecolor=ORANGE, linewidth=2))


def enlarge(patches: np.ndarray) -> np.ndarray:
    return patches.repeat(PATCH, 0).repeat(PATCH, 1)


def fovea(photograph: np.ndarray, exact: np.ndarray, layout: foveal.Layout) -> np.ndarray:
    """The photograph with every cell that is not seen exactly as its mean colour."""
    size = layout.cell * PATCH
    small = photograph.reshape(SIZE // size, size, SIZE // size, size, 3).mean((1, 3))
    return np.where(enlarge(exact)[..., None], photograph, small.repeat(size, 0).repeat(size, 1))


def save(figure: Any, path: Path) -> None:
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    image.save(path, quality=88, subsampling=0, optimize=True)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
