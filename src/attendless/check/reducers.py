"""The interface checks of token reducers.

A reducer's spec describes a whole model, so a trial runs the reducers of all its layers one after the other, each on
the tokens that the one before leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..attention import Context, Grid
from ..errors import UserError
from ..sparse import execution
from ..tokens import Reducer, create_reducers, parse_tokens
from .trial import DIM, HEADS, Check, Place, changed_by, must, rule, same

CHECKS: dict[str, Check] = {}
#: Square, non-square and odd grids with 0, 1 and 5 prefix tokens, and several frames.
EVALUATION = tuple(
    Place(grid) for grid in (Grid(6, 6, 1), Grid(4, 8, 0), Grid(7, 5, 5), Grid(4, 6, 1, depth=3), Grid(3, 4, depth=4))
)
EVERY = (*EVALUATION, Place(Grid(6, 6, 1), training=True), Place(Grid(4, 6, 0, depth=2), training=True))
#: Depths of the models a spec is tested in; the first one that the spec fits is used.
_DEPTHS = (12, *range(1, 49))


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of one reducer: tokens and context before and after."""

    reducer: Reducer
    x: Tensor
    context: Context
    out: Tensor
    left: Context


class ReducerTrial:
    """The reducers of a model, with tokens x [B, N, C] and, for each layer, the context entries that it reads.

    Everything is drawn from seeds, so two runs get the same inputs.
    """

    def __init__(self, spec: str, place: Place, batch: int = 3) -> None:
        self.spec, self.grid, self.training, self.batch = spec, place.grid, place.training, batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.reducers = self.create()
            for reducer in self.reducers:
                for parameter in reducer.parameters():
                    parameter.data.add_(0.1 * torch.randn_like(parameter))
            self.x = torch.randn(batch, self.grid.tokens, DIM)
        with self.computed_by(""), torch.no_grad():
            self.steps = self.run()

    def create(self) -> list[Reducer]:
        """New reducers of the same spec, one for each layer in which it reduces tokens."""
        parsed = parse_tokens(self.spec)
        if parsed is None:
            raise UserError(f"{self.spec!r} names no token reducer, so that there is nothing to check")
        refusal: UserError | None = None
        for depth in _DEPTHS:
            try:
                return [one.train(self.training) for one in create_reducers(parsed, DIM, DIM // HEADS, depth).values()]
            except UserError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    @contextlib.contextmanager
    def computed_by(self, backend: str) -> Iterator[None]:
        """Policy `off`, which takes the default backend; random draws are the same in every run."""
        with execution("off"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            yield

    def entered(self, reducer: Reducer, context: Context, images: slice = slice(None)) -> Context:
        """The context with the entries that the attention of the same block provides for `reducer`."""
        draws, tokens = torch.Generator().manual_seed(reducer.layer), context.grid.tokens
        scores = torch.randn(self.batch, HEADS, tokens, tokens, generator=draws)
        keys = torch.randn(self.batch, HEADS, tokens, DIM // HEADS, generator=draws)
        provided = {"scores": scores, "class_attention": torch.softmax(scores[:, :, 0], dim=-1), "keys": keys}
        read = {name: value[images] for name, value in provided.items() if name in reducer.reads}
        return context.only(()).replace(**read)

    def run(
        self, x: Tensor | None = None, images: slice = slice(None), reducers: list[Reducer] | None = None
    ) -> list[Step]:
        """Run all reducers, on tokens `x` or on those of `images`."""
        x, context, steps = self.x[images] if x is None else x, Context(self.grid), []
        for reducer in self.reducers if reducers is None else reducers:
            context = self.entered(reducer, context, images)
            out, left = reducer(x, context)
            steps.append(Step(reducer, x, context, out, left))
            x, context = out, left
        return steps


_rule: Callable[..., Callable[[Callable[[ReducerTrial], None]], Callable[[ReducerTrial], None]]] = partial(
    rule, CHECKS, ReducerTrial
)


def _all(function: Callable[[ReducerTrial, Step], None]) -> Callable[[ReducerTrial], None]:
    """A check of every step of a trial."""

    def every(trial: ReducerTrial) -> None:
        for step in trial.steps:
            function(trial, step)

    every.__name__, every.__doc__ = function.__name__, function.__doc__
    return every


# Tokens and grid ------------------------------------------------------------------------------------------------------


@_rule(EVERY, serve=True)
def token_counts(trial: ReducerTrial) -> None:
    """Some tokens leave, and as many remain as `reduced` says (in training, as the returned grid says); their width is
    unchanged and their values are finite."""
    must(trial.steps, "it reduces tokens in no layer")
    for step in trial.steps:
        must(isinstance(step.left, Context), f"forward returned {type(step.left).__name__}, expected a Context")
        grid, found = step.left.grid, tuple(step.out.shape)
        tokens = grid.tokens if trial.training else step.reducer.reduced(step.context.grid).tokens
        must(found == (trial.batch, tokens, DIM), f"tokens {found}, expected {(trial.batch, tokens, DIM)}")
        must(grid.tokens == tokens, f"the returned grid has {grid.tokens} tokens, expected {tokens}")
        must(step.out.isfinite().all(), "the output is not finite")
    fewest = min(step.left.grid.tokens for step in trial.steps)
    must(trial.training or fewest < trial.grid.tokens, "no token leaves in any layer")


@_rule(EVERY)
@_all
def prefix_tokens(trial: ReducerTrial, step: Step) -> None:
    """Prefix tokens leave unchanged."""
    prefix = trial.grid.prefix
    same(step.out[:, :prefix], step.x[:, :prefix], "prefix tokens")


@_rule(EVERY)
@_all
def whole_grid(trial: ReducerTrial, step: Step) -> None:
    """The returned grid has the height, width, depth and prefix of the given one."""
    whole = step.left.grid.whole()
    must(whole == trial.grid, f"the returned grid belongs to {whole}, expected {trial.grid}")


@_rule(EVERY)
@_all
def cells(trial: ReducerTrial, step: Step) -> None:
    """`cells` [B, n] lists distinct cells of the grid, each of which held a token before."""
    grid, before = step.left.grid, step.context.grid.places(step.x)
    if grid.cells is None:
        must(grid.patches == grid.area, f"{grid.patches} patches without cells on a grid of {grid.area}")
        return
    must(tuple(grid.cells.shape) == (trial.batch, grid.patches), f"cells is {tuple(grid.cells.shape)}")
    must(((grid.cells >= 0) & (grid.cells < grid.area)).all(), "a cell lies outside the grid")
    for image in range(trial.batch):
        must(len(grid.cells[image].unique()) == grid.patches, "two tokens have the same cell")
        must(torch.isin(grid.cells[image], before[image]).all(), "a token has a cell that held no token before")


@_rule(EVERY)
@_all
def owners(trial: ReducerTrial, step: Step) -> None:
    """`owners` [B, area] names the token that represents each cell: a token represents its own cell, and cells lose
    their token only if `drops` is true. A grid without owners represents only the cells of its tokens."""
    grid = step.left.grid
    if grid.cells is None:
        return
    found = _owners(grid)
    must(tuple(found.shape) == (trial.batch, grid.area), f"owners is {tuple(found.shape)}, expected [B, {grid.area}]")
    must(((found >= -1) & (found < grid.patches)).all(), f"an owner is not one of the {grid.patches} tokens, or -1")
    own = found.gather(1, grid.cells)
    must((own == torch.arange(grid.patches)).all(), "a token does not own its own cell")
    before = step.context.grid
    represented = torch.ones_like(found, dtype=torch.bool) if before.cells is None else _owners(before) >= 0
    lost = int((represented & (found < 0)).sum())
    must(step.reducer.drops or not lost, f"{lost} cells lost their token, but `drops` is False")
    must(not ((found >= 0) & ~represented).any(), "a cell that had lost its token has one again")


def _owners(grid: Grid) -> Tensor:
    if grid.owners is not None:
        return grid.owners
    assert grid.cells is not None
    none = grid.cells.new_full((len(grid.cells), grid.area), -1)
    return none.scatter(1, grid.cells, torch.arange(grid.patches).expand_as(grid.cells))


@_rule(EVALUATION)
@_all
def sizes(trial: ReducerTrial, step: Step) -> None:
    """If the grid has `sizes` [B, n], each is the number of cells that the token represents, unless `spreads` says
    otherwise; they sum to the number before, or to less if the reducer `drops` patches."""
    grid, before = step.left.grid, step.context.grid
    if grid.sizes is None:
        return
    must(tuple(grid.sizes.shape) == (trial.batch, grid.patches), f"sizes is {tuple(grid.sizes.shape)}")
    total = before.area if before.sizes is None else before.sizes.sum(1)
    found, spreads = grid.sizes.sum(1), step.reducer.spreads
    slack = 1e-5 * total if spreads else 0
    kept = (found <= total + slack).all() & (step.reducer.drops | (found >= total - slack)).all()
    must(kept, f"sizes sum to {found[0]:g}, before to {total if before.sizes is None else total[0]:g}")  # type: ignore[index]
    for image, owners_of in enumerate(_owners(grid)):
        count = torch.bincount(owners_of[owners_of >= 0], minlength=grid.patches)
        must(spreads or (count == grid.sizes[image]).all(), "a token's size is not the number of cells that it owns")


@_rule(EVERY)
@_all
def restores(trial: ReducerTrial, step: Step) -> None:
    """`Grid.restore` puts the tokens back on the whole grid: each cell gets the token that owns it, or zeros."""
    grid, whole = step.left.grid, step.left.grid.restore(step.out)
    expected = (trial.batch, trial.grid.tokens, DIM)
    must(tuple(whole.shape) == expected, f"restored tokens are {tuple(whole.shape)}, expected {expected}")
    if grid.cells is not None:
        patches = whole[:, grid.prefix :].gather(1, grid.cells[..., None].expand(-1, -1, DIM))
        same(patches, step.out[:, grid.prefix :], "restored tokens at their own cells")


# Context and module ---------------------------------------------------------------------------------------------------


@_rule(EVERY)
@_all
def context_unchanged(trial: ReducerTrial, step: Step) -> None:
    """The given context and tokens are not modified, and losses of earlier layers are kept."""
    given, x = step.context.with_loss("before", torch.ones(())), step.x.clone()
    leaves, _ = pytree.tree_flatten(given)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    _, left = step.reducer(x, given)
    must(torch.equal(x, step.x), "the given tokens were written to")
    for copy, leaf in zip(copies, pytree.tree_flatten(given)[0], strict=True):
        unchanged = torch.equal(copy, leaf) if isinstance(leaf, Tensor) else copy == leaf
        must(unchanged, "the given context was changed")
    must(left.losses[: len(given.losses)] == given.losses, "losses of earlier layers were dropped")


@_rule(EVERY)
@_all
def nothing_left_behind(trial: ReducerTrial, step: Step) -> None:
    """A call leaves nothing on the module: no attribute, no cache, and in evaluation no changed buffer."""
    changed = changed_by(lambda: step.reducer(step.x, step.context), step.reducer, trial.training)
    must(not changed, f"a call changed {', '.join(changed)} on the module")


@_rule(EVALUATION)
def reads(trial: ReducerTrial) -> None:
    """What the reducer says it reads matters: another value gives other tokens in some layer."""
    used: dict[str, bool] = {}
    for step in trial.steps:
        for entry in step.reducer.reads:
            other = step.context.replace(**{entry: getattr(step.context, entry).flip(2)})
            used[entry] = used.get(entry, False) or not torch.equal(step.reducer(step.x, other)[0], step.out)
    unused = sorted(entry for entry, matters in used.items() if not matters)
    must(not unused, f"it says it reads {', '.join(unused)}, but does not use it")


# The same result again ------------------------------------------------------------------------------------------------


@_rule(EVALUATION)
def deterministic(trial: ReducerTrial) -> None:
    """The same call gives bit-identical tokens and the same grid."""
    _same_steps(trial.run(), trial.steps, "a second run")


@_rule(EVALUATION)
def images_alone(trial: ReducerTrial) -> None:
    """The tokens of an image do not depend on the other images of its batch."""
    for number, (alone, step) in enumerate(zip(trial.run(images=slice(1, 2)), trial.steps, strict=True)):
        same(alone.out, step.out[1:2], f"an image alone, layer {number}", atol=2e-5, rtol=1e-5)
        if alone.left.grid.cells is not None and step.left.grid.cells is not None:
            same(alone.left.grid.cells, step.left.grid.cells[1:2], f"cells of an image alone, layer {number}")


@_rule(EVALUATION)
def round_trips(trial: ReducerTrial) -> None:
    """The spec builds the reducers again, and their state dicts make those compute the same."""
    text = str(trial.steps[0].reducer.spec)
    again = str(parse_tokens(text))
    must(again == text, f"spec {text!r} came back as {again!r}")
    copies = trial.create()
    for copy, reducer in zip(copies, trial.reducers, strict=True):
        copy.load_state_dict({name: value.clone() for name, value in reducer.state_dict().items()})
    _same_steps(trial.run(reducers=copies), trial.steps, "the copy with its state dict")


def _same_steps(found: list[Step], expected: list[Step], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        same(one.out, other.out, what)
        for name in ("cells", "sizes", "owners"):
            ours, theirs = getattr(one.left.grid, name), getattr(other.left.grid, name)
            must((ours is None) == (theirs is None), f"{what}: {name} is there only once")
            if ours is not None:
                same(ours, theirs, f"{what}, {name}")


# Training, cost and compilation ---------------------------------------------------------------------------------------


@_rule(EVERY)
def gradients(trial: ReducerTrial) -> None:
    """Gradients reach the input, and all gradients are finite."""
    x = trial.x.clone().requires_grad_()
    steps = trial.run(x)
    wanted = {"the input": x} | {
        f"{i}.{name}": value
        for i, reducer in enumerate(trial.reducers)
        for name, value in reducer.named_parameters()
        if value.requires_grad
    }
    last = steps[-1]
    loss = last.out.square().sum() + sum(value for _, value in last.left.losses)
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    must(found[0] is not None and found[0].abs().sum() != 0, "no gradient reaches the input")
    for name, gradient in zip(wanted, found, strict=True):
        must(gradient is None or gradient.isfinite().all(), f"the gradient of {name} is not finite")


@_rule(EVALUATION)
@_all
def macs(trial: ReducerTrial, step: Step) -> None:
    """`macs` is what PyTorch counts for one image."""
    one = slice(0, 1)
    context = pytree.tree_map(lambda leaf: leaf[one] if isinstance(leaf, Tensor) else leaf, step.context)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        step.reducer(step.x[one], context)
    counted, stated = counter.get_total_flops() // 2, step.reducer.macs(step.context.grid).total
    must(stated == counted, f"{stated:,} MACs stated, {counted:,} counted")


@_rule(EVALUATION[:1])
def compiles(trial: ReducerTrial) -> None:
    """`torch.compile` takes the first reducer without a graph break, with the same result."""
    step = trial.steps[0]
    torch._dynamo.reset()  # specs would count as recompilations of one function, which are limited
    compiled = torch.compile(lambda y: step.reducer(y, step.context)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        same(compiled(step.x), step.out, "the compiled reducer", atol=1e-5, rtol=1e-5)
