"""Merging above a similarity, calibrated: how many tokens each layer of a model may merge, seen on a few images.

    in each layer: r = how many pairs are more alike than `threshold`, averaged over the images

Layers whose tokens are much alike merge more. What comes out is a plain spec with one number per layer
(`tome:r=0/3/9/…`), so shapes stay static: nothing is decided at inference, and a compiler or an exporter sees fixed
sizes. Each layer is seen as it will be, with what the layers before have merged.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..attention import Context
from ..errors import UserError
from ..options import Spec
from ..sparse import merging
from .tome import ToMe, ToMeOptions

#: Images that are run at once.
_BATCH = 16


@torch.inference_mode()
def calibrate(
    backbone: Any,
    images: Tensor,
    threshold: float = 0.9,
    *,
    start: int = 0,
    ceiling: int | None = None,
    window: int = 0,
    protect: float = 0.0,
) -> str:
    """The `tome` spec that merges, in each layer of `backbone` from `start` on, as many tokens as are on average more alike
    than `threshold` on unlabelled, preprocessed `images` [n, 3, H, W]; never more than `ceiling`, nor than half.

    `backbone` is a model of ours, converted or not; it is left as it is. `window` and `protect` are `tome`'s. With
    `protect`, what is compared with the threshold is a pair's similarity less protect · log(attention of the class
    token to the patch that would go), which can be far above 1.
    """
    if not hasattr(backbone, "set_tokens"):
        raise UserError(
            f"calibrate: got {type(backbone).__name__}, expected a converted model: attendless.convert(model)"
        )
    if not len(images):
        raise UserError("calibrate: got no images, expected a few dozen")
    if not threshold == threshold or (ceiling is not None and ceiling < 0):
        raise UserError(f"calibrate: threshold={threshold}, ceiling={ceiling}: expected a number, and 0 or more")
    backbone = copy.deepcopy(backbone).eval()
    blocks, states = list(backbone.blocks), [backbone.embed(chunk) for chunk in images.split(_BATCH)]
    found = Spec("tome", ToMeOptions(r=(0,) * len(blocks), window=window, protect=protect))
    for layer, block in enumerate(blocks):
        if layer >= start:
            # What a layer cannot merge by, it says here; then the reducer that would stand there counts first.
            backbone.set_tokens(_with(found, layer, 1))
            block.reducer = counter = _Counter(0, 0, found.options, layer=layer, depth=len(blocks))
            counter.threshold = threshold
            for x, context in states:
                backbone.run_layers(x, context, start=layer, stop=layer + 1)
            pairs = round(counter.pairs / len(images))
            found = _with(found, layer, pairs if ceiling is None else min(pairs, ceiling))
            backbone.set_tokens(found)
        states = [backbone.run_layers(x, context, start=layer, stop=layer + 1) for x, context in states]
    return str(found)


def _with(spec: Spec, layer: int, r: int) -> Spec:
    """The spec with `r` tokens merged in a layer."""
    given = spec.options.r  # type: ignore[attr-defined]
    return spec.replace(r=(*given[:layer], r, *given[layer + 1 :]))


class _Counter(ToMe):
    """Counts the pairs more alike than `threshold`, over all images it sees, and lets every token stay."""

    threshold = 0.0
    pairs = 0

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, importance = context.grid, context.class_attention
        assert context.keys is not None
        P = grid.prefix
        weight = None if importance is None else importance.mean(1)[:, P:]
        likeness, _ = merging.similarities(context.keys.mean(1)[:, P:], self.plan(grid), weight, grid.places(x))
        self.pairs += int((likeness > self.threshold).sum())
        return x, context
