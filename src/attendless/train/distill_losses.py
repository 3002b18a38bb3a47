"""Distillation: a student that attends less learns to answer as its teacher does.

The loss is a weighted sum of terms, any of which may be left out:

    label    cross-entropy with the labels (needs labelled pictures)
    logits   KL(teacher ‖ student) of the softened answers, × temperature²
    tokens   mean squared difference of the patch tokens after the last norm, over the tokens the student kept
    maps     squared difference of the attention maps, summed over keys, averaged over queries, heads and layers; every
             layer of the student is shown the teacher's tokens, so its errors do not spoil the next one's lesson
    extra    whatever the student's attentions ask to be minimised, through the context
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..attention import Context
from ..backbones.columnar import ColumnarHost
from ..errors import UserError
from .objective import Output, collect, outputs, soft_cross_entropy, weighted


class Distillation(nn.Module):
    """The losses of one phase. The teacher is not a submodule: it is neither trained, saved nor synchronised."""

    def __init__(self, student: nn.Module, weights: Mapping[str, float], teacher: nn.Module) -> None:
        super().__init__()
        self.model, self.weights = student, dict(weights)
        self.temperature = self.weights.pop("temperature", 1.0)
        self._teacher = (teacher,)
        if self.weights.get("maps") and not (isinstance(student, ColumnarHost) and isinstance(teacher, ColumnarHost)):
            raise UserError("the maps loss goes through both models layer by layer: it needs columnar models")

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        teacher, terms, weights = self._teacher[0], dict[str, Tensor](), self.weights
        taught: Output | None = None
        if weights.get("maps"):
            taught, terms["maps"] = map_lessons(self.model, teacher, images)
        if not any(weights.get(name, name == "extra") for name in ("label", "logits", "tokens", "extra")):
            return weighted(terms, weights)  # nobody asks what the student answers
        found = outputs(self.model, images)
        if taught is None and (weights.get("logits") or weights.get("tokens")):
            with torch.no_grad():
                taught = outputs(teacher, images)
        if weights.get("label"):
            terms["label"] = soft_cross_entropy(found.logits, targets)
        if weights.get("logits") and taught:
            terms["logits"] = divergence(found.logits, taught.logits, self.temperature)
        if weights.get("tokens") and taught:
            terms["tokens"] = token_difference(found, taught)
        return weighted({**terms, **found.extra}, weights)


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher ‖ student) × T², averaged over the batch; the factor keeps gradients of one size."""
    student, teacher = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def token_difference(student: Output, teacher: Output) -> Tensor:
    """Mean squared difference of patch tokens [B, N, C]; where the student dropped some, over those it kept."""
    ours, theirs = student.features, teacher.features
    if student.context is not None and teacher.context is not None:
        ours, theirs = ours[:, student.context.grid.prefix :], theirs[:, teacher.context.grid.prefix :]
        cells = student.context.grid.cells
        if cells is not None:
            theirs = theirs.gather(1, cells[..., None].expand(-1, -1, theirs.shape[-1]))
    if ours.shape != theirs.shape:
        raise UserError(f"the tokens loss compares like with like: {tuple(ours.shape)} and {tuple(theirs.shape)}")
    return F.mse_loss(ours.float(), theirs.float())


def map_lessons(student: Any, teacher: Any, images: Tensor) -> tuple[Output, Tensor]:
    """Show every layer of the student the tokens that enter the teacher's; return the teacher's answer, and how far
    the student's maps are from the teacher's.

    A layer's maps exist only while that layer is compared. They are computed again for the backward pass, so no more
    than one layer's maps are ever in memory, and only the tokens that enter each layer are kept.
    """
    if len(student.blocks) != len(teacher.blocks):
        raise UserError("the maps loss compares layer with layer: student and teacher have different depths")
    with torch.no_grad():
        *entered, (_, x, context) = teacher.walk(*teacher.embed(images))
        taught = collect(teacher, teacher.norm(x), context)
    differences = [
        checkpoint(map_difference, ours, theirs, step.x, step.context, use_reentrant=False)
        for ours, theirs, step in zip(student.blocks, teacher.blocks, entered, strict=True)
    ]
    return taught, torch.stack(differences).mean()


def map_difference(student: Any, teacher: Any, x: Tensor, context: Context) -> Tensor:
    """How far the student's map is from the teacher's, of two layers that see the same tokens."""
    with torch.no_grad():
        target = teacher.attn.map(teacher.norm1(x), context)
    return student.attn.map_loss(student.norm1(x), target, context)
