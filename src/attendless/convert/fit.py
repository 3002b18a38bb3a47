"""Less attention fitted to the model it is put into: Θ, Ψ and the mixing of heads by least squares, without training.

    minimise ‖ Ψ (Σ_g m_hg S_g) Θᵀ - T_h ‖²        S the scores a layer is given, T those its original computes

over the scores of a few images, but for a constant in each row, which the softmax does not see. Heads come first, then
Θ and Ψ by turns. A softmax cares for a row's large scores, a square for all alike, so of the Δ that was found only as
much is taken (all, half, a quarter or none) as brings the layer's output nearest to the original's, on images that were
not fitted to. The layers are fitted one after the other, each to what the fitted one before hands on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import Attention, Context, Grid
from ..attention.less import Less
from ..attention.tokenmap import TokenMap
from ..errors import UserError
from .slots import Slot, find_slots

#: Rounds of Θ and Ψ, and how much the identity is preferred, as a share of the inputs' mean square.
ROUNDS, RIDGE = 2, 0.1
#: Bytes of scores that are held at a time; fewer images are taken where they would be more.
LARGEST = 2**30


def fits(model: nn.Module) -> bool:
    """Whether a model has an attention that can be fitted."""
    return any(isinstance(slot.attn, Less) for slot in find_slots(model))


def fit_to(student: Any, teacher: Any, images: Tensor | None) -> str:
    """`fit`, if there are images, and a sentence on it."""
    if images is None:
        return "less attention starts as a copy of the layer before: on images (--fit DIR) it is fitted to the original"
    return f"less attention was fitted to the original's scores on {fit(student, teacher, images)} images"


@torch.no_grad()
def fit(student: Any, teacher: Any, images: Tensor) -> int:
    """Fit every less attention of `student` to the scores of `teacher`, in place; return on how many images."""
    places = find_slots(student)
    originals = find_slots(teacher)
    needed = sorted({j for i, slot in enumerate(places) if isinstance(slot.attn, Less) for j in (i - 1, i)})
    size = sum(4 * _numel(originals[i]) for i in needed)
    images = images[: max(4, LARGEST // max(1, size))]
    if len(images) < 4:
        raise UserError(f"{len(images)} images were given to fit to: expected 4 or more")
    found = _see(teacher, images, {i: originals[i].attn for i in needed})
    left: Tensor | None = None
    for i, slot in enumerate(places):
        if not isinstance(slot.attn, Less):
            left = found[i].scores if i in found else None
            continue
        grid, less = slot.grid, slot.attn
        if left is None:
            raise UserError(f"{slot.name} cannot be fitted: the layer before has no scores")
        given, seen = less.arranged(left, grid), found.pop(i)
        values = seen.values if less.keys(grid) == seen.values.shape[2] else less.spread(grid) @ seen.values
        _fit_layer(less, grid, given, less.arranged(seen.scores, grid), values)
        left = less.transformed(given, grid)
    return len(images)


def _numel(slot: Slot) -> int:
    attention: Any = slot.attn
    if not isinstance(attention, Attention) or "scores" not in attention.provides:
        raise UserError(f"{slot.name} has no scores to fit to: its attention is {type(attention).__name__}")
    return torch.Size(attention.score_shape(1, slot.grid)).numel()


class Seen(NamedTuple):
    """What a layer computed: its scores, and the values it picked from [B, H, M, D]."""

    scores: Tensor
    values: Tensor


def _see(model: Any, images: Tensor, attentions: dict[int, Any], batch: int = 8) -> dict[int, Seen]:
    """The scores and values of some layers, by asking each for them when it is called."""
    found: dict[int, list[Seen]] = {i: [] for i in attentions}

    def asking(number: int) -> Callable[..., None]:
        def see(attention: Any, arguments: Any, _out: Any) -> None:
            x, context = arguments
            asked = context.wanting(context.wants | {"scores"})
            reduced = getattr(attention, "project_reduced", None)
            q, k, v = attention.project(x) if reduced is None else reduced(x, context.grid)
            found[number].append(Seen(attention.attend(q, k, v, asked)[1].scores.float(), v.float()))

        return see

    hooks = [attention.register_forward_hook(asking(i)) for i, attention in attentions.items()]
    training, like = model.training, next(model.parameters())
    try:
        model.eval()
        for some in images.to(like.device, like.dtype).split(batch):
            model(some)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {i: Seen(*map(torch.cat, zip(*parts, strict=True))) for i, parts in found.items()}


def _fit_layer(less: Less, grid: Grid, given: Tensor, wanted: Tensor, values: Tensor) -> None:
    held = max(1, len(given) // 4)
    S, T = _maps(given[held:]), _centred(_maps(wanted[held:]))
    if less.mixing is not None:
        sources, targets = (a.transpose(0, 1).flatten(1).double() for a in (_centred(S), T))
        moments = sources @ sources.mT
        ridge = 1e-6 * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype, device=S.device)
        mixing = torch.linalg.solve(moments + ridge, sources @ targets.mT).mT
        less.mixing.copy_(mixing)
        S = torch.einsum("hg,bgnm->bhnm", mixing.to(S.dtype), S)
    queries, keys = less.sides_of(grid)
    for _ in range(ROUNDS):
        _fit_map(less.theta, _centred(less.psi(S.mT, queries).mT), T, keys, shared=less.options.shared, blind=True)
        _fit_map(less.psi, _centred(less.theta(S, keys)).mT, T.mT, queries, shared=less.options.shared)
    _shorten(less, Context(grid, scores=given[:held]), wanted[:held], values[:held])


def _maps(scores: Tensor) -> Tensor:
    """[B, H, …, N, M] → [images, or windows of them; H, N, M]."""
    return scores.movedim(2, 1).flatten(0, 1) if scores.ndim == 5 else scores


def _centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(-1, keepdim=True)


def _fit_map(made: TokenMap, inputs: Tensor, targets: Tensor, grid: Grid, *, shared: bool, blind: bool = False) -> None:
    """Ridge regression of the last axis, towards the identity: (I + Δ) inputs ≈ targets, [B, H, R, n] each. A `blind`
    Δ does not see what is the same for all of a row: it was fitted to rows without."""
    if not list(made.parameters()):
        return
    X, Y = (a.flatten(0, 2)[None] if shared else a.transpose(0, 1).flatten(1, 2) for a in (inputs, targets))
    X, Y = X.double(), Y.double()
    gram = X.mT @ X
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram + RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * eye
    delta = torch.linalg.solve(gram, X.mT @ (Y - X)).mT
    made.take((_centred(delta) if blind else delta).float(), gram.float(), grid)


def _shorten(less: Less, context: Context, wanted: Tensor, values: Tensor) -> None:
    """Take as much of Δ as brings the layer's output, from the original's values, nearest to what that made of them."""
    dtype = less.qkv.weight.dtype
    target = less.pick(less.weights_of(wanted, context.grid), values, context.grid)
    whole = {name: value.clone() for name, value in less.state_dict().items()}

    def apart(factor: float) -> float:
        less.load_state_dict(whole)
        less.theta.scale(factor)
        less.psi.scale(factor)
        scores = less.transformed(context.scores.to(dtype), context.grid)  # type: ignore[union-attr]
        return float((less.pick(less.weights_of(scores, context.grid), values, context.grid) - target).norm())

    apart(min((1.0, 0.5, 0.25, 0.0), key=apart))  # and leave it there
