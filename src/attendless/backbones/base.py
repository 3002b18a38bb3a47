"""The common part of both backbones: running layers in order, passing the context, checking the order, counting costs.

A backbone is a flat list of layers, with or without stages. A subclass defines the layers (`blocks`), how one layer
runs (`run_layer`; a hierarchical backbone also downsamples before the first layer of a stage), and what comes before
and after them (`embed`, `norm`, `forward_head`). All code that visits a model layer by layer uses `walk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from ..attention import Attention, Context, Grid, Spec
from ..attention.scores import misreads
from ..attention.values import ENTRIES
from ..errors import UserError
from ..tokens import create_reducers, parse_tokens
from .class_token_tail import TailedBackbone
from .cost import Layer


class Step(NamedTuple):
    """A layer about to be run: its number, the tokens and the context that enter it."""

    number: int
    x: Tensor
    context: Context


class Backbone(TailedBackbone):
    """A model whose blocks pass the context."""

    blocks: Any

    def run_layer(self, number: int, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """Run one layer. `context.wants` names the entries that the layer must provide."""
        raise NotImplementedError(f"{type(self).__name__} does not define run_layer")

    def walk(self, x: Tensor, context: Context, start: int = 0, stop: int | None = None) -> Iterator[Step]:
        """Run the layers from `start` up to `stop`; yield a `Step` before each layer, and one after the last."""
        wants = self.wants()
        last = len(wants) if stop is None else stop
        for number in range(start, last):
            context = context.wanting(wants[number])
            yield Step(number, x, context)
            x, context = self.run_layer(number, x, context)
        yield Step(last, x, context)

    def run_layers(
        self, x: Tensor, context: Context, start: int = 0, stop: int | None = None
    ) -> tuple[Tensor, Context]:
        """Run the layers from `start` up to `stop`: tokens and context after the last."""
        for _, after, left in self.walk(x, context, start, stop):
            x, context = after, left
        return x, context

    def wants(self) -> list[frozenset[str]]:
        """The context entries that each layer must provide: those that the attention of the next layer reads."""
        reads = [block.attn.reads for block in self.blocks]
        return [*reads[1:], frozenset()]

    @property
    def tokens(self) -> str:
        """The spec of the token reducer; empty if there is none."""
        return next((str(block.reducer.spec) for block in self.blocks if block.reducer is not None), "")

    def set_tokens(self, tokens: str | Spec, *, check: bool = True) -> None:
        """Put a token reducer (`tome:r=8`) into the backbone; `none` removes the present one. Without `check`, the
        caller calls `check_order` once all attentions are in place."""
        spec = parse_tokens(tokens)
        blocks = list(self.blocks)
        found = {} if spec is None else create_reducers(spec, blocks[0].attn.dim, blocks[0].attn.head_dim, len(blocks))
        before = [block.reducer for block in blocks]
        for number, block in enumerate(blocks):
            block.reducer = found.get(number)
            if block.reducer is not None:
                weight = block.attn.qkv.weight
                block.reducer.to(weight.device, weight.dtype).train(block.training)
        try:
            if check:
                self.check_order()
        except UserError:
            for block, reducer in zip(blocks, before, strict=True):
                block.reducer = reducer
            raise

    def check_order(self) -> None:
        """Raise unless every attention and reducer receives what it reads, and every attention supports its grid."""
        raise NotImplementedError(f"{type(self).__name__} does not define check_order")

    def forward_context(self, images: Tensor) -> tuple[Tensor, Context]:
        """`forward_features`, and the context after the last layer: extra losses, the final grid."""
        x, context = self.run_layers(*self.embed(images))
        return self.norm(x), context

    def answer(self, x: Tensor, grid: Grid) -> Tensor:
        """The model's output, given the normalised tokens x of the last layer on `grid`. In a mean, a merged token is
        weighted by the number of patches it represents."""
        return cast(Tensor, self.forward_head(grid.balanced(x) if self.global_pool == "avg" else x))

    def costs(self, size: tuple[int, int] | None = None, batch: int = 1) -> list[Layer]:
        """Parameters and multiply-accumulates of the embedding, every layer and the head, for one image of `size`, and
        the backend of every attention for `batch` images."""
        raise NotImplementedError(f"{type(self).__name__} does not define costs")

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """Images → the tokens that enter the first layer, and the context they start with."""
        raise NotImplementedError(f"{type(self).__name__} does not define embed")

    norm: Any
    forward_head: Any
    global_pool: Any


class Place(NamedTuple):
    """A layer of a stage: its name, its attention (perhaps a foreign module), and its reducer."""

    name: str
    attention: Any
    reducer: Any = None


def check_order(places: Sequence[Place], *, entered: bool = False) -> None:
    """Raise unless everything in a stage receives what it reads: an attention from the layer before, a reducer from the
    attention of its own layer. `entered`: the first layer receives the entries of the stage before."""
    for before, place in zip([None, *places], places, strict=False):
        for entry in sorted(getattr(place.attention, "reads", ())):
            what = f"attention {place.attention.spec} in {place.name} reads the {entry} of the layer before"
            if entry not in ENTRIES:
                raise UserError(f"{what}: there are only {', '.join(ENTRIES)}")
            if before is None and entered:
                continue
            if before is None:
                raise UserError(f"{what}, but it is the first layer")
            if entry not in getattr(before.attention, "provides", ()):
                raise UserError(f"{what}, but {_called(before.attention)} in {before.name} does not provide it")
            if entry == "scores" and (why := misreads(place.attention, before.attention)):
                raise UserError(f"{what}, but {_called(before.attention)} in {before.name} does not provide it: {why}")
            if before.reducer is not None:
                raise UserError(f"{what}, but {before.reducer.name} in {before.name} removes tokens in between")
        for entry in sorted(getattr(place.reducer, "reads", ())):
            if entry not in getattr(place.attention, "provides", ()):
                whose = f"the {entry} of {_called(place.attention)}, which does not provide it"
                raise UserError(f"reducer {place.reducer.name} in {place.name} reads {whose}")


def _called(attention: Any) -> str:
    return str(attention.spec) if isinstance(attention, Attention) else type(attention).__name__
