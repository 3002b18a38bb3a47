"""The interface checks on every registered attention and token reducer, over all of their example specs."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from attendless import (
    Context,
    Grid,
    UserError,
    attentions,
    create,
    load_plugin,
    reducers,
)
from attendless.attention.provided import class_attention
from attendless.check import reducers as reducing
from attendless.check.attention_trial import AttentionTrial
from attendless.check.attentions import CHECKS, others
from attendless.check.trial import Place, attempt
from attendless.sparse import dispatch, policy
from native_cases import needs_kernels

if "ATTENDLESS_PLUGIN" in os.environ:
    load_plugin(os.environ["ATTENDLESS_PLUGIN"])
SPECS = [spec for cls in attentions().values() for spec in (cls.examples or (cls.name,))]
#: The default backend (policy `off`), and each of the others that policy `auto` may choose.
BACKENDS = [(spec, backend) for spec in SPECS for backend in ("", *others(spec))]


@pytest.mark.parametrize(("spec", "backend"), BACKENDS)
@pytest.mark.parametrize("name", CHECKS)
def test_attention_interface(name: str, spec: str, backend: str) -> None:
    check = CHECKS[name]
    verdict = attempt(check, spec, backend)
    assert verdict.result != "failed", f"{check.rule} {verdict.note}"
    if verdict.result == "refused":
        pytest.skip(verdict.note)


@pytest.mark.parametrize("spec", [spec for cls in reducers().values() for spec in (cls.examples or (cls.name,))])
@pytest.mark.parametrize("name", reducing.CHECKS)
def test_reducer_interface(name: str, spec: str) -> None:
    check = reducing.CHECKS[name]
    verdict = attempt(check, spec)
    assert verdict.result == "passed", f"{check.rule} {verdict.note}"
    assert not verdict.note, "ours serve every grid, several frames included"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", attentions())
def test_an_empty_batch_is_answered_with_nothing(name: str, training: bool) -> None:
    """The last part of a shard may hold no image; timm's models take it too."""
    trial = AttentionTrial(name, Place(Grid(14, 14, 1), training), batch=0)
    if trial.module.refuses(trial.grid):
        pytest.skip(trial.module.refuses(trial.grid))
    out, _ = trial.module(trial.x.requires_grad_(), trial.context)
    assert out.shape == (0, 197, 32)
    out.sum().backward()


@needs_kernels
def test_the_backend_named_is_the_one_that_computes() -> None:
    trial = AttentionTrial("foveal", Place(Grid(6, 6, 1)))
    names = [one.name for one in trial.backends()]
    assert names == ["native", "torch"]
    before = dict(os.environ), policy()
    for name in names:
        with trial.computed_by(name):
            assert policy() == "auto"
            assert dispatch.choose(trial.module.case(trial.grid, trial.batch)).backend == name
    with trial.computed_by(""):
        assert policy() == "off"
    assert (dict(os.environ), policy()) == before
    assert set(dict(BACKENDS[::-1])) == set(SPECS)
    assert ("foveal", "torch") in BACKENDS


def test_full_against_the_textbook() -> None:
    grid = Grid(3, 4, 1, cells=torch.randint(12, (2, 6)), sizes=torch.tensor([[1, 2, 3, 1, 1, 4], [1, 1, 1, 2, 2, 1]]))
    module = create("full", 32, 2, grid=grid)
    q, k, v = torch.randn(3, 2, 2, 7, 16).unbind(0)
    wants = Context(grid, frozenset({"scores", "class_attention"}))
    out, context = module.attend(q, k, v, wants)
    class_row = class_attention(q, k, grid, scale=module.scale)
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


@pytest.mark.parametrize("spec", [spec for cls in attentions().values() for spec in (cls.examples or (cls.name,))])
def test_the_core_alone_is_the_layer_without_its_projections(spec: str) -> None:
    grid = Grid(6, 6, 1)
    torch.manual_seed(0)
    layer = create(spec, 24, 3, grid=grid).eval()
    if not layer.has_core():
        with pytest.raises(UserError, match="does not go without projections"):
            create(spec, 24, 3, grid=grid, projections=False)
        return
    core = create(spec, 24, 3, grid=grid, projections=False).eval()
    core.load_state_dict({name: value for name, value in layer.state_dict().items() if name in core.state_dict()})
    assert not any(name.startswith(("qkv", "proj")) for name in core.state_dict())
    x = torch.randn(2, grid.tokens, 24)
    out, _ = core.attend(*layer.project(x), Context(grid))
    torch.testing.assert_close(layer.merge(out), layer(x, Context(grid))[0], rtol=0, atol=0)
