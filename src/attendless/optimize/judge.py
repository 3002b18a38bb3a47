"""How far the answers of a model that attends less are from the dense model's, without labels.

The expected loss takes the dense model at its word: an image it gives p to its own answer and p′ to the new one is
right with p before and p′ after, so the loss is the mean of p − p′. A model that learned from mixed or smoothed labels
is right more often than it is sure; if its accuracy is known, its answers are sharpened until they say as much.

Its interval is made for what it is the mean of: nothing on most images, and something on the few whose answer changes.
There a normal interval is too short, and of no length at all where no answer changed. As Wilson's interval of a share,
ours holds every mean μ from which the one seen is less than z standard errors away, those that μ itself implies:
changes that are rare and cost `jump` each have a variance of μ · jump.
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

#: Images that are run at once.
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Judgement:
    """On so many images: the share answered as by the dense model, and the points of top-1 it is expected to lose, each
    with its 95 % interval."""

    images: int
    agreement: float
    agreement_ci: tuple[float, float]
    expected_drop: float
    expected_drop_ci: tuple[float, float]

    def drop_text(self) -> str:
        low, high = self.expected_drop_ci
        return f"{self.expected_drop:.2f} ({low:.2f}–{high:.2f})"

    def agreement_text(self) -> str:
        low, high = self.agreement_ci
        return f"{100 * self.agreement:.1f} % ({100 * low:.0f}–{100 * high:.0f})"


#: What is true of the dense model itself, whatever the images.
ITSELF = Judgement(0, 1.0, (1.0, 1.0), 0.0, (0.0, 0.0))


@torch.inference_mode()
def logits(
    model: Callable[[Tensor], Tensor], images: Tensor, whose: str, step: Callable[[int], None] = lambda done: None
) -> Tensor:
    """The model's logits [n, classes], or an error if any of them says nothing."""
    found = []
    for chunk in images.split(BATCH):
        found.append(model(chunk).float())
        if not bool(torch.isfinite(found[-1]).all()):
            raise UserError(f"{whose} answers with NaN or infinity: nothing can be told from such answers")
        step(len(chunk))
    return torch.cat(found)


def divergence(dense: Tensor, changed: Tensor) -> float:
    """Mean KL(dense ‖ changed) of logits [n, classes], in nats: what harms answers before it changes any."""
    before, after = dense.log_softmax(-1), changed.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def losses(dense: Tensor, answers: Tensor) -> Tensor:
    """p − p′ of every image, for the dense model's logits [n, classes] and the new answers [n]."""
    belief = dense.softmax(-1)
    return belief.amax(-1) - belief.gather(1, answers[:, None])[:, 0]


def temperature(dense: Tensor, accuracy: float | None) -> float:
    """What to divide the logits [n, classes] by so that the dense model is as confident, on average, as it is right:
    `accuracy` is its top-1 in percent. 1 if that is not known."""
    if accuracy is None:
        return 1.0
    low, high = -10.0, 10.0  # of its logarithm; confidence falls as it rises
    for _ in range(60):
        middle = (low + high) / 2
        confident = 100 * float((dense / math.exp(middle)).softmax(-1).amax(-1).mean())
        low, high = (middle, high) if confident > accuracy else (low, middle)
    return math.exp(low)


def typical(drops: Sequence[float], divergences: Sequence[float]) -> list[float]:
    """What candidates lose whose answers have moved as far: the loss of all, shared out by divergence.

    Few answers change, so of many candidates the luckiest looks best. How far all answers moved is known much better,
    and what is lost goes with it.
    """
    per_nat = sum(drops) / max(sum(divergences), 1e-12)
    return [per_nat * divergence for divergence in divergences]


def jump(dense: Tensor, found: Sequence[Tensor]) -> float:
    """What a changed answer costs, seen over the losses of all candidates: one alone has too few to tell.

    Where no answer changed at all it is taken to cost what the dense model's second choice would.
    """
    lost = torch.cat([*found, torch.zeros(1)])
    if float(lost.sum()) > 0:
        return float(lost.square().sum() / lost.sum())
    first, second = dense.softmax(-1).topk(2).values.unbind(-1)
    return float((first - second).mean())


def judge(dense: Tensor, answers: Tensor, cost: float) -> Judgement:
    """Judge the answers [n] beside the dense model's logits; `cost` is what a changed answer costs (see `jump`)."""
    n, same = len(answers), int((answers == dense.argmax(-1)).sum())
    mean = float(losses(dense, answers).mean())
    low, high = interval(mean, n, cost)
    return Judgement(n, same / n, wilson(same, n), 100 * mean, (100 * low, 100 * high))


def interval(mean: float, n: int, cost: float) -> tuple[float, float]:
    """95 % interval of the mean of n losses that are mostly nothing and `cost` where they are something."""
    centre = mean + Z**2 * cost / (2 * n)
    half = Z * math.sqrt(mean * cost / n + (Z * cost / (2 * n)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def images_to_tell(judged: Judgement, bound: float) -> float:
    """How many images would tell on which side of `bound` the loss lies, if it is what it seems; infinity if none."""
    low, high = judged.expected_drop_ci
    away = bound - judged.expected_drop
    reach = (high if away > 0 else low) - judged.expected_drop
    return math.inf if away == 0 else judged.images * (reach / away) ** 2


def split(images: Tensor, probe: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three parts, each spread over the set: to search with (up to `probe`, a third at most), to choose by, and to
    report on. What is reported has then seen neither the search nor the choice."""
    if len(images) < 6:
        raise UserError(f"{len(images)} images: expected at least 6, and a few hundred to tell a small loss from none")
    count = min(probe, len(images) // 3)
    searched = [i * len(images) // count for i in range(count)]
    rest = sorted(set(range(len(images))) - set(searched))
    return images[searched], images[rest[::2]], images[rest[1::2]]


def check_images(images: Any) -> None:
    """Raise unless these are images as a model takes them."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise UserError(f"images are {given}: expected a tensor of preprocessed images [n, channels, height, width]")
    bad = [i for i, image in enumerate(images) if not bool(torch.isfinite(image).all())]
    if bad:
        raise UserError(f"image {bad[0]} holds NaN or infinity ({len(bad)} of {len(images)} images do)")
