"""The input of a layer's attention: runs the model up to that layer in evaluation mode.

A plain forward pass stores nothing, so maps add no cost to it.
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
    """A layer's index, its attention, and the input: normalised tokens x [B, N, C] and the context."""

    layer: int
    attention: Attention
    x: Tensor
    context: Context


def layers(model: nn.Module) -> list[nn.Module]:
    """The attention of every layer, in the order of execution, including timm's own attention modules."""
    if is_backbone(model):
        return [block.attn for block in model.blocks]
    if not exchangeable(model):
        raise UserError(
            f"{type(model).__name__} has no attention of attendless, so it has no maps: expected an attendless model, "
            "or a converted or patched model"
        )
    return [slot.attn for slot in find_slots(model)]


def seen_by_us(model: nn.Module) -> nn.Module:
    """The model itself, or a copy of a timm model as an attendless backbone, which has the same maps."""
    return backbone_copy(model) if describes(model) and not is_backbone(model) else model


def numbers(model: nn.Module, wanted: int | Sequence[int] | None) -> list[int]:
    """Indices of the selected layers, counted from 0 in the order of execution or backwards from -1, sorted; None: all
    with an attention of attendless."""
    known = layers(model)
    if wanted is None:
        ours = [number for number, attention in enumerate(known) if isinstance(attention, Attention)]
        if not ours:
            name = type(model).__name__
            raise UserError(f"every layer of {name} has timm's attention, which provides no map: convert the model")
        return ours
    found = set()
    for layer in [wanted] if isinstance(wanted, int) else wanted:
        if not -len(known) <= layer < len(known):
            raise UserError(f"layer {layer} does not exist: {type(model).__name__} has layers 0 to {len(known) - 1}")
        number = layer % len(known)
        if not isinstance(known[number], Attention):
            whose = f"timm's {type(known[number]).__name__}"
            raise UserError(f"layer {number} has {whose}, which provides no map: convert the model")
        found.add(number)
    return sorted(found)


@torch.no_grad()
def entries(model: nn.Module, images: Tensor, wanted: Sequence[int]) -> Iterator[Entry]:
    """The inputs of the attentions of the layers `wanted`, in order; later layers are not run."""
    with _evaluating(model):
        run = _walked if is_backbone(model) else _caught
        for number, attention, x, context in run(model, images, wanted):
            # Only the map is needed, no outputs for the next layer.
            used = context.only(attention.reads | attention.takes)
            yield Entry(number, attention, x, used.replace(wants=frozenset()))


def entry(model: nn.Module, images: Tensor, layer: int) -> Entry:
    """The input of the attention of one layer."""
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
    """Inputs from an attendless backbone: run each layer up to the norm before its attention."""
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
    """Stops the forward pass after the last selected layer."""


def _caught(model: nn.Module, images: Tensor, wanted: Collection[int]) -> Iterator[Entry]:
    """Inputs from other models: run the forward pass until the last selected attention is called."""
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
    """Within the context, `note` receives the inputs of an attendless attention."""
    hook = attention.register_forward_pre_hook(lambda module, given: note(Entry(number, module, *given)))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _handed(number: int, holder: Any, note: Callable[[Entry], None]) -> Iterator[None]:
    """Within the context, `note` receives the q, k and v that an adapted module passes to its core. The module itself
    projects, so the noted core has these tensors instead of projections."""

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
