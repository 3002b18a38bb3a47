"""From a row of outputs to a prediction: the most probable classes with probabilities, and the features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Answer:
    """The prediction for one image, most probable class first; or the reason why the image could not be read."""

    image: str
    classes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    features: tuple[float, ...] | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set, for JSON."""
        found: dict[str, Any] = {"image": self.image}
        if self.error is not None:
            return found | {"error": self.error}
        if self.classes:
            each = zip(self.classes, self.names, self.probabilities, strict=True)
            found["answers"] = [{"class": c, "name": name, "probability": p} for c, name, p in each]
        return found if self.features is None else found | {"features": list(self.features)}


def read_answers(rows: Tensor, images: Sequence[str], names: Sequence[str], topk: int) -> list[Answer]:
    """Rows [B, scores + features] as predictions; NaN or infinity raises `UserError`."""
    sound = rows.isfinite().all(1).tolist()
    if not all(sound):
        raise UserError(f"the model returns NaN or infinity for image {images[sound.index(False)]!r}")
    best = rows[:, : len(names)].softmax(1).topk(min(topk, len(names)), dim=1)
    extra = rows[:, len(names) :].tolist()
    return [
        Answer(
            image,
            tuple(classes),
            tuple(names[c] for c in classes),
            tuple(probabilities),
            tuple(features) or None,
        )
        for image, classes, probabilities, features in zip(
            images, best.indices.tolist(), best.values.tolist(), extra, strict=True
        )
    ]
