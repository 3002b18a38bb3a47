"""One attention put to the test: where, with which tokens, computed by whom, and how a check of it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..attention import Attention, Context, Grid, create
from ..errors import UserError
from ..sparse import calibration, execution
from ..sparse.backend import Backend, backends
from ..sparse.calibration import Line, line_name

#: Width and heads of every attention tried: small, so that all is quick.
DIM, HEADS = 32, 2
_SQUARE, _WIDE, _ODD = (6, 6), (4, 8), (7, 5)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an attention is tried."""

    grid: Grid
    training: bool = False

    def __str__(self) -> str:
        return f"grid {self.grid} in {'training' if self.training else 'evaluation'}"


#: Square, non-square and odd grids, with 0, 1 and 5 prefix tokens, in training and in evaluation.
EVERY = tuple(
    Place(Grid(*sides, prefix), training)
    for sides, prefix, training in itertools.product((_SQUARE, _WIDE, _ODD), (0, 1, 5), (True, False))
)
#: Each of these once, for checks that need not see every combination.
FEW = (
    Place(Grid(*_SQUARE, 0), training=True),
    Place(Grid(*_WIDE, 1)),
    Place(Grid(*_ODD, 5), training=True),
    Place(Grid(*_ODD, 0)),
)
EVALUATION = tuple(Place(Grid(*sides)) for sides in ((4, 5, 0), (4, 5, 1), (6, 6, 0), (6, 6, 1)))


class Broken(Exception):
    """A check that failed; the text says what was seen and what was expected."""


def must(holds: object, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def same(found: Tensor, expected: Tensor, what: str, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Raise unless two tensors are equal, within a tolerance."""
    must(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not torch.allclose(found, expected, atol=atol, rtol=rtol):
        raise Broken(f"{what}: off by up to {(found - expected).abs().max().item():.2g}")


class Trial:
    """An attention with every weight off its neutral start, tokens x [B, N, C] for it, and the context it gets.

    All of it is drawn once: whoever calls the module twice gives it the same.
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
        """One more of its kind."""
        return create(self.spec, DIM, HEADS, grid=self.grid)

    def image(self, number: int) -> tuple[Tensor, Context]:
        """One image of the batch alone."""
        one = slice(number, number + 1)
        return self.x[one], pytree.tree_map(lambda leaf: leaf[one] if isinstance(leaf, Tensor) else leaf, self.context)

    def backends(self) -> list[Backend]:
        """Who can compute it, the usual one first; nobody if it is computed by plain PyTorch operations."""
        case = self.module.case(self.grid, self.batch)
        if case is None:
            return []
        return [one for one in backends(case.op) if one.serves(case.device) and not one.refuses(case)]

    @contextlib.contextmanager
    def computed_by(self, backend: str) -> Iterator[None]:
        """By the usual backend (policy `off`), or, if one is named, by the policy `auto`, told that it is quickest."""
        if not backend:
            with execution("off"):
                yield
            return
        case: Any = self.module.case(self.grid, self.batch)
        lines = {line_name(one, one.line(case)): Line(float(one.name != backend), 0.0) for one in self.backends()}
        with execution("auto"), calibration.assumed(lines, torch.float32, torch.bfloat16):
            yield


def left_before(batch: int, grid: Grid) -> Context:
    """A context in which a layer before has left everything it could."""
    scores = torch.randn(batch, HEADS, grid.tokens, grid.tokens)
    return Context(grid, scores=scores, class_attention=torch.softmax(scores[:, :, 0], dim=-1))


@dataclasses.dataclass(frozen=True)
class Check:
    """A rule of the contract: its name, the rule in a sentence, where it is tried, and the function that tries it.

    `once`: a single grid that is served is enough. `serve`: at least one must be.
    """

    name: str
    rule: str
    places: tuple[Place, ...]
    function: Callable[[Trial], None]
    once: bool = False
    serve: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a check ended: `refused` if the attention refuses every grid it was tried on, with a reason."""

    spec: str
    check: str
    backend: str
    result: Literal["passed", "refused", "failed"]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def attempt(check: Check, spec: str, backend: str = "") -> Verdict:
    """Try one check, by the usual backend or, at fewer places, by the one named."""
    served, refusals = 0, []
    places = FEW if backend and check.places == EVERY else check.places
    for place in places:
        try:
            trial = Trial(spec, place)
        except UserError as refusal:
            if len(str(refusal)) <= 40:
                note = f"{place} is refused without saying what and why: {refusal}"
                return Verdict(spec, check.name, backend, "failed", note)
            refusals.append(str(refusal))
            continue
        except Exception as error:
            return Verdict(spec, check.name, backend, "failed", f"it cannot be built for {place}: {_told(error)}")
        try:
            with trial.computed_by(backend):
                check.function(trial)
        except Exception as error:
            return Verdict(spec, check.name, backend, "failed", f"{place}: {_told(error)}")
        served += 1
        if check.once:
            return Verdict(spec, check.name, backend, "passed")
    if served:
        note = f"{len(refusals)} of {len(places)} grids refused: {refusals[0]}" if refusals else ""
        return Verdict(spec, check.name, backend, "passed", note)
    if check.serve:
        return Verdict(spec, check.name, backend, "failed", f"it refuses every grid it was tried on: {refusals[0]}")
    return Verdict(spec, check.name, backend, "refused", refusals[0])


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, Broken) else f"{type(error).__name__}: {first}"
