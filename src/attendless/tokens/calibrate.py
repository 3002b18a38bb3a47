"""Calibrate ToMe on a few images: the number of tokens that each layer merges at a similarity threshold.

    in each layer: r = number of pairs with a similarity above `threshold`, averaged over the images

Layers with more similar tokens merge more. The result is an ordinary spec with one number per layer
(`tome:r=0/3/9/…`), so that shapes stay static for compilers and exporters. Each layer is calibrated on the tokens that
the layers before leave after merging.
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

#: Images per batch.
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
    """The `tome` spec that merges, in each layer, the average number of pairs with a similarity above `threshold`.

    Args:
        backbone: A converted model, or one of ours; it is not modified.
        images: Unlabelled, preprocessed images [n, 3, H, W].
        threshold: Similarity above which a pair is counted. With `protect` the similarity is reduced by
            protect · log(attention of the class token to the patch that would be merged), and can be far above 1.
        start: First layer that merges.
        ceiling: Largest number of tokens merged in a layer; at most half of them are.
        window: `tome`'s option.
        protect: `tome`'s option.
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
            # `set_tokens` raises if the layer cannot merge; a counter then replaces its reducer.
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
    """The spec with `r` tokens merged in layer `layer`."""
    given = spec.options.r  # type: ignore[attr-defined]
    return spec.replace(r=(*given[:layer], r, *given[layer + 1 :]))


class _Counter(ToMe):
    """Counts the pairs with a similarity above `threshold` over all images, and keeps every token."""

    threshold = 0.0
    pairs = 0

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, importance = context.grid, context.class_attention
        assert context.keys is not None
        P = grid.prefix
        weight = None if importance is None else importance.mean(1)[:, P:]
        plan, cells = self.plan(grid), grid.places(x)
        parts = merging.divide(plan, weight, cells)
        likeness, _ = merging.similarities(context.keys.mean(1)[:, P:], plan, weight, cells, *parts)
        self.pairs += int((likeness > self.threshold).sum())
        return x, context
