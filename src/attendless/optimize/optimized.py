"""The result of `optimize`: what it found, to be called or saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from .outcomes import Findings
from .saving import save


@dataclasses.dataclass(frozen=True)
class Optimized(Findings):
    """The result of `optimize`; call it with images, or `save` it.

    Args:
        chosen: the variant that meets the goal best.
        outcomes: all variants, the original model in eager fp32 first.
        goal: the bound that was given.
        reason: why `chosen` was chosen.
        fresh: the judgement of `chosen` on images that took no part in calibration, search or choice.
        accuracy: top-1 of the original and of `chosen` on the fresh images, in percent; None without labels.
        images: the number of images in total.
        parts: how many of them served calibration and search, the choice, and the final judgement.
        setting: image size, batch size and depth.
        scored_by: what the drop is a drop of.
        by_metric: whether a metric scores outputs, rather than top-1.
        notes: what was left out, with the reason.
        stamp: machine, versions and date.
        workshop, prepared: what runs and describes the chosen variant.
        examples: some fresh images whose prediction changed.
    """

    def __call__(self, images: Tensor) -> Tensor:
        """The outputs of the chosen variant for preprocessed images [n, channels, height, width]."""
        return self.prepared.run(images)

    def save(self, folder: str | Path, *, name: str | None = None, command: str = "") -> Path:
        """Write the folder to deploy: the model file, `manifest.json` and `report.html`. Returns the model file.

        Args:
            folder: the folder to write; one that `save` wrote before is replaced.
            name: the model's name in the manifest; default: its own.
            command: the command that reproduces the folder, if there is one.
        """
        return save(self, Path(folder), name, command)
