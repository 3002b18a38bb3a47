"""How a search scores the outputs of a variant against those of the original model.

A classifier is chosen by its expected accuracy drop (`judge.py`), whose scatter is small. With labels, the original's
confidence is calibrated to its accuracy, and the final figure is the paired difference in top-1. With a metric of the
user, and for models without a classifier (mean cosine similarity of the features), the drop is the mean difference of
the scores of the same images, times 100.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..measure.accuracy import Z, paired_difference, wilson
from ..measure.scores import Metric, scored
from . import judge as judging
from .judge import Distance, Judgement


def cosine(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cosine similarity of each image's features with the original's."""
    return F.cosine_similarity(outputs.flatten(1), targets.flatten(1))


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Scores variants on one part of the images.

    labels: the class of every image of the part, or what the metric compares with; None without.
    metric: a metric in place of top-1; None for classifiers.
    accuracy: the original's top-1 in percent, if it is known; default: by the labels.
    cost, confidence: the calibration that the images of the choice gave; see `calibrated`.
    before: the original's scores by the metric; see `against`.
    """

    labels: Tensor | None
    metric: Metric | None
    accuracy: float | None = None
    cost: float = 0.0
    confidence: float = 1.0
    before: tuple[float, ...] = ()

    def read(self, outputs: Tensor, original: Tensor, part: slice = slice(None)) -> list[Any]:
        """A value per image of a part: the prediction, or the score."""
        if self.metric is None:
            return outputs.argmax(-1).tolist()
        targets = original if self.labels is None else self.labels[part]
        return scored(self.metric, outputs, targets)

    @property
    def distance(self) -> Distance:
        """The measure of how far outputs are from the original's: of predictions, or of features."""
        return judging.divergence if self.metric is None else judging.relative_error

    def against(self, original: Tensor) -> Scoring:
        """The scoring with the scores of the original's outputs, which a metric is compared with."""
        parts = [slice(i, i + judging.BATCH) for i in range(0, len(original), judging.BATCH)]
        scores = [score for part in parts for score in self.read(original[part], original[part], part)]
        return self if self.metric is None else dataclasses.replace(self, before=tuple(scores))

    def calibrated(self, original: Tensor, readings: Sequence[list[Any]]) -> Scoring:
        """The scoring with the confidence of the original calibrated, and the cost of a changed prediction."""
        if self.metric is not None:
            return self
        right = self.accuracy if self.accuracy is not None else self.top1(original.argmax(-1))
        confidence = judging.temperature(original, right) if right is not None and 0 < right < 100 else 1.0
        belief = original / confidence
        cost = judging.flip_cost(belief, [judging.losses(belief[: len(one)], torch.tensor(one)) for one in readings])
        return dataclasses.replace(self, confidence=confidence, cost=cost)

    def judge(self, original: Tensor, reading: list[Any], *, labelled: bool = False) -> Judgement:
        """The drop against the original, on the first images if fewer were read. `labelled`: by the labels if there are
        any, rather than by confidence."""
        original = original[: len(reading)]
        if self.metric is not None:
            return _by_scores(self.before[: len(reading)], reading)
        given = torch.tensor(reading)
        if not labelled or self.labels is None:
            return judging.judge(original / self.confidence, given, self.cost)
        before = original.argmax(-1)
        gained, (low, high) = paired_difference((given == self.labels).tolist(), (before == self.labels).tolist())
        n, same = len(given), int((given == before).sum())
        return Judgement(n, same / n, wilson(same, n), -100 * gained, (-100 * high, -100 * low))

    def drop(self, original: Tensor, changed: Tensor) -> float:
        """The drop of outputs of this part against the original's, in points."""
        return self.against(original).judge(original, self.read(changed, original)).expected_drop

    def top1(self, predictions: Tensor) -> float | None:
        """Accuracy in percent; None without labels."""
        if self.labels is None or self.metric is not None:
            return None
        return 100 * float((predictions == self.labels).double().mean())


def _by_scores(before: Sequence[float], after: list[float]) -> Judgement:
    """The mean difference of scores with a normal interval. The mean score stands in for the agreement."""
    lost = 100 * (torch.tensor(before, dtype=torch.float64) - torch.tensor(after, dtype=torch.float64))
    n, mean = len(lost), float(lost.mean())
    half = Z * float(lost.std(unbiased=n > 1)) / math.sqrt(n)
    score = sum(after) / n
    return Judgement(n, score, (score, score), mean, (mean - half, mean + half))
