"""What every registered attention must do, whatever it is: run over all of them and all their example specs."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attendless import Attention, Context, Grid, UserError, attentions, create, load_plugin
from attendless.backbones.block import take_weights

if "ATTENDLESS_PLUGIN" in os.environ:
    load_plugin(os.environ["ATTENDLESS_PLUGIN"])
SPECS = [spec for cls in attentions().values() for spec in (cls.examples or (cls.name,))]
GRIDS = {"square": (6, 6), "non-square": (4, 8), "odd": (7, 5)}
CASES = list(itertools.product(SPECS, GRIDS, (0, 1, 5)))


def build(spec: str, grid: Grid, dim: int = 32, heads: int = 2, **arguments: object) -> Attention:
    """The attention with every weight moved off its neutral start; a refusal must be a sentence, and skips the case."""
    torch.manual_seed(0)
    try:
        module = create(spec, dim, heads, grid=grid, **arguments)
    except UserError as refusal:
        assert len(str(refusal)) > 40, "a refusal says what and why"
        pytest.skip(str(refusal))
    for p in module.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return module


def starting_context(module: Attention, batch: int, grid: Grid) -> Context:
    """A context with whatever the layer before would have left."""
    context = Context(grid)
    if "scores" in module.reads:
        context = context.replace(scores=torch.randn(batch, module.num_heads, grid.tokens, grid.tokens))
    return context


def state(module: torch.nn.Module) -> dict[str, dict[str, object]]:
    """Everything that hangs on the module and its children, by identity."""
    return {name: {k: id(v) for k, v in vars(m).items() if k[0] != "_"} for name, m in module.named_modules()}


@pytest.mark.parametrize(("spec", "shape", "prefix"), CASES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_contract(spec: str, shape: str, prefix: int, mode: str) -> None:
    grid = Grid(*GRIDS[shape], prefix)
    module = build(spec, grid).train(mode == "train")
    x = torch.randn(3, grid.tokens, 32, requires_grad=True)
    context = starting_context(module, 3, grid)
    before = state(module)

    out, after = module(x, context)

    # Shape; the context is a new value or the same one, never a changed one; nothing stays on the module.
    assert out.shape == x.shape
    assert context == starting_context_unchanged(context)
    assert isinstance(after, Context)
    assert state(module) == before

    # Gradients reach the input and are finite; checkpointing gives the very same ones.
    (gradient,) = torch.autograd.grad(out.square().sum(), x, retain_graph=False)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
    again, _ = torch.utils.checkpoint.checkpoint(module, x, context, use_reentrant=False)
    (checkpointed,) = torch.autograd.grad(again.square().sum(), x)
    torch.testing.assert_close(checkpointed, gradient, atol=0, rtol=0)

    # Determinism, and batch independence where the layer has no batch statistics to keep.
    # (Repeated with gradients on: PyTorch's fused kernel is another one, a rounding apart, for a mask that learns.)
    torch.testing.assert_close(module(x, context)[0], out, atol=0, rtol=0)
    with torch.no_grad():
        if mode == "eval" or not any(isinstance(m, torch.nn.BatchNorm2d) for m in module.modules()):
            alone = module(x[1:2], starting_slice(context, 1))[0]
            torch.testing.assert_close(alone, out[1:2].detach(), atol=2e-5, rtol=1e-5)

    # Every name of the spec and every weight survives a round trip.
    assert str(create(str(module.spec), 32, 2, grid=grid).spec) == str(module.spec)
    copy = create(spec, 32, 2, grid=grid).train(mode == "train")
    copy.load_state_dict(module.state_dict())
    torch.testing.assert_close(copy(x, context)[0], out, atol=0, rtol=0)


def starting_context_unchanged(context: Context) -> Context:
    return Context(context.grid, context.wants, context.scores, context.class_attention, context.losses)


def starting_slice(context: Context, index: int) -> Context:
    return context if context.scores is None else context.replace(scores=context.scores[index : index + 1])


@pytest.mark.parametrize("spec", SPECS)
def test_macs_are_what_pytorch_counts(spec: str) -> None:
    grid = Grid(8, 8)
    module = build(spec, grid).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module.refine(*module(torch.randn(1, grid.tokens, 32), starting_context(module, 1, grid)))
    counted = counter.get_total_flops() // 2
    stated = module.macs(grid).total
    if module.executes_more:
        assert stated <= counted, module.executes_more
    else:
        assert stated == counted


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_maps_are_row_stochastic_or_said_not_to_be(spec: str, prefix: int) -> None:
    grid = Grid(4, 5, prefix)
    module = build(spec, grid).eval()
    x = torch.randn(2, grid.tokens, 32)
    with torch.no_grad():
        found = module.map(x, starting_context(module, 2, grid))
        one = module.map(x, starting_context(module, 2, grid), query=3)
    assert found.shape == (2, 2, grid.tokens, grid.tokens)
    assert found.isfinite().all()
    torch.testing.assert_close(one, found[:, :, 3:4])
    if module.rows_sum_to_one:
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, grid.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_compiles_without_a_graph_break(spec: str) -> None:
    grid = Grid(6, 4)
    module = build(spec, grid).eval()
    x, context = torch.randn(2, grid.tokens, 32), starting_context(module, 2, grid)
    torch._dynamo.reset()  # or the specs would count as recompilations of one function, which are limited
    compiled = torch.compile(lambda y: module(y, context)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x, context)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_inputs_do_not_overflow(spec: str) -> None:
    grid = Grid(4, 4)
    module = build(spec, grid).eval()
    x = 30 * torch.randn(1, grid.tokens, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = module(x, starting_context(module, 1, grid))
    assert out.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_shapes_and_reduced_grids_are_answered(spec: str) -> None:
    grid = Grid(4, 4)
    module = build(spec, grid).eval()
    with pytest.raises(UserError, match=r"got tokens of shape \(1, 9, 32\); expected \[batch, 16, 32\]"):
        module(torch.randn(1, 9, 32), Context(grid))
    reduced = Grid(4, 4, cells=torch.arange(9)[None], sizes=torch.ones(1, 9))
    if module.refuses(reduced):
        with pytest.raises(UserError, match="cannot serve grid"):
            module(torch.randn(1, 9, 32), Context(reduced))
    else:
        assert module(torch.randn(1, 9, 32), Context(reduced))[0].isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_takes_timms_weights_by_name(spec: str) -> None:
    grid = Grid(4, 4)
    module = build(spec, grid)
    donor = create("full", 32, 2, grid=grid)
    taken = take_weights(module, donor.state_dict())
    assert {"qkv.weight", "proj.weight"} <= set(taken) or not hasattr(module, "qkv")
    assert torch.equal(module.state_dict()[taken[0]], donor.state_dict()[taken[0]])


def test_full_against_the_textbook() -> None:
    grid = Grid(3, 4, 1, cells=torch.randint(12, (2, 6)), sizes=torch.tensor([[1, 2, 3, 1, 1, 4], [1, 1, 1, 2, 2, 1]]))
    module = build("full", grid)
    q, k, v = torch.randn(3, 2, 2, 7, 16).unbind(0)
    wants = Context(grid, frozenset({"scores", "class_attention"}))
    out, context = module.attend(q, k, v, wants)
    class_row = module.class_row(q, k, grid)
    sizes = torch.cat([torch.ones(2, 1), grid.sizes], 1)
    for b, h, n in itertools.product(range(2), range(2), range(7)):
        weights = torch.stack([sizes[b, m] * torch.exp(q[b, h, n] @ k[b, h, m] / 4) for m in range(7)])
        weights = weights / weights.sum()
        torch.testing.assert_close(out[b, h, n], weights @ v[b, h])
        if n == 0:
            torch.testing.assert_close(class_row[b, h], weights)
    torch.testing.assert_close(context.scores, q @ k.transpose(-1, -2) / 4)


def test_the_context_is_immutable_and_a_pytree() -> None:
    context = Context(Grid(2, 2), scores=torch.ones(1))
    with pytest.raises(AttributeError):
        context.scores = None
    leaves, structure = torch.utils._pytree.tree_flatten(context.with_loss("extra", torch.zeros(1)))
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 2
    assert torch.utils._pytree.tree_unflatten(leaves, structure).losses[0][0] == "extra"
