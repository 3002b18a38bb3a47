"""Tasks: the training loop gets images, targets and scores from its task, and depends on nothing else of it."""

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

#: (images, targets of the loader, step) → images and targets in the form that the objective takes.
Batch = Callable[[Tensor, Any, int], tuple[Tensor, Any]]


class Task(Protocol):
    """What a task provides. `recipe` is of the task's own class.

    Random draws must come from the global generators only: they are seeded for each image.
    """

    def told(self, data: Data, recipe: Any) -> dict[str, Any]:
        """Preprocessing and classes, for the model's configuration and so for saved files."""

    def drawn(self, data: Data, recipe: Any) -> Prepared:
        """The training images."""

    def judged(self, data: Data, recipe: Any) -> Prepared:
        """The validation images."""

    def batches(self, data: Data, recipe: Any) -> Batch:
        """The function that prepares a batch on the model's device."""

    def evaluate(
        self, model: nn.Module, loader: DataLoader[Any], accelerator: Accelerator, data: Data
    ) -> dict[str, Any]:
        """Evaluate the model over all processes; returns numbers for the row of the epoch."""

    def score(self, data: Data, found: dict[str, Any], loss: float) -> float:
        """The number that selects the best weights; higher is better."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """One class per image. With a teacher and without labels, the score is the agreement with the teacher."""

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
