"""What enters the attention of a layer: the model is run up to it, in evaluation, and no further.

Nothing is kept during a plain forward, so nothing is paid for what nobody asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import Attention, Context, Grid
from ..backbones import Pyramid, is_backbone
from ..errors import UserError
from ..integrations.discovery import exchangeable, find_slots
from ..integrations.rebuild.architecture import describes
from ..integrations.rebuild.copying import backbone_copy
from ..integrations.timm_inplace.adapted import adapted_modules


class Entry(NamedTuple):
    """A layer's number, its attention, and what enters it: tokens x [B, N, C], normalised, and the context."""

    layer: int
    attention: Attention
    x: Tensor
    context: Context


def layers(model: nn.Module) -> list[nn.Module]:
    """The attention of every layer, as the model runs them: ours, or in a model of timm's also its own."""
    if is_backbone(model):
        return [block.attn for block in model.blocks]
    if not exchangeable(model):
        raise UserError(
            f"{type(model).__name__} has no attention of ours that could say what it looks at: expected one of "
            "attendless, or of timm converted or patched"
        )
    return [slot.attn for slot in find_slots(model)]


def seen_by_us(model: nn.Module) -> nn.Module:
    """The model itself, or one of timm's as a backbone of ours, which has the same maps and can say them."""
    return backbone_copy(model) if describes(model) and not is_backbone(model) else model


def numbers(model: nn.Module, wanted: int | Sequence[int] | None) -> list[int]:
    """The layers asked for, counted from 0 as the model runs them or backwards from -1, in that order; None: all that
    attend by ours."""
    known = layers(model)
    if wanted is None:
        ours = [number for number, attention in enumerate(known) if isinstance(attention, Attention)]
        if not ours:
            name = type(model).__name__
            raise UserError(f"every layer of {name} attends by timm's own, which keeps no map: convert it")
        return ours
    found = set()
    for layer in [wanted] if isinstance(wanted, int) else wanted:
        if not -len(known) <= layer < len(known):
            raise UserError(f"layer {layer} does not exist: {type(model).__name__} has layers 0 to {len(known) - 1}")
        number = layer % len(known)
        if not isinstance(known[number], Attention):
            whose = f"timm's {type(known[number]).__name__}"
            raise UserError(f"layer {number} attends by {whose}, which keeps no map: convert it")
        found.add(number)
    return sorted(found)


@torch.no_grad()
def entries(model: nn.Module, images: Tensor, wanted: Sequence[int]) -> Iterator[Entry]:
    """What enters the attentions of the layers `wanted`, in their order; those after the last are not run."""
    with _evaluating(model):
        run = _walked if is_backbone(model) else _caught
        for number, attention, x, context in run(model, images, wanted):
            # A map is asked for, and nothing for a next layer.
            used = context.only(attention.reads | attention.takes)
            yield Entry(number, attention, x, used.replace(wants=frozenset()))


def entry(model: nn.Module, images: Tensor, layer: int) -> Entry:
    """What enters the attention of one layer."""
    return next(entries(model, images, numbers(model, layer)))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module for module in model.modules() if module.training}
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _walked(backbone: Any, images: Tensor, wanted: Collection[int]) -> Iterator[Entry]:
    """Through the layers of one of our backbones, each up to the norm before its attention."""
    stages, first = {}, 0
    for stage in backbone.stages if isinstance(backbone, Pyramid) else ():
        stages[first] = stage
        first += len(stage.blocks)
    for number, x, context in backbone.walk(*backbone.embed(images), stop=max(wanted) + 1):
        if number in wanted:
            if number in stages:
                x, context = stages[number].enter(x, context)
            block = backbone.blocks[number]
            if block.reducer is not None and block.reducer.first:
                x, context = block.reducer(x, context)
            yield Entry(number, block.attn, block.norm1(x), context)
        if number == max(wanted):
            return


class _Enough(Exception):
    """There is no need to go on."""


def _caught(model: nn.Module, images: Tensor, wanted: Collection[int]) -> Iterator[Entry]:
    """Other models run themselves: let this one run until the last attention asked for is called."""
    given: list[Entry] = []
    known = layers(model)

    def note(found: Entry) -> None:
        given.append(found)
        if found.layer == max(wanted):
            raise _Enough

    with ExitStack() as stack:
        holders: dict[Any, Any] = {module.core: module for _, module in adapted_modules(model)}
        for number in wanted:
            listen = _handed if known[number] in holders else _called
            stack.enter_context(listen(number, holders.get(known[number], known[number]), note))
        with suppress(_Enough):
            model(images)
    yield from given


@contextmanager
def _called(number: int, attention: Any, note: Callable[[Entry], None]) -> Iterator[None]:
    """Inside, `note` hears what an attention of ours is called with."""
    hook = attention.register_forward_pre_hook(lambda module, given: note(Entry(number, module, *given)))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _handed(number: int, holder: Any, note: Callable[[Entry], None]) -> Iterator[None]:
    """Inside, `note` hears of the q, k and v that a module of somebody else's hands to its core: what projects is the
    module, so the core that is noted has them instead of projections."""

    def attend(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        core: Any = copy.copy(holder.core)
        placed = (*holder.placed(q, k, grid), v)
        core.project = lambda x: placed
        note(Entry(number, core, v.transpose(1, 2).flatten(2), Context(grid)))
        return type(holder).attend(holder, q, k, v, grid)

    holder.attend = attend
    try:
        yield
    finally:
        del holder.attend
