"""Fit LaViT's attention to the model that it is put into: Θ, Ψ and the mixing of heads by least squares.

    minimise ‖ Ψ (Σ_g m_hg S_g) Θᵀ - T_h ‖²        S the scores that a layer receives, T those of its original

over the scores of a few images, up to a constant per row, to which the softmax is invariant. The heads are fitted
first, then Θ and Ψ alternate. The layers are fitted in order, each to the output of the fitted one before. Least
squares weight all scores of a row equally, but a softmax depends on the large ones. Therefore a factor of Δ (0, ½ or 1,
one for all layers) is chosen that brings the outputs closest to the original's, on images that were not fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import Attention, Grid
from ..attention.lavit import LaViTAttention
from ..attention.scores import score_shape
from ..attention.tokenmap import TokenMap
from ..errors import UserError
from ..integrations.discovery import find_slots
from ..integrations.slot import Slot

#: Rounds of Θ and Ψ; ridge towards the identity, relative to the inputs' mean square; factors of Δ that are tried.
ROUNDS, RIDGE, FACTORS = 2, 0.1, (0.0, 0.5, 1.0)
#: Largest number of bytes of scores in memory; it limits the number of images.
LARGEST = 2**30


def fits(slots: Iterable[Slot]) -> bool:
    """Whether any slot has an attention that can be fitted."""
    return any(isinstance(slot.attn, LaViTAttention) for slot in slots)


def fit_to(student: Any, teacher: Any, images: Tensor | None) -> str:
    """Call `fit` if there are images; return a note for the report."""
    if images is None:
        return "less attention starts as a copy of the layer before: on images (--fit DIR) it is fitted to the original"
    return f"less attention was fitted to the original's scores on {fit(student, teacher, images)} images"


@torch.no_grad()
def fit(student: Any, teacher: Any, images: Tensor) -> int:
    """Fit every LaViT attention of `student` to the scores of `teacher`, in place; return the number of images."""
    if len(images) < 4:
        raise UserError(f"{len(images)} images were given to fit to: expected 4 or more")
    places, originals = find_slots(student), find_slots(teacher)
    needed = sorted({j for i, slot in enumerate(places) if isinstance(slot.attn, LaViTAttention) for j in (i - 1, i)})
    images = images[: max(4, LARGEST // sum(4 * _numel(originals[i]) for i in needed))]
    held, rest = images.tensor_split([len(images) // 2])
    found = _scores(teacher, rest, {i: originals[i].attn for i in needed})
    wanted = _answers(teacher, held)
    maps = any(True for slot in places if isinstance(slot.attn, LaViTAttention) for _ in slot.attn.theta.parameters())
    start = {slot.name: _copy(slot.attn) for slot in places if isinstance(slot.attn, LaViTAttention)}
    best = (float("inf"), start)
    for factor in FACTORS if maps else FACTORS[:1]:
        for slot in places:
            if slot.name in start:
                slot.attn.load_state_dict(start[slot.name])
        _fit_layers(places, found, factor)
        apart = float(F.kl_div(_answers(student, held), wanted, reduction="batchmean", log_target=True))
        if apart < best[0]:
            best = (apart, {slot.name: _copy(slot.attn) for slot in places if slot.name in start})
    for slot in places:
        if slot.name in start:
            slot.attn.load_state_dict(best[1][slot.name])
    return len(images)


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _numel(slot: Slot) -> int:
    attention: Any = slot.attn
    if not isinstance(attention, Attention) or "scores" not in attention.provides:
        raise UserError(f"{slot.name} has no scores to fit to: its attention is {type(attention).__name__}")
    return torch.Size(score_shape(attention, 1, slot.grid)).numel()


def _answers(model: nn.Module, images: Tensor, batch: int = 8) -> Tensor:
    """The log-probabilities of a model."""
    training, like = model.training, next(model.parameters())
    try:
        model.eval()
        answers = [model(some).flatten(1) for some in images.to(like.device, like.dtype).split(batch)]
        return torch.log_softmax(torch.cat(answers).float(), dim=-1)
    finally:
        model.train(training)


def _scores(model: nn.Module, images: Tensor, attentions: dict[int, Any]) -> dict[int, Tensor]:
    """The attention scores of some layers, recorded by hooks."""
    found: dict[int, list[Tensor]] = {i: [] for i in attentions}

    def asking(number: int) -> Callable[..., None]:
        def see(attention: Any, arguments: Any, _out: Any) -> None:
            x, context = arguments
            asked = context.wanting(context.wants | {"scores"})
            reduced = getattr(attention, "project_reduced", None)
            q, k, v = attention.project(x) if reduced is None else reduced(x, context.grid)
            found[number].append(attention.attend(q, k, v, asked)[1].scores.float())

        return see

    hooks = [attention.register_forward_hook(asking(i)) for i, attention in attentions.items()]
    try:
        _answers(model, images)
    finally:
        for hook in hooks:
            hook.remove()
    return {i: torch.cat(parts) for i, parts in found.items()}


def _fit_layers(places: list[Slot], found: dict[int, Tensor], factor: float) -> None:
    left: Tensor | None = None
    for i, slot in enumerate(places):
        less, grid = slot.attn, slot.grid
        if not isinstance(less, LaViTAttention):
            left = found.get(i)
            continue
        if left is None:
            raise UserError(f"{slot.name} cannot be fitted: what it reads comes from another stage")
        given = less.arranged(left, grid)
        _fit_layer(less, grid, _maps(given), _centred(_maps(less.arranged(found[i], grid))), factor)
        left = less.transformed(given.to(less.qkv.weight.dtype), grid).float()


def _fit_layer(less: LaViTAttention, grid: Grid, S: Tensor, T: Tensor, factor: float) -> None:
    if less.mixing is not None:
        sources, targets = (a.transpose(0, 1).flatten(1).double() for a in (_centred(S), T))
        moments = sources @ sources.mT
        ridge = 1e-6 * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype, device=S.device)
        mixing = torch.linalg.solve(moments + ridge, sources @ targets.mT).mT
        less.mixing.copy_(mixing)
        S = torch.einsum("hg,bgnm->bhnm", mixing.to(S.dtype), S)
    if not factor:
        return
    queries, keys = less.grids_of(grid)
    for _ in range(ROUNDS):
        _fit_map(less.theta, _centred(less.psi.columns(S, queries)), T, keys, shared=less.options.shared, blind=True)
        _fit_map(less.psi, _centred(less.theta(S, keys)).mT, T.mT, queries, shared=less.options.shared)
    less.theta.scale(factor)
    less.psi.scale(factor)


def _maps(scores: Tensor) -> Tensor:
    """[B, H, …, N, M] → [images or windows, H, N, M]."""
    return scores.movedim(2, 1).flatten(0, 1) if scores.ndim == 5 else scores


def _centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(-1, keepdim=True)


def _fit_map(made: TokenMap, inputs: Tensor, targets: Tensor, grid: Grid, *, shared: bool, blind: bool = False) -> None:
    """Ridge regression of the last axis, towards the identity: (I + Δ) inputs ≈ targets, [B, H, R, n] each. A `blind`
    Δ is invariant to a constant in each row, because it was fitted to centred rows."""
    X, Y = (a.flatten(0, 2)[None] if shared else a.transpose(0, 1).flatten(1, 2) for a in (inputs, targets))
    X, Y = X.double(), Y.double()
    gram = X.mT @ X
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram + RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * eye
    delta = torch.linalg.solve(gram, X.mT @ (Y - X)).mT
    made.take((_centred(delta) if blind else delta).float(), gram.float(), grid)
