"""Compare the outputs of an exported file with those of the PyTorch model.

Both compute the same images, in batches of several sizes where the file takes any. The difference of an image is the
largest over its outputs, relative to the largest output. It must stay within `TOLERANCE`.

Choosing keys or tokens is a step function. Where two candidates are equal up to rounding, PyTorch may choose one and
another runtime the other, and the outputs then differ by more than rounding. With 4,096 tokens to merge, almost every
image has such ties. For an image that differs, the PyTorch model is therefore run again with other rounding, as in
Monte Carlo arithmetic: the image and the output of every layer are multiplied by 1 + 1e-6 · noise, about the rounding
error of a product of some hundred terms. `unrest` is the largest resulting difference of PyTorch's own output. A
runtime that differs by rounding alone shows differences of the same size: up to `FACTOR` times the unrest is accepted
and reported apart. Noise on the image alone would not do, because it averages out before the layers that choose. A
model without choices has an unrest of some millionths, far below the tolerance, so the rule does not apply to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from .description import Description

TOLERANCE = 1e-4
#: Of the median image, if a file computes in bf16.
BF16_TOLERANCE = 0.1
#: The largest accepted difference of an image with near-ties, as a multiple of its unrest.
FACTOR = 4.0
#: Relative error of each layer's output, and the most runs with such errors.
_ROUNDING, _RUNS = 1e-6, 64
#: Batches for files that take any.
BATCHES = (1, 2, 5)
Run = Callable[[Tensor], tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """What was compared, and the largest differences. `unsteady` counts the images that differ because of a choice
    between near-equal candidates, `unsteady_difference` is their largest difference, and `unrest` that of PyTorch from
    itself on them, with other rounding. `difference` is the largest of all other images."""

    images: int
    batches: tuple[int, ...]
    difference: float
    tolerance: float
    unsteady: int
    unsteady_difference: float
    unrest: float

    def __str__(self) -> str:
        text = f"{self.difference:.1e} at most on {self.images - self.unsteady} images, tolerance {self.tolerance:.0e}"
        if self.unsteady:
            text += (
                f"; {self.unsteady_difference:.1e} on {self.unsteady} more, where keys or tokens are equal up to "
                f"rounding and another one was chosen (PyTorch with other rounding: {self.unrest:.1e} from itself)"
            )
        return text


def images_like(about: Description, batch: int, seed: int) -> Tensor:
    """Images as a model meets them, by their numbers: smooth shapes with some noise, of mean 0 and deviation 1."""
    draws = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, about.channels, 8, 8, generator=draws)
    smooth = F.interpolate(coarse, about.size, mode="bicubic")
    noise = torch.randn(batch, about.channels, *about.size, generator=draws)
    return smooth + (0.05 + 0.95 * (seed % 2)) * noise


def compare(run: Run, module: nn.Module, about: Description, *, given: Tensor | None = None) -> Parity:
    """Compare a file with the module it was made from; raises `UserError` where they do not compute the same.

    `given` are images to compare on besides, such as those of a data set.
    """
    batches = BATCHES if about.batch is None else (about.batch,) * 3
    found: list[tuple[float, float]] = []
    for images in _inputs(about, batches, given):
        found += _compared(run, module, images)
    return judged(found, batches)


def compare_bf16(run: Run, module: nn.Module, about: Description, given: Tensor | None = None) -> str:
    """Compare a file that computes in bf16, as a note; raises `UserError` where more than rounding differs.

    bf16 rounds to 2⁻⁸ in every layer, and where a model chooses tokens an image may differ by more: the median counts.
    """
    batches = BATCHES if about.batch is None else (about.batch,) * 3
    with torch.inference_mode():
        apart = torch.cat([_apart(run(images), module(images)) for images in _inputs(about, batches, given)])
    median = float(apart.median())
    if not median <= BF16_TOLERANCE:
        raise UserError(
            f"in bf16 the export does not compute what the model does: half of the images differ by {median:.1e} or "
            f"more, tolerance {BF16_TOLERANCE:g}; nothing was written"
        )
    most = float(apart.max())
    return f"in bf16 the outputs of {len(apart)} images differ by {median:.1e} (median), {most:.1e} at most"


def judged(found: Sequence[tuple[float, float]], batches: Sequence[int], tolerance: float = TOLERANCE) -> Parity:
    """The verdict on images' differences and unrests."""
    steady = [difference for difference, unrest in found if unrest <= tolerance]
    unsteady = [(difference, unrest) for difference, unrest in found if unrest > tolerance]
    parity = Parity(
        images=len(found),
        batches=tuple(batches),
        difference=max(steady, default=0.0),
        tolerance=tolerance,
        unsteady=len(unsteady),
        unsteady_difference=max((difference for difference, _ in unsteady), default=0.0),
        unrest=max((unrest for _, unrest in unsteady), default=0.0),
    )
    beyond = [difference for difference, unrest in unsteady if not difference <= FACTOR * unrest]
    if not parity.difference <= tolerance or beyond:
        worst = max([*beyond, parity.difference], key=lambda one: (one != one, one))
        rounding = max((unrest for _, unrest in found), default=0.0)
        raise UserError(
            f"the export does not compute what the model does: an output differs by {worst:.1e}, tolerance "
            f"{tolerance:.0e}, and by {rounding:.1e} at most in PyTorch with other rounding; nothing was written"
        )
    return parity


def _inputs(about: Description, batches: Sequence[int], given: Tensor | None) -> Iterator[Tensor]:
    for seed, batch in enumerate(batches):
        yield images_like(about, batch, seed)
    if given is not None:
        yield from (part for part in given.split(about.batch or len(given)) if len(part) == (about.batch or len(part)))


def _compared(run: Run, module: nn.Module, images: Tensor) -> list[tuple[float, float]]:
    """For each image the difference of the file from the model, and of the model with other rounding from itself."""
    with torch.inference_mode():
        expected = module(images)
        answers = run(images)
        if len(answers) != len(expected):
            raise UserError(f"the export has {len(answers)} outputs, the model {len(expected)}; nothing was written")
        differences = _apart(answers, expected)
        unrest = torch.zeros(len(images))
        draws = torch.Generator().manual_seed(0)
        for _ in range(_RUNS):  # none if every image is within the tolerance
            left = (differences > TOLERANCE) & (differences > FACTOR * unrest)
            if not bool(left.any()):
                break
            with rounded_otherwise(module, draws):
                found = _apart(module(_erring(images[left], draws)), [output[left] for output in expected])
            unrest[left] = torch.maximum(unrest[left], found)
    return list(zip(differences.tolist(), unrest.tolist(), strict=True))


@contextlib.contextmanager
def rounded_otherwise(module: nn.Module, draws: torch.Generator) -> Iterator[None]:
    """Let every layer with weights make random errors of the size of rounding."""

    def err(layer: nn.Module, given: Any, output: Any) -> Any:
        return _erring(output, draws) if isinstance(output, Tensor) else output

    layers = [part for part in module.modules() if not any(part.children()) and any(True for _ in part.parameters())]
    hooks = [layer.register_forward_hook(err) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _erring(x: Tensor, draws: torch.Generator) -> Tensor:
    return x * (1 + _ROUNDING * torch.randn(x.shape, generator=draws).to(x))


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """The largest difference of every image [B]; infinity where an output is not finite or of another shape."""
    worst = torch.zeros(len(theirs[0]))
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape:
            return torch.full_like(worst, torch.inf)
        scale = other.abs().flatten(1).amax(1).clamp(min=1e-6)
        apart = (one - other).abs().flatten(1).amax(1) / scale
        worst = torch.maximum(worst, apart.nan_to_num(torch.inf))
    return worst
