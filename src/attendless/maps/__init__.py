"""What a layer looks at: its attention map for given images, computed anew from what enters the layer.

    maps(model, images, layer=5)[0, :, 0]   # what the class token of the first image looks at, head by head

Nothing is kept during a forward, so nothing is paid for maps that nobody asks for: the layers before the one asked for
are run, and its attention says what map it amounts to (`Attention.map`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import Attention, Context
from ..backbones import Pyramid, is_host
from ..convert.slots import exchangeable, find_slots
from ..errors import UserError

__all__ = ["Entry", "entry", "layers", "maps"]


class Entry(NamedTuple):
    """A layer's attention and what enters it: tokens x [B, N, C], normalised, and the context."""

    attention: Attention
    x: Tensor
    context: Context


@torch.no_grad()
def maps(model: nn.Module, images: Tensor, layer: int, query: int | slice = slice(None)) -> Tensor:
    """The map [B, H, queries, N] of one layer of a model of ours, or of a converted one, for images [B, 3, h, w].

    Layers are counted as the model runs them, from 0, or backwards from -1. Tokens come prefix first, then the patches
    row by row; `query` picks queries among them.
    """
    found = entry(model, images, layer)
    return found.attention.map(found.x, found.context, query)


def layers(model: nn.Module) -> list[nn.Module]:
    """The attention of every layer, as the model runs them: ours, or in a model of timm's also its own."""
    if is_host(model):
        return [block.attn for block in model.blocks]  # type: ignore[union-attr]
    if not exchangeable(model):
        raise UserError(f"{type(model).__name__} has no attention of ours that could say what it looks at: convert it")
    return [slot.attn for slot in find_slots(model)]


def entry(model: nn.Module, images: Tensor, layer: int) -> Entry:
    """What enters the attention of one layer, in evaluation; the layers after it are not run."""
    known = layers(model)
    if not -len(known) <= layer < len(known):
        raise UserError(f"layer {layer} does not exist: {type(model).__name__} has layers 0 to {len(known) - 1}")
    number = layer % len(known)
    attention = known[number]
    if not isinstance(attention, Attention):
        raise UserError(f"layer {number} attends by timm's {type(attention).__name__}, which keeps no map: convert it")
    training = model.training
    model.eval()
    try:
        x, context = _walked(model, images, number) if is_host(model) else _caught(model, images, attention)
    finally:
        model.train(training)
    # A map is asked for, and nothing for a next layer.
    return Entry(attention, x, context.only(attention.reads).replace(wants=frozenset()))


def _walked(host: Any, images: Tensor, number: int) -> tuple[Tensor, Context]:
    """Through the layers of one of our hosts, up to the norm before the attention asked for."""
    step = next(step for step in host.walk(*host.embed(images)) if step.number == number)
    x, context = step.x, step.context
    if isinstance(host, Pyramid):
        first = 0
        for stage in host.stages:
            if number == first:
                x, context = stage.enter(x, context)
            first += len(stage.blocks)
    return host.blocks[number].norm1(x), context


class _Enough(Exception):
    """There is no need to go on."""


def _caught(model: nn.Module, images: Tensor, attention: Attention) -> tuple[Tensor, Context]:
    """timm's own models run themselves: let this one run until the attention is called."""
    given: list[tuple[Tensor, Context]] = []

    def catch(module: nn.Module, arguments: tuple[Tensor, Context]) -> None:
        given.append(arguments)
        raise _Enough

    hook = attention.register_forward_pre_hook(catch)
    try:
        model(images)
    except _Enough:
        pass
    finally:
        hook.remove()
    return given[0]
