"""Distillation: a student that attends less learns to answer as its teacher does.

The loss is a weighted sum of terms, any of which may be left out:

    label    cross-entropy with the labels (needs labelled pictures)
    logits   KL(teacher ‖ student) of the softened answers, × temperature²
    tokens   mean squared difference of the patch tokens after the last norm, over the tokens the student kept; one that
             stands for several is compared with the mean of the teacher's, and counts for as many as it stands for
    patches  cross-entropy of every patch's answer with the teacher's (`labelling`), for models with a head for patches
    maps     squared difference of the attention maps, summed over keys, averaged over queries, heads and layers; every
             layer of the student is shown the teacher's tokens, so its errors do not spoil the next one's lesson
    extra    whatever the student's attentions and reducers ask to be minimised, through the context

With `mixtoken` the student sees patches of two images in one, and the teacher's lessons are mixed alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..attention import Context
from ..attention.selection import map_loss
from ..backbones.columnar import ColumnarBackbone
from ..errors import UserError
from ..sparse.dispatch import carried
from .labelling import Box, draw_box, patch_answers
from .objective import (
    Output,
    answers_patches,
    collect,
    outputs,
    soft_cross_entropy,
    weighted,
)


class Distillation(nn.Module):
    """The losses of one phase. The teacher is not a submodule: it is neither trained, saved nor synchronised."""

    def __init__(self, student: nn.Module, weights: Mapping[str, float], teacher: nn.Module) -> None:
        super().__init__()
        self.model, self.weights = student, dict(weights)
        self.temperature = self.weights.pop("temperature", 1.0)
        self.mixtoken = self.weights.pop("mixtoken", 0.0)
        self._teacher = (teacher,)
        if self.weights.get("maps") and not (
            isinstance(student, ColumnarBackbone) and isinstance(teacher, ColumnarBackbone)
        ):
            raise UserError("the maps loss goes through both models layer by layer: it needs columnar models")
        if self.mixtoken and not isinstance(student, ColumnarBackbone):
            raise UserError("mixtoken mixes the tokens of whole grids: it needs a columnar model")
        if self.weights.get("patches") and not answers_patches(student):
            raise UserError(
                f"the patches loss teaches a head for patches, and {type(student).__name__} has none: LV-ViT has one"
            )

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        teacher, terms, weights = self._teacher[0], dict[str, Tensor](), self.weights
        taught: Output | None = None
        if weights.get("maps"):
            taught, terms["maps"] = map_lessons(self.model, teacher, images)
        if not any(weights.get(name, name == "extra") for name in ("label", "logits", "tokens", "patches", "extra")):
            return weighted(terms, weights)  # nobody asks what the student answers
        if taught is None and any(weights.get(name) for name in ("logits", "tokens", "patches")):
            with torch.no_grad():
                taught = outputs(teacher, images)
        lessons = None if taught is None else Lessons.of(teacher, taught, patches=bool(weights.get("patches")))
        if self.mixtoken:
            backbone: Any = self.model
            x, context = backbone.embed(images)
            box = draw_box(context.grid, self.mixtoken, x.device)
            targets, lessons = box.images(targets), None if lessons is None else lessons.mixed(box)
            x, context = backbone.run_layers(box.tokens(x, context.grid.prefix), context)
            found = collect(backbone, backbone.norm(x), context)
        else:
            found = outputs(self.model, images)
        if weights.get("label"):
            terms["label"] = soft_cross_entropy(found.logits, targets)
        if weights.get("logits") and lessons:
            terms["logits"] = divergence(found.logits, lessons.logits, self.temperature)
        if weights.get("tokens") and lessons:
            terms["tokens"] = token_difference(found, lessons.tokens)
        if weights.get("patches") and lessons and lessons.labels is not None and found.context is not None:
            answers = patch_answers(self.model, found.features, found.context.grid)
            terms["patches"] = soft_cross_entropy(answers, found.context.grid.averaged(lessons.labels))
        return weighted({**terms, **found.extra}, weights)


class Lessons(NamedTuple):
    """What a teacher teaches: its answers [B, classes], its patch tokens, and its labels [B, n, classes] of them."""

    logits: Tensor
    tokens: Tensor
    labels: Tensor | None = None

    @classmethod
    def of(cls, teacher: Any, taught: Output, *, patches: bool) -> Lessons:
        if taught.context is None:
            return cls(taught.logits, taught.features)
        grid = taught.context.grid
        labels = patch_answers(teacher, taught.features, grid).float().softmax(-1) if patches else None
        return cls(taught.logits, taught.features[:, grid.prefix :], labels)

    def mixed(self, box: Box) -> Lessons:
        """Of images whose tokens were mixed: answers by area, patches by place."""
        logits = box.images(self.logits.float().softmax(-1)).clamp(min=1e-12).log()
        return Lessons(logits, box.patches(self.tokens), None if self.labels is None else box.patches(self.labels))


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher ‖ student) × T², averaged over the batch; the factor keeps gradients of one size."""
    student, teacher = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def token_difference(student: Output, theirs: Tensor) -> Tensor:
    """Mean squared difference of the student's patch tokens from the teacher's [B, N, C], over those it kept: each from
    the mean of those it stands for, and as often as it counts."""
    ours, sizes = student.features, None
    if student.context is not None:
        grid = student.context.grid
        ours, theirs, sizes = ours[:, grid.prefix :], grid.averaged(theirs), grid.sizes
    if ours.shape != theirs.shape:
        raise UserError(f"the tokens loss compares like with like: {tuple(ours.shape)} and {tuple(theirs.shape)}")
    apart = (ours.float() - theirs.float()).square().mean(-1)
    if sizes is None:
        return apart.mean()
    weight = sizes.detach().float()  # what only stays in part, masked in training, is no lesson in staying
    return (apart * weight).sum() / weight.sum()


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
        checkpoint(carried(map_difference), ours, theirs, step.x, step.context, use_reentrant=False)
        for ours, theirs, step in zip(student.blocks, teacher.blocks, entered, strict=True)
    ]
    return taught, torch.stack(differences).mean()


def map_difference(student: Any, teacher: Any, x: Tensor, context: Context) -> Tensor:
    """How far the student's map is from the teacher's, of two layers that see the same tokens."""
    with torch.no_grad():
        target = teacher.attn.map(teacher.norm1(x), context)
    return map_loss(student.attn, student.norm1(x), target, context)
