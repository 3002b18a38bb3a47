"""How a search scores the outputs of a variant against those of the original model.

A classifier is chosen by its expected accuracy drop (`judge.py`), whose scatter is small. With labels, the original's
confidence is calibrated to its accuracy, and the final figure is the paired difference in top-1. With a metric of the
user, and for models without a classifier (mean cosine similarity of the features), the drop is the mean difference of
the scores of the same images, times 100.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..measure.accuracy import Z, paired_difference, wilson
from . import judge as judging
from .judge import Judgement

#: (outputs, targets) → a score per image [n], higher is better. Targets are the labels, or the original's outputs.
Metric = Callable[[Tensor, Tensor], Tensor]


def cosine(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cosine similarity of each image's features with the original's."""
    return F.cosine_similarity(outputs.flatten(1), targets.flatten(1))


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Scores variants on one part of the images.

    labels: the class of every image of the part, or what the metric compares with; None without.
    metric: a metric in place of top-1; None for classifiers.
    cost, confidence: the calibration that the images of the choice gave; see `calibrated`.
    """

    labels: Tensor | None
    metric: Metric | None
    cost: float = 0.0
    confidence: float = 1.0

    def read(self, outputs: Tensor, original: Tensor) -> list[Any]:
        """A value per image: the prediction, or the score and its difference from the original's."""
        if self.metric is None:
            return outputs.argmax(-1).tolist()
        targets = original if self.labels is None else self.labels
        return [float(x) for x in self._scores(outputs, targets)]

    def _scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self.metric is not None
        scores = torch.as_tensor(self.metric(outputs, targets), dtype=torch.float64).flatten()
        if len(scores) != len(outputs) or not bool(scores.isfinite().all()):
            raise UserError(
                f"the metric returned {len(scores)} values for {len(outputs)} images: expected one finite score each"
            )
        return scores

    def calibrated(self, original: Tensor, readings: Sequence[list[Any]]) -> Scoring:
        """The scoring with the confidence of the original calibrated, and the cost of a changed prediction."""
        if self.metric is not None:
            return self
        confidence = 1.0
        if self.labels is not None:
            right = 100 * float((original.argmax(-1) == self.labels).double().mean())
            confidence = judging.temperature(original, right) if 0 < right < 100 else 1.0
        belief = original / confidence
        cost = judging.flip_cost(belief, [judging.losses(belief, torch.tensor(one)) for one in readings])
        return dataclasses.replace(self, confidence=confidence, cost=cost)

    def judge(self, original: Tensor, reading: list[Any], *, labelled: bool = False) -> Judgement:
        """The drop against the original. `labelled`: by the labels if there are any, rather than by confidence."""
        if self.metric is not None:
            return _by_scores(self.read(original, original), reading)
        given = torch.tensor(reading)
        if not labelled or self.labels is None:
            return judging.judge(original / self.confidence, given, self.cost)
        before = original.argmax(-1)
        gained, (low, high) = paired_difference((given == self.labels).tolist(), (before == self.labels).tolist())
        n, same = len(given), int((given == before).sum())
        return Judgement(n, same / n, wilson(same, n), -100 * gained, (-100 * high, -100 * low))

    def top1(self, predictions: Tensor) -> float | None:
        """Accuracy in percent; None without labels."""
        if self.labels is None or self.metric is not None:
            return None
        return 100 * float((predictions == self.labels).double().mean())


def _by_scores(before: list[float], after: list[float]) -> Judgement:
    """The mean difference of scores with a normal interval. The mean score stands in for the agreement."""
    lost = 100 * (torch.tensor(before, dtype=torch.float64) - torch.tensor(after, dtype=torch.float64))
    n, mean = len(lost), float(lost.mean())
    half = Z * float(lost.std(unbiased=n > 1)) / math.sqrt(n)
    score = sum(after) / n
    return Judgement(n, score, (score, score), mean, (mean - half, mean + half))
