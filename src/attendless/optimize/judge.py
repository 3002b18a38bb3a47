"""Accuracy drop and top-1 agreement of a changed model, estimated without labels.

The expected drop trusts the baseline's probabilities. If the baseline gives probability p to its own prediction and p′
to the new one, it is right with probability p before the change and p′ after. The expected drop is the mean of p − p′.
A model that was trained with mixed or smoothed labels is right more often than its confidence says. If its accuracy is
known, `temperature` calibrates the confidence to it.

Most images contribute zero to the mean, and only the few with a changed prediction contribute more. A normal interval
would be too short, and of zero length where no prediction changed. As Wilson's interval of a share does, `interval`
contains every mean μ that is less than z standard errors, computed from μ itself, away from the observed mean: rare
changes that cost `flip_cost` each have a variance of μ · flip_cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..measure.accuracy import Z, wilson

#: (outputs of the baseline, outputs of a model) → how far they are apart.
Distance = Callable[[Tensor, Tensor], float]
#: Images per forward pass, and pixels: fewer images if they are large.
BATCH, _PIXELS = 16, 16 * 512 * 512


@dataclasses.dataclass(frozen=True)
class Judgement:
    """On `images` images: top-1 agreement with the baseline, and the expected accuracy drop in percentage points, each
    with its 95 % interval."""

    images: int
    agreement: float
    agreement_ci: tuple[float, float]
    expected_drop: float
    expected_drop_ci: tuple[float, float]

    def drop_text(self) -> str:
        low, high = self.expected_drop_ci
        return f"{self.expected_drop:.2f} ({low:.2f} to {high:.2f})"

    def agreement_text(self) -> str:
        low, high = self.agreement_ci
        return f"{100 * self.agreement:.1f} % ({100 * low:.0f}–{100 * high:.0f})"


#: The judgement of the unchanged model, on any images.
UNCHANGED = Judgement(0, 1.0, (1.0, 1.0), 0.0, (0.0, 0.0))


def chunk_size(images: Tensor) -> int:
    """The number of images per forward pass."""
    return max(1, min(BATCH, _PIXELS // math.prod(images.shape[-2:])))


@torch.inference_mode()
def logits(
    model: Callable[[Tensor], Tensor], images: Tensor, name: str, step: Callable[[int], None] = lambda done: None
) -> Tensor:
    """The model's logits [n, classes]. Raises if a logit is not finite; `name` names the model in the error."""
    found = []
    for chunk in images.split(chunk_size(images)):
        found.append(model(chunk).float())
        if not bool(torch.isfinite(found[-1]).all()):
            raise UserError(f"{name} returns NaN or infinity: such logits cannot be judged")
        step(len(chunk))
    return torch.cat(found)


def divergence(baseline: Tensor, changed: Tensor) -> float:
    """Mean KL(baseline ‖ changed) of logits [n, classes], in nats."""
    before, after = baseline.log_softmax(-1), changed.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def relative_error(baseline: Tensor, changed: Tensor) -> float:
    """Mean squared difference of outputs that are not logits, such as features, relative to their mean square."""
    before, after = baseline.flatten(1), changed.flatten(1)
    return float(((before - after).square().mean(-1) / before.square().mean(-1).clamp_min(1e-12)).mean())


def losses(baseline: Tensor, predictions: Tensor) -> Tensor:
    """p − p′ of every image, for the baseline's logits [n, classes] and the new predictions [n]."""
    belief = baseline.softmax(-1)
    return belief.amax(-1) - belief.gather(1, predictions[:, None])[:, 0]


def expected_drop(baseline: Tensor, changed: Tensor) -> float:
    """The expected accuracy drop of logits [n, classes], in percentage points."""
    return 100 * float(losses(baseline, changed.argmax(-1)).mean())


def temperature(baseline: Tensor, accuracy: float | None) -> float:
    """The divisor of the logits [n, classes] with which the mean confidence equals `accuracy`, the top-1 in percent.

    1 if the accuracy is None.
    """
    if accuracy is None:
        return 1.0
    low, high = -10.0, 10.0  # of its logarithm; confidence falls as it rises
    for _ in range(60):
        middle = (low + high) / 2
        confident = 100 * float((baseline / math.exp(middle)).softmax(-1).amax(-1).mean())
        low, high = (middle, high) if confident > accuracy else (low, middle)
    return math.exp(low)


def typical_drops(drops: Sequence[float], divergences: Sequence[float]) -> list[float]:
    """The drop of each candidate if the total drop were proportional to divergence.

    Few predictions change, so with many candidates the smallest drop is partly noise. The divergence is known much more
    precisely, and the drop follows it.
    """
    per_nat = sum(drops) / max(sum(divergences), 1e-12)
    return [per_nat * divergence for divergence in divergences]


def flip_cost(baseline: Tensor, found: Sequence[Tensor]) -> float:
    """The mean cost of a changed prediction, over the losses of all candidates: one candidate alone has too few.

    If no prediction changed, the cost is that of the baseline's second choice.
    """
    lost = torch.cat([*found, torch.zeros(1)])
    if float(lost.sum()) > 0:
        return float(lost.square().sum() / lost.sum())
    first, second = baseline.softmax(-1).topk(2).values.unbind(-1)
    return float((first - second).mean())


def judge(baseline: Tensor, predictions: Tensor, cost: float) -> Judgement:
    """Judge predictions [n] against the baseline's logits; `cost` is the `flip_cost`."""
    n, same = len(predictions), int((predictions == baseline.argmax(-1)).sum())
    mean = float(losses(baseline, predictions).mean())
    low, high = interval(mean, n, cost)
    return Judgement(n, same / n, wilson(same, n), 100 * mean, (100 * low, 100 * high))


def interval(mean: float, n: int, cost: float) -> tuple[float, float]:
    """95 % interval of the mean of n losses, most of them zero and the others about `cost`."""
    centre = mean + Z**2 * cost / (2 * n)
    half = Z * math.sqrt(mean * cost / n + (Z * cost / (2 * n)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def images_needed(judged: Judgement, bound: float) -> float:
    """The number of images that would show on which side of `bound` the drop lies, if the estimate is exact."""
    low, high = judged.expected_drop_ci
    away = bound - judged.expected_drop
    reach = (high if away > 0 else low) - judged.expected_drop
    return math.inf if away == 0 else judged.images * (reach / away) ** 2


def split(images: Tensor, probe: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three disjoint parts, each spread over the set: for the search, for the choice, and for the report.

    The first has up to `probe` images, a third of all at most; the others share the rest.
    """
    if len(images) < 6:
        raise UserError(
            f"{len(images)} images: expected at least 6, and a few hundred to measure a small accuracy drop"
        )
    count = min(probe, len(images) // 3)
    searched = [i * len(images) // count for i in range(count)]
    rest = sorted(set(range(len(images))) - set(searched))
    return images[searched], images[rest[::2]], images[rest[1::2]]


def check_images(images: Any) -> None:
    """Raise unless `images` is a tensor of preprocessed, finite images."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise UserError(f"images are {given}: expected a tensor of preprocessed images [n, channels, height, width]")
    bad = [i for i, image in enumerate(images) if not bool(torch.isfinite(image).all())]
    if bad:
        raise UserError(f"image {bad[0]} holds NaN or infinity ({len(bad)} of {len(images)} images do)")
