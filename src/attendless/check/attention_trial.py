"""An attention under test: the grids, the layer with its tokens and context, and the backend that computes it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..attention import Attention, Context, Grid, create
from ..sparse import calibration, execution
from ..sparse.backend import Backend, backends
from ..sparse.calibration import Line, line_name
from .trial import DIM, HEADS, Place

_SQUARE, _WIDE, _ODD = (6, 6), (4, 8), (7, 5)
#: Grids of several frames.
FRAMES = (Place(Grid(4, 6, 1, depth=3)), Place(Grid(4, 4, depth=4), training=True))
#: Square, non-square and odd grids, with 0, 1 and 5 prefix tokens, in training and in evaluation; several frames.
EVERY = (
    *(
        Place(Grid(*sides, prefix), training)
        for sides, prefix, training in itertools.product((_SQUARE, _WIDE, _ODD), (0, 1, 5), (True, False))
    ),
    *FRAMES,
)
#: One of each, for checks that need not run on every combination.
FEW = (
    Place(Grid(*_SQUARE, 0), training=True),
    Place(Grid(*_WIDE, 1)),
    Place(Grid(*_ODD, 5), training=True),
    Place(Grid(*_ODD, 0)),
    FRAMES[0],
)
EVALUATION = tuple(Place(Grid(*sides)) for sides in ((4, 5, 0), (4, 5, 1), (6, 6, 0), (6, 6, 1)))


class AttentionTrial:
    """An attention whose weights are all moved from their initial values, tokens x [B, N, C] and a context.

    Everything is drawn once, so two calls of the module get the same inputs.
    """

    def __init__(self, spec: str, place: Place, batch: int = 3) -> None:
        self.spec, self.grid, self.training, self.batch = spec, place.grid, place.training, batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.module = self.create().train(place.training)
            for parameter in self.module.parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
            self.x = torch.randn(batch, self.grid.tokens, DIM)
            self.left = left_before(batch, self.grid)
        self.context = self.left.only(self.module.reads)

    def create(self) -> Attention:
        """A new layer of the same spec."""
        return create(self.spec, DIM, HEADS, grid=self.grid)

    def image(self, number: int) -> tuple[Tensor, Context]:
        """Tokens and context of one image of the batch."""
        one = slice(number, number + 1)
        return self.x[one], pytree.tree_map(lambda leaf: leaf[one] if isinstance(leaf, Tensor) else leaf, self.context)

    def backends(self) -> list[Backend]:
        """The backends that can compute the layer, the default one first; empty for plain PyTorch operations."""
        case = self.module.case(self.grid, self.batch)
        if case is None:
            return []
        return [one for one in backends(case.op) if one.serves(case.device) and not one.refuses(case)]

    @contextlib.contextmanager
    def computed_by(self, backend: str) -> Iterator[None]:
        """Policy `off`, which takes the default backend, or policy `auto` with costs that favour the one named."""
        if not backend:
            with execution("off"):
                yield
            return
        case: Any = self.module.case(self.grid, self.batch)
        lines = {line_name(one, one.line(case)): Line(float(one.name != backend), 0.0) for one in self.backends()}
        with execution("auto"), calibration.assumed(lines, torch.float32, torch.bfloat16):
            yield


def left_before(batch: int, grid: Grid) -> Context:
    """A context in which the layer before has provided every entry."""
    scores = torch.randn(batch, HEADS, grid.tokens, grid.tokens)
    return Context(grid, scores=scores, class_attention=torch.softmax(scores[:, :, 0], dim=-1))
