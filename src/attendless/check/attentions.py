"""What every attention must do, whatever it is: the contract as checks that run on anyone's attention.

    for verdict in check("neighbours:radius=1"):
        print(verdict.check, verdict.result, verdict.note)

A check is a function of a `Trial` that raises when the rule in its docstring does not hold. The test suite runs the
same checks on every attention that comes with attendless, `attendless check` on whichever it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ..attention import (
    Attention,
    Context,
    Grid,
    create,
    parse,
)
from ..attention.fitting import fitted
from ..attention.scores import score_shape
from ..attention.values import ENTRIES
from ..backbones.block import take_weights
from ..errors import UserError
from ..sparse.calibration import survives
from .trial import (
    DIM,
    EVALUATION,
    EVERY,
    FEW,
    HEADS,
    Check,
    Place,
    Trial,
    Verdict,
    attempt,
    left_before,
    must,
    same,
)

CHECKS: dict[str, Check] = {}
_WITH_PREFIX = tuple(place for place in EVERY if place.grid.prefix and not place.training)
_COUNTED = tuple(Place(Grid(*sides)) for sides in ((8, 8, 0), (6, 4, 0), (8, 8, 1), (5, 7, 5)))
#: What an `nn.Module` keeps on itself.
_OWN = frozenset(vars(nn.Module()))


def check(spec: str) -> Iterator[Verdict]:
    """Run the contract on an attention: a verdict for every check, as soon as it is known.

    Where the attention is made of one of the `sparse` operations, all is tried by each backend that can compute it.
    """
    parse(spec)
    for rule, backend in plan(spec):
        yield attempt(rule, spec, backend)


def plan(spec: str) -> list[tuple[Check, str]]:
    """The checks to be run, and by which backend; empty for the usual one."""
    return [(rule, backend) for backend in ("", *others(spec)) for rule in CHECKS.values()]


def others(spec: str) -> list[str]:
    """The backends that can compute an attention, but for the usual one."""
    for place in FEW:
        try:
            return [one.name for one in Trial(spec, place).backends()[1:]]
        except Exception:  # a check will say what is wrong
            continue
    return []


def _rule(places: tuple[Place, ...], **more: bool) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Decorator: one more check, under its function's name, its docstring the rule."""

    def note(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = function.__name__.replace("_", " ")
        CHECKS[name] = Check(name, " ".join((function.__doc__ or "").split()), places, function, **more)
        return function

    return note


# What goes in and what comes out --------------------------------------------------------------------------------------


@_rule(EVERY, serve=True)
def shapes(trial: Trial) -> None:
    """Tokens come out as they went in, on square, non-square and odd grids, with 0, 1 and 5 prefix tokens; at least
    one of these grids is served."""
    out, context = trial.module(trial.x, trial.context)
    must(out.shape == trial.x.shape, f"tokens {tuple(trial.x.shape)} became {tuple(out.shape)}")
    must(out.isfinite().all(), "the output is not finite")
    must(isinstance(context, Context), f"forward returned {type(context).__name__} where a Context was expected")


@_rule(EVERY)
def context_unchanged(trial: Trial) -> None:
    """The context that is given is left as it is; the one returned has the same grid and every loss noted before."""
    given = trial.left.with_loss("before", torch.ones(()))
    leaves, structure = pytree.tree_flatten(given)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    _, context = trial.module(trial.x, given)
    after, same_structure = pytree.tree_flatten(given)
    whole = same_structure == structure and all(a is b for a, b in zip(after, leaves, strict=True))
    must(whole, "the context given was changed: entries were exchanged")
    for copy, leaf in zip(copies, leaves, strict=True):
        unchanged = torch.equal(copy, leaf) if isinstance(leaf, Tensor) else copy == leaf
        must(unchanged, "the context given was changed: a tensor in it was written to")
    must(context.grid == given.grid, f"grid {given.grid} became {context.grid}")
    must(context.losses[:1] == given.losses, "losses that earlier layers noted were dropped")


@_rule(EVERY)
def nothing_left_behind(trial: Trial) -> None:
    """A call leaves nothing on the module: no attribute, no cache, and in evaluation no changed buffer."""
    before = _everything_on(trial.module, trial.training)
    trial.module(trial.x, trial.context)
    after = _everything_on(trial.module, trial.training)
    changed = sorted(name for name in before.keys() | after.keys() if not _alike(before.get(name), after.get(name)))
    must(not changed, f"a call changed {', '.join(changed)} on the module")


def _everything_on(module: nn.Module, training: bool) -> dict[str, list[Any]]:
    """Whatever hangs on a module and its children; of tensors also how often they were written to."""
    found: dict[str, list[Any]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
                found[f"{path}.{name}"] = [value, *(inside if isinstance(inside, list | tuple | set) else ())]
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            found[f"{path}.{name}"] = [tensor, 0 if training else tensor._version]
    return found


def _alike(before: list[Any] | None, after: list[Any] | None) -> bool:
    if before is None or after is None or len(before) != len(after):
        return False
    return all(a is b or (isinstance(a, int) and a == b) for a, b in zip(before, after, strict=True))


@_rule(EVALUATION, once=True)
def wrong_shapes(trial: Trial) -> None:
    """Tokens that are not the grid's are answered with a UserError that says what was given and expected."""
    tokens = trial.grid.tokens
    try:
        trial.module(trial.x[:1, :-1], trial.context)
    except UserError as error:
        told = f"(1, {tokens - 1}, {DIM})" in str(error) and f"{tokens}, {DIM}" in str(error)
        must(told, f"the error does not say what was given and what was expected: {error}")
    else:
        must(False, f"{tokens - 1} tokens were taken where the grid has {tokens}")


@_rule(FEW, once=True)
def reduced_grids(trial: Trial) -> None:
    """A grid from which tokens were dropped or merged is served, or refused with a UserError."""
    cells = trial.grid.patches // 2
    left = torch.arange(cells)[None], torch.full((1, cells), 2.0)
    reduced = Grid(trial.grid.height, trial.grid.width, trial.grid.prefix, *left)
    context = left_before(1, reduced).only(trial.module.reads)
    refusal = trial.module.refuses(reduced)
    try:
        out, _ = trial.module.eval()(trial.x[:1, : reduced.tokens], context)
    except UserError as error:
        must(refusal, f"refuses() says nothing against it, yet the call was refused: {error}")
    else:
        must(not refusal, f"refuses() says {refusal!r}, yet the call was served")
        must(out.isfinite().all(), "the output is not finite")


# Training -------------------------------------------------------------------------------------------------------------


def _gradients(trial: Trial, checkpointing: bool = False) -> dict[str, Tensor]:
    x = trial.x.clone().requires_grad_()
    if checkpointing:
        out, _ = checkpoint(trial.module, x, trial.context, use_reentrant=False)
    else:
        out, _ = trial.module(x, trial.context)
    wanted = {"the input": x} | {n: p for n, p in trial.module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(out.square().sum(), list(wanted.values()), allow_unused=True)
    return {name: value for name, value in zip(wanted, found, strict=True) if value is not None}


@_rule(FEW)
def gradients(trial: Trial) -> None:
    """Gradients reach the input, and all that there are are finite."""
    found = _gradients(trial)
    must("the input" in found and found["the input"].abs().sum() != 0, "no gradient reaches the input")
    for name, gradient in found.items():
        must(gradient.isfinite().all(), f"the gradient of {name} is not finite")


@_rule(FEW)
def checkpointing(trial: Trial) -> None:
    """Gradient checkpointing gives the very same gradients."""
    plain, again = _gradients(trial), _gradients(trial, checkpointing=True)
    for name, gradient in plain.items():
        same(again[name], gradient, f"the gradient of {name} with checkpointing")


# The same again -------------------------------------------------------------------------------------------------------


@_rule(FEW)
def deterministic(trial: Trial) -> None:
    """The same call gives the very same output."""
    # With gradients on, both times: PyTorch's fused kernel is another one, a rounding apart, for a mask that learns.
    same(trial.module(trial.x, trial.context)[0], trial.module(trial.x, trial.context)[0], "a second call")


@_rule(FEW)
def images_alone(trial: Trial) -> None:
    """An image's output does not depend on the others in its batch, but for batch norms in training."""
    if trial.training and any(isinstance(part, _BatchNorm) for part in trial.module.modules()):
        return
    with torch.no_grad():
        whole = trial.module(trial.x, trial.context)[0]
        same(trial.module(*trial.image(1))[0], whole[1:2], "an image alone", atol=2e-5, rtol=1e-5)


@_rule(FEW)
def round_trips(trial: Trial) -> None:
    """Its spec builds it again, and its state dict makes that one compute the very same."""
    text = str(trial.module.spec)
    again = str(create(text, DIM, HEADS, grid=trial.grid).spec)
    must(again == text, f"spec {text!r} came back as {again!r}")
    copy = trial.create().train(trial.training)
    copy.load_state_dict({name: value.clone() for name, value in trial.module.state_dict().items()})
    same(copy(trial.x, trial.context)[0], trial.module(trial.x, trial.context)[0], "the copy with its state dict")


@_rule(FEW, once=True)
def weights_by_name(trial: Trial) -> None:
    """Weights of timm's attention are taken by their names."""
    donor = create("full", DIM, HEADS, grid=trial.grid).state_dict()
    taken = take_weights(trial.module, donor)
    if hasattr(trial.module, "qkv"):
        must(
            {"qkv.weight", "proj.weight"} <= set(taken), "qkv.weight and proj.weight are not of full attention's shape"
        )
    must(taken, "none of full attention's weights finds its place")
    for name in taken:
        same(trial.module.state_dict()[name], fitted(trial.module, donor)[name], name)


# What it says of itself -----------------------------------------------------------------------------------------------


@_rule(_COUNTED)
def macs(trial: Trial) -> None:
    """`macs` is what PyTorch counts, also for what is left in the context; less only if `executes_more` says why."""
    module, grid = trial.module, trial.grid
    asked = [frozenset[str](), *([module.provides & ENTRIES.keys()] if grid.prefix and module.provides else [])]
    for wants in asked:
        x, context = trial.image(0)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module.refine(*module(x, context.replace(wants=wants)))
        counted, stated = counter.get_total_flops() // 2, module.macs(grid, wants).total
        leaving = f" leaving {', '.join(sorted(wants))}" if wants else ""
        fits = stated <= counted if module.executes_more else stated == counted
        must(fits, f"{stated:,} MACs stated, {counted:,} counted{leaving}")


@_rule(EVALUATION[:2])
def maps(trial: Trial) -> None:
    """Maps are [B, H, N, N] and finite, their rows sum to one unless `rows_sum_to_one` is false, and the map of a
    single query is its row."""
    tokens = trial.grid.tokens
    with torch.no_grad():
        found = trial.module.map(trial.x, trial.context)
        one = trial.module.map(trial.x, trial.context, query=3)
    expected = (trial.batch, HEADS, tokens, tokens)
    must(found.shape == expected, f"the map is {tuple(found.shape)}, expected {expected}")
    must(found.isfinite().all(), "the map is not finite")
    same(one, found[:, :, 3:4], "the map of a single query", atol=1e-5, rtol=1e-4)
    if trial.module.rows_sum_to_one:
        same(found.sum(-1), torch.ones(expected[:3]), "sums of the map's rows, which should be one", atol=1e-4)


@_rule(_WITH_PREFIX)
def provides(trial: Trial) -> None:
    """What it says it provides it leaves when asked, of the right shape, and computes the same as unasked; the class
    token's attention is the first row of its map, and prefix tokens get the same output when computed alone."""
    module, tokens = trial.module, trial.grid.tokens
    _known(module, "provides")
    shape: dict[str, tuple[int, ...]] = {
        "scores": score_shape(module, trial.batch, trial.grid),
        "class_attention": (trial.batch, HEADS, tokens),
        "keys": (trial.batch, HEADS, tokens, module.head_dim),
    }
    with torch.no_grad():
        plain = module(trial.x, trial.context)[0]
        for entry in sorted(module.provides):
            out, context = module(trial.x, trial.context.replace(wants=frozenset({entry})))
            left = getattr(context, entry)
            must(left is not None, f"it was asked for {entry}, but left none")
            must(left.shape == shape[entry], f"{entry} is {tuple(left.shape)}, expected {shape[entry]}")
            must(left.isfinite().all(), f"{entry} is not finite")
            same(out, plain, f"the output when asked for {entry}", atol=1e-5, rtol=1e-4)
            if entry == "class_attention":
                row = module.map(trial.x, trial.context, query=0)[:, :, 0]
                same(left, row, "class_attention against the first row of the map", atol=1e-5, rtol=1e-4)
        if module.prefix_is_full:
            rows, prefix = module(trial.x, trial.context, prefix_rows=True)[0], trial.grid.prefix
            same(rows, plain[:, :prefix], "the prefix tokens' output when computed alone", atol=1e-5, rtol=1e-4)


@_rule(_WITH_PREFIX)
def reads(trial: Trial) -> None:
    """What it says it reads a full layer before it can leave, and it matters: another one gives another output."""
    module = trial.module
    _known(module, "reads")
    before = create("full", DIM, HEADS, grid=trial.grid).eval()
    with torch.no_grad():
        _, context = before(trial.x, Context(trial.grid, module.reads))
        context = context.only(module.reads).replace(wants=frozenset())
        out, _ = module(trial.x, context)
        must(out.isfinite().all(), "the output after a full layer is not finite")
        for entry in sorted(module.reads):
            other = context.replace(**{entry: getattr(context, entry).flip(-1)})
            must(not torch.equal(module(trial.x, other)[0], out), f"it says it reads {entry}, but does not use it")


def _known(module: Attention, attribute: str) -> None:
    unknown = sorted(getattr(module, attribute) - ENTRIES.keys())
    must(not unknown, f"{attribute} names {', '.join(unknown)}: there are only {', '.join(ENTRIES)}")


@_rule(FEW)
def backends_agree(trial: Trial) -> None:
    """Whoever computes it, it computes what the usual backend does, gradients too."""
    with trial.computed_by(""):
        expected, slopes = trial.module(trial.x, trial.context)[0], _gradients(trial)
    out, found = trial.module(trial.x, trial.context)[0], _gradients(trial)
    same(out, expected, "against what the usual backend computes", atol=1e-4, rtol=1e-4)
    same(found["the input"], slopes["the input"], "the gradient of the input", atol=1e-3, rtol=1e-3)


# Where it runs --------------------------------------------------------------------------------------------------------


@_rule(EVALUATION[2:], once=True)
def compiles(trial: Trial) -> None:
    """`torch.compile` takes it whole, without a graph break, and it computes the same."""
    module, context = trial.module, trial.context
    torch._dynamo.reset()  # or the specs would count as recompilations of one function, which are limited
    compiled = torch.compile(lambda y: module(y, context)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        same(compiled(trial.x), module(trial.x, context)[0], "the compiled layer", atol=1e-5, rtol=1e-5)


@_rule(EVALUATION[2:], once=True)
def half_precision(trial: Trial) -> None:
    """Under autocast to bfloat16 large tokens do not overflow (not tried on a CPU that dies of such products)."""
    if not survives(torch.bfloat16):
        return
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = trial.module(30 * trial.x, trial.context)
    must(out.isfinite().all(), "the output is not finite")
