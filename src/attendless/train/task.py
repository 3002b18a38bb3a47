"""What a run learns to do. The loop asks its task for pictures, targets and scores, and knows nothing else of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .augment import Mix, eval_transform, preparation, train_transform
from .evaluate import evaluate
from .loader import Prepared
from .state import Data

#: Images, what the loader gave with them, the step → images and targets as the objective takes them.
Batch = Callable[[Tensor, Any, int], tuple[Tensor, Any]]


class Task(Protocol):
    """`recipe` is of the task's own kind. Every draw must be a function of the global generators, which are seeded for
    each picture."""

    def told(self, data: Data, recipe: Any) -> dict[str, Any]:
        """What the model is told of its pictures and classes, so that a saved file says so too."""

    def drawn(self, data: Data, recipe: Any) -> Prepared:
        """The pictures to learn from."""

    def judged(self, data: Data, recipe: Any) -> Prepared:
        """The pictures to be judged on."""

    def batches(self, data: Data, recipe: Any) -> Batch:
        """What becomes of a batch on the model's device."""

    def evaluate(
        self, model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, data: Data
    ) -> dict[str, Any]:
        """How good the model is, over all processes: numbers for the epoch's row."""

    def score(self, data: Data, found: dict[str, Any], loss: float) -> float:
        """The one number of them by which the best weights are kept; higher is better."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """One class for every picture; with a teacher, whose answers count as right where nothing is labelled."""

    teacher: nn.Module | None = None

    def told(self, data: Data, recipe: Any) -> dict[str, Any]:
        about = preparation(recipe, data.size, data.mean, data.std)
        return {**about, "num_classes": data.classes, "label_names": data.names or None}

    def drawn(self, data: Data, recipe: Any) -> Prepared:
        transform = train_transform(recipe, data.size, data.mean, data.std)
        return Prepared(data.train, transform, recipe.seed, stand_in=True)

    def judged(self, data: Data, recipe: Any) -> Prepared:
        return Prepared(data.val, eval_transform(recipe, data.size, data.mean, data.std), recipe.seed)

    def batches(self, data: Data, recipe: Any) -> Batch:
        return Mix(recipe, data.classes)

    def evaluate(
        self, model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, data: Data
    ) -> dict[str, Any]:
        return evaluate(model, loader, accelerator, labelled=data.labelled, teacher=self.teacher, name=data.val.name)

    def score(self, data: Data, found: dict[str, Any], loss: float) -> float:
        return found["top1"] if data.labelled else found.get("agreement", -loss)
