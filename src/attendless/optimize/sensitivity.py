"""How much a change of one layer, or of the tokens, damages the predictions.

The damage is the divergence KL(baseline ‖ changed) of the predicted distributions, averaged over a few images. It shows
a change long before the change flips a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention import Spec
from ..backbones import Backbone, is_backbone
from .candidates import with_attention
from .judge import Distance, chunk_size, divergence, logits
from .search import Progress


@torch.inference_mode()
def layer_sensitivities(
    backbone: Any,
    layers: Sequence[int],
    specs: Sequence[Spec],
    images: Tensor,
    progress: Progress,
    distance: Distance = divergence,
) -> Tensor:
    """Mean KL(baseline ‖ changed) [layers, 1 + specs] in nats; column 0, the unchanged layer, is zero.

    Each entry changes one layer only. `layers` are in ascending order: one of our backbones runs the layers before the
    changed one only once.
    """
    chunks = images.split(chunk_size(images))
    expected = [logits(backbone, chunk, "the model") for chunk in chunks]
    states = States(backbone, chunks) if is_backbone(backbone) else None
    total = torch.zeros(len(layers), 1 + len(specs))
    with progress("searching: one layer at a time", len(layers) * len(specs) * len(images)) as step:
        for row, layer in enumerate(layers):
            if states is not None:
                states.advance(layer)
            for column, spec in enumerate(specs, 1):
                trial = with_attention(backbone, layer, spec)
                for number, chunk in enumerate(chunks):
                    run = trial if states is None else states.rest(trial, number)
                    changed = logits(run, chunk, f"{spec} in layer {layer}")
                    total[row, column] += len(chunk) * distance(expected[number], changed)
                    step(len(chunk))
    return total / len(images)


class States:
    """The tokens and context that enter one layer of a backbone, for each chunk of images."""

    def __init__(self, backbone: Backbone, chunks: Sequence[Tensor]) -> None:
        self.backbone, self.layer = backbone, 0
        self.states = [backbone.embed(chunk) for chunk in chunks]

    def advance(self, layer: int) -> None:
        """Run the backbone up to `layer`."""
        self.states = [self.backbone.run_layers(*state, start=self.layer, stop=layer) for state in self.states]
        self.layer = layer

    def rest(self, trial: Any, number: int) -> Callable[[Tensor], Tensor]:
        """`trial`, run from this layer on, on the chunk `number`."""

        def run(_: Tensor) -> Tensor:
            x, context = trial.run_layers(*self.states[number], start=self.layer)
            return trial.answer(trial.norm(x), context.grid)

        return run
