"""The interface checks of attentions."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ..attention import Attention, Context, Grid, create
from ..attention.fitting import fitted
from ..attention.scores import score_shape
from ..attention.values import ENTRIES
from ..backbones.block import take_weights
from ..errors import UserError
from ..sparse.calibration import survives
from .attention_trial import EVALUATION, EVERY, FEW, FRAMES, AttentionTrial, left_before
from .trial import DIM, HEADS, Check, Place, changed_by, must, rule, same

CHECKS: dict[str, Check] = {}
_rule = partial(rule, CHECKS, AttentionTrial)
_WITH_PREFIX = tuple(place for place in EVERY if place.grid.prefix and not place.training)
_COUNTED = (*(Place(Grid(*sides)) for sides in ((8, 8, 0), (6, 4, 0), (8, 8, 1), (5, 7, 5))), FRAMES[0])
_MAPPED = (*EVALUATION[:2], Place(Grid(7, 5, 1)), FRAMES[0])


def others(spec: str) -> list[str]:
    """The backends that can compute an attention, apart from the default one."""
    for place in FEW:
        try:
            return [one.name for one in AttentionTrial(spec, place).backends()[1:]]
        except Exception:  # a check reports what is wrong
            continue
    return []


# Inputs and outputs ---------------------------------------------------------------------------------------------------


@_rule(EVERY, fewer=FEW, serve=True)
def shapes(trial: AttentionTrial) -> None:
    """The output has the shape of the input on square, non-square and odd grids, with 0, 1 and 5 prefix tokens, and on
    several frames; the attention serves at least one of these grids."""
    out, context = trial.module(trial.x, trial.context)
    must(out.shape == trial.x.shape, f"tokens {tuple(trial.x.shape)} became {tuple(out.shape)}")
    must(out.isfinite().all(), "the output is not finite")
    must(isinstance(context, Context), f"forward returned {type(context).__name__} where a Context was expected")


@_rule(EVERY, fewer=FEW)
def context_unchanged(trial: AttentionTrial) -> None:
    """The given context is not modified; the returned one has the same grid and every loss of earlier layers."""
    given = trial.left.with_loss("before", torch.ones(()))
    leaves, structure = pytree.tree_flatten(given)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    _, context = trial.module(trial.x, given)
    after, same_structure = pytree.tree_flatten(given)
    whole = same_structure == structure and all(a is b for a, b in zip(after, leaves, strict=True))
    must(whole, "the given context was changed: entries were exchanged")
    for copy, leaf in zip(copies, leaves, strict=True):
        unchanged = torch.equal(copy, leaf) if isinstance(leaf, Tensor) else copy == leaf
        must(unchanged, "the given context was changed: a tensor in it was written to")
    must(context.grid == given.grid, f"grid {given.grid} became {context.grid}")
    must(context.losses[:1] == given.losses, "losses of earlier layers were dropped")


@_rule(EVERY, fewer=FEW)
def nothing_left_behind(trial: AttentionTrial) -> None:
    """A call leaves nothing on the module: no attribute, no cache, and in evaluation no changed buffer."""
    changed = changed_by(lambda: trial.module(trial.x, trial.context), trial.module, trial.training)
    must(not changed, f"a call changed {', '.join(changed)} on the module")


@_rule(EVALUATION, once=True)
def wrong_shapes(trial: AttentionTrial) -> None:
    """Tokens that do not fit the grid raise a UserError with the given and the expected shape."""
    tokens = trial.grid.tokens
    try:
        trial.module(trial.x[:1, :-1], trial.context)
    except UserError as error:
        told = f"(1, {tokens - 1}, {DIM})" in str(error) and f"{tokens}, {DIM}" in str(error)
        must(told, f"the error does not name the given and the expected shape: {error}")
    else:
        must(False, f"{tokens - 1} tokens were accepted where the grid has {tokens}")


@_rule(FEW)
def reduced_grids(trial: AttentionTrial) -> None:
    """A grid from which tokens were dropped or merged is served, or refused with a UserError as `refuses` says."""
    cells = trial.grid.patches // 2
    left = torch.arange(cells)[None], torch.full((1, cells), 2.0)
    reduced = dataclasses.replace(trial.grid, cells=left[0], sizes=left[1])
    context = left_before(1, reduced).only(trial.module.reads)
    refusal = trial.module.refuses(reduced)
    try:
        out, _ = trial.module.eval()(trial.x[:1, : reduced.tokens], context)
    except UserError as error:
        must(refusal, f"refuses() returns None, but the call was refused: {error}")
    else:
        must(not refusal, f"refuses() returns {refusal!r}, but the call was served")
        must(out.isfinite().all(), "the output is not finite")


# Training -------------------------------------------------------------------------------------------------------------


def _gradients(trial: AttentionTrial, checkpointing: bool = False) -> dict[str, Tensor]:
    x = trial.x.clone().requires_grad_()
    if checkpointing:
        out, _ = checkpoint(trial.module, x, trial.context, use_reentrant=False)
    else:
        out, _ = trial.module(x, trial.context)
    wanted = {"the input": x} | {n: p for n, p in trial.module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(out.square().sum(), list(wanted.values()), allow_unused=True)
    return {name: value for name, value in zip(wanted, found, strict=True) if value is not None}


@_rule(FEW)
def gradients(trial: AttentionTrial) -> None:
    """Gradients reach the input, and all gradients are finite."""
    found = _gradients(trial)
    must("the input" in found and found["the input"].abs().sum() != 0, "no gradient reaches the input")
    for name, gradient in found.items():
        must(gradient.isfinite().all(), f"the gradient of {name} is not finite")


@_rule(FEW)
def checkpointing(trial: AttentionTrial) -> None:
    """Gradient checkpointing gives bit-identical gradients."""
    plain, again = _gradients(trial), _gradients(trial, checkpointing=True)
    for name, gradient in plain.items():
        same(again[name], gradient, f"the gradient of {name} with checkpointing")


# The same result again ------------------------------------------------------------------------------------------------


@_rule(FEW)
def deterministic(trial: AttentionTrial) -> None:
    """The same call gives a bit-identical output."""
    # Gradients are enabled in both calls: for a mask that requires a gradient PyTorch uses another fused kernel.
    same(trial.module(trial.x, trial.context)[0], trial.module(trial.x, trial.context)[0], "a second call")


@_rule(FEW)
def images_alone(trial: AttentionTrial) -> None:
    """The output of an image does not depend on the other images of its batch, except for batch norms in training."""
    if trial.training and any(isinstance(part, _BatchNorm) for part in trial.module.modules()):
        return
    with torch.no_grad():
        whole = trial.module(trial.x, trial.context)[0]
        same(trial.module(*trial.image(1))[0], whole[1:2], "an image alone", atol=2e-5, rtol=1e-5)


@_rule(FEW)
def round_trips(trial: AttentionTrial) -> None:
    """The spec builds the attention again, and its state dict makes the copy compute the same."""
    text = str(trial.module.spec)
    again = str(create(text, DIM, HEADS, grid=trial.grid).spec)
    must(again == text, f"spec {text!r} came back as {again!r}")
    copy = trial.create().train(trial.training)
    copy.load_state_dict({name: value.clone() for name, value in trial.module.state_dict().items()})
    same(copy(trial.x, trial.context)[0], trial.module(trial.x, trial.context)[0], "the copy with its state dict")


@_rule(FEW, once=True)
def weights_by_name(trial: AttentionTrial) -> None:
    """Weights of timm's attention are loaded by their names."""
    donor = create("full", DIM, HEADS, grid=trial.grid).state_dict()
    taken = take_weights(trial.module, donor)
    if hasattr(trial.module, "qkv"):
        must(
            {"qkv.weight", "proj.weight"} <= set(taken), "qkv.weight and proj.weight are not of full attention's shape"
        )
    must(taken, "none of full attention's weights can be loaded")
    for name in taken:
        same(trial.module.state_dict()[name], fitted(trial.module, donor)[name], name)


# Cost, maps and context entries ---------------------------------------------------------------------------------------


@_rule(_COUNTED)
def macs(trial: AttentionTrial) -> None:
    """`macs` is what PyTorch counts, context entries included; it may be less only if `executes_more` says why."""
    module, grid = trial.module, trial.grid
    asked = [frozenset[str](), *([module.provides & ENTRIES.keys()] if grid.prefix and module.provides else [])]
    for wants in asked:
        x, context = trial.image(0)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module.refine(*module(x, context.replace(wants=wants)))
        counted, stated = counter.get_total_flops() // 2, module.macs(grid, wants).total
        leaving = f" leaving {', '.join(sorted(wants))}" if wants else ""
        fits = stated <= counted if module.executes_more else stated == counted
        unseen = "; PyTorch counts products of matrices alone: write sums of element-wise products with @ or einsum"
        less = unseen if counted < stated else ""
        must(fits, f"{stated:,} MACs stated, {counted:,} counted{leaving}{less}")


@_rule(_MAPPED)
def maps(trial: AttentionTrial) -> None:
    """Maps are [B, H, N, N] and finite, their rows sum to one unless `rows_sum_to_one` is false, and the map of a
    single query is its row of the whole map."""
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
def provides(trial: AttentionTrial) -> None:
    """Each entry in `provides` is left in the context when requested, with the right shape and without changing the
    output; the class token's attention is the first row of the map, and prefix tokens get the same output when
    computed alone."""
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
            must(left is not None, f"it must provide {entry}, but did not")
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
def reads(trial: AttentionTrial) -> None:
    """A full layer can provide each entry in `reads`, and the entry matters: another value gives another output."""
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
def backends_agree(trial: AttentionTrial) -> None:
    """Every backend computes what the default backend computes, gradients included."""
    with trial.computed_by(""):
        expected, slopes = trial.module(trial.x, trial.context)[0], _gradients(trial)
    out, found = trial.module(trial.x, trial.context)[0], _gradients(trial)
    same(out, expected, "against what the default backend computes", atol=1e-4, rtol=1e-4)
    same(found["the input"], slopes["the input"], "the gradient of the input", atol=1e-3, rtol=1e-3)


# Compilation and precision --------------------------------------------------------------------------------------------


@_rule(EVALUATION[2:], once=True)
def compiles(trial: AttentionTrial) -> None:
    """`torch.compile` compiles the layer without a graph break, with the same result."""
    module, context = trial.module, trial.context
    torch._dynamo.reset()  # specs would count as recompilations of one function, which are limited
    compiled = torch.compile(lambda y: module(y, context)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        same(compiled(trial.x), module(trial.x, context)[0], "the compiled layer", atol=1e-5, rtol=1e-5)


@_rule(EVALUATION[2:], once=True)
def half_precision(trial: AttentionTrial) -> None:
    """Large tokens do not overflow under autocast to bfloat16 (skipped on CPUs that crash in bf16 products)."""
    if not survives(torch.bfloat16):
        return
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = trial.module(30 * trial.x, trial.context)
    must(out.isfinite().all(), "the output is not finite")
