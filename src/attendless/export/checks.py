"""Whether an exported file computes what the PyTorch model computes.

Both answer the same images, in batches of several sizes where the file takes any. An image's difference is the largest
over its outputs, as a share of the largest output. It must stay within `TOLERANCE`.

Choosing keys or tokens is a step function: where two candidates are equal to within rounding, either may be taken, and
the answers differ by more than rounding. So the PyTorch model is asked how steady it is: its input is moved by one part
in a million, a few times, and the image's `unrest` is how far its own answer moves. A difference may be as large as
`FACTOR` times that, or the tolerance. Models that choose nothing have an unrest of about a millionth, far below the
tolerance, so for them the rule changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from .description import Description

TOLERANCE = 1e-4
#: How much further than the PyTorch model from itself an export may be from it, where choices hang in the balance.
FACTOR = 4.0
#: How much an input is moved, of its size, and how often.
_NUDGE, _TRIES = 1e-6, 16
#: Batches for files that take any.
BATCHES = (1, 2, 5)
Run = Callable[[Tensor], tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """What was compared, and how far apart it was. `steady`: the largest difference of images whose choices do not hang
    in the balance; `unsteady` counts the others, `unsteady_difference` is theirs and `unrest` how far PyTorch's own
    answers to them move."""

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
                f"; {self.unsteady} more, on which a choice hangs in the balance, {self.unsteady_difference:.1e} "
                f"(PyTorch against itself: {self.unrest:.1e})"
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
        raise UserError(
            f"the export does not compute what the model does: an answer differs by {worst:.1e}, tolerance "
            f"{tolerance:.0e}; nothing was written"
        )
    return parity


def _inputs(about: Description, batches: Sequence[int], given: Tensor | None) -> Iterator[Tensor]:
    for seed, batch in enumerate(batches):
        yield images_like(about, batch, seed)
    if given is not None:
        yield from (part for part in given.split(about.batch or len(given)) if len(part) == (about.batch or len(part)))


def _compared(run: Run, module: nn.Module, images: Tensor) -> list[tuple[float, float]]:
    """Of every image how far the file's answer is from the model's, and how far the model's from its own."""
    with torch.inference_mode():
        expected = module(images)
        answers = run(images)
        if len(answers) != len(expected):
            raise UserError(f"the export has {len(answers)} outputs, the model {len(expected)}; nothing was written")
        differences = _apart(answers, expected)
        unrest = torch.zeros(len(images))
        draws = torch.Generator().manual_seed(0)
        # Asked only where it matters: an answer within tolerance needs no excuse.
        for _ in range(_TRIES if not bool((differences <= TOLERANCE).all()) else 0):
            moved = images * (1 + _NUDGE * torch.randn(images.shape, generator=draws))
            unrest = torch.maximum(unrest, _apart(module(moved), expected))
    return list(zip(differences.tolist(), unrest.tolist(), strict=True))


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """The largest difference of every image [B]; infinity where an answer is no number or of another shape."""
    worst = torch.zeros(len(theirs[0]))
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape:
            return torch.full_like(worst, torch.inf)
        scale = other.abs().flatten(1).amax(1).clamp(min=1e-6)
        apart = (one - other).abs().flatten(1).amax(1) / scale
        worst = torch.maximum(worst, apart.nan_to_num(torch.inf))
    return worst
