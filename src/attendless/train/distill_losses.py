"""Distillation: losses that train a student with efficient attention to reproduce its teacher.

The loss is a weighted sum of terms; a weight of 0 removes a term:

    label    cross-entropy with the labels (needs labelled images)
    logits   KL(teacher ‖ student) of the softened logits, × temperature²
    tokens   mean squared difference of the patch tokens after the last norm, over the tokens that the student keeps; a
             merged token is compared with the mean of its patches and weighted by their number
    patches  cross-entropy of each patch's prediction with the teacher's (`labelling`), for models with a patch head
    maps     squared difference of the attention maps, summed over keys, averaged over queries, heads and layers; every
             layer of the student receives the teacher's tokens, so errors do not accumulate over layers
    extra    losses that the student's attentions and reducers define, through the context

With `mixtoken`, patches of two images are mixed in the student's input, and the teacher's targets accordingly.
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
            raise UserError("the maps loss compares both models layer by layer: it needs isotropic models (`Columnar`)")
        if self.mixtoken and not isinstance(student, ColumnarBackbone):
            raise UserError("mixtoken mixes the tokens of complete grids: it needs an isotropic model (`Columnar`)")
        if self.weights.get("patches") and not answers_patches(student):
            raise UserError(
                f"the patches loss trains a patch head, and {type(student).__name__} has none; LV-ViT has one"
            )

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        teacher, terms, weights = self._teacher[0], dict[str, Tensor](), self.weights
        taught: Output | None = None
        if weights.get("maps"):
            taught, terms["maps"] = map_lessons(self.model, teacher, images)
        if not any(weights.get(name, name == "extra") for name in ("label", "logits", "tokens", "patches", "extra")):
            return weighted(terms, weights)  # no term needs the outputs of the student
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
    """Targets from the teacher: logits [B, classes], patch tokens, and patch labels [B, n, classes]."""

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
        """Targets for mixed images: logits by area, patches by position."""
        logits = box.images(self.logits.float().softmax(-1)).clamp(min=1e-12).log()
        return Lessons(logits, box.patches(self.tokens), None if self.labels is None else box.patches(self.labels))


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher ‖ student) × T², averaged over the batch; the factor makes the size of gradients independent of T."""
    student, teacher = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def token_difference(student: Output, theirs: Tensor) -> Tensor:
    """Mean squared difference of the student's remaining patch tokens from the teacher's [B, N, C]. A merged token is
    compared with the mean of its patches and weighted by their number."""
    ours, sizes = student.features, None
    if student.context is not None:
        grid = student.context.grid
        ours, theirs, sizes = ours[:, grid.prefix :], grid.averaged(theirs), grid.sizes
    if ours.shape != theirs.shape:
        raise UserError(f"the tokens loss needs equal shapes, not {tuple(ours.shape)} and {tuple(theirs.shape)}")
    apart = (ours.float() - theirs.float()).square().mean(-1)
    if sizes is None:
        return apart.mean()
    weight = sizes.detach().float()  # the loss must not train the soft masks that some reducers use in training
    return (apart * weight).sum() / weight.sum()


def map_lessons(student: Any, teacher: Any, images: Tensor) -> tuple[Output, Tensor]:
    """Pass the teacher's tokens to every layer of the student; return the teacher's output and the difference of maps.

    The maps of a layer exist only while that layer is compared, and the backward pass computes them again. So at most
    one layer's maps are in memory, besides the input tokens of each layer.
    """
    if len(student.blocks) != len(teacher.blocks):
        raise UserError("the maps loss compares layer by layer, but student and teacher have different depths")
    with torch.no_grad():
        *entered, (_, x, context) = teacher.walk(*teacher.embed(images))
        taught = collect(teacher, teacher.norm(x), context)
    differences = [
        checkpoint(carried(map_difference), ours, theirs, step.x, step.context, use_reentrant=False)
        for ours, theirs, step in zip(student.blocks, teacher.blocks, entered, strict=True)
    ]
    return taught, torch.stack(differences).mean()


def map_difference(student: Any, teacher: Any, x: Tensor, context: Context) -> Tensor:
    """Difference of the maps of a student's and a teacher's layer for the same input tokens."""
    with torch.no_grad():
        target = teacher.attn.map(teacher.norm1(x), context)
    return map_loss(student.attn, student.norm1(x), target, context)
