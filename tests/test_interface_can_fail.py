"""Every interface check fails for an attention that breaks its rule, and names the reason."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from attendless import (
    Attention,
    Context,
    UserError,
    plugins,
    register,
)
from attendless.attention import registry
from attendless.attention.full import Full
from attendless.check.attentions import CHECKS, others
from attendless.check.run import check
from attendless.check.trial import attempt
from attendless.sparse import backend as backend


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here is forgotten afterwards."""
    monkeypatch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_sources", {})


class Plain(Full):
    """Full attention without anything of its own; what is broken in it is said below."""

    provides = frozenset()


def broken(**changes: object) -> None:
    register(type("Broken", (Plain,), {"name": "broken", **changes}))


def attends(change):
    """An `attend` that computes full attention and then does something wrong."""

    def attend(self, q, k, v, context):
        return change(self, *Plain.attend(self, q, k, v, context))

    return attend


def writes(self, out, context):
    if context.scores is not None:
        context.scores.mul_(2)
    return out, context


def exchanges(self, out, context):
    object.__setattr__(context, "scores", None)
    return out, context


def keeps(self, out, context):
    self.last = out
    return out, context


def caches(self, out, context):
    self.cache[len(self.cache)] = 1
    return out, context


def counts(self, out, context):
    self.calls += 1
    return out, context


def drops_the_losses(self, out, context):
    return out, Context(context.grid)


class Nans(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(())


def with_cache(self, factory):
    self.cache = {}


def with_count(self, factory):
    self.register_buffer("calls", torch.zeros(()))


def with_secret(self, factory):
    self.secret = float(torch.rand(()))  # a weight the state dict does not know


def renamed(self, factory):
    self.out, self.inner = self.proj, self.qkv
    del self.proj, self.qkv


def of_its_own_shape(self, factory):
    self.qkv = nn.Linear(self.dim, 3 * self.attn_dim + 1)


#: The check that must notice, what it must say, and the attention that breaks its rule.
BROKEN = [
    ("shapes", r"became \(3, 36, 1\)", {"merge": lambda self, out: out.mean((1, 3))[..., None]}),
    ("shapes", "tuple where a Context was expected", {"forward": lambda self, x, context: (x, (context,))}),
    ("shapes", "refuses every grid", {"refuses": lambda self, grid: "it is not in the mood for any grid at all"}),
    ("shapes", "without saying what and why", {"check": lambda self, grid: (_ for _ in ()).throw(UserError("no"))}),
    ("shapes", "cannot be built for grid 6x6 in training: KeyError", {"setup": lambda self, factory: factory["none"]}),
    ("context unchanged", "written to", {"attend": attends(writes)}),
    ("context unchanged", "exchanged", {"attend": attends(exchanges)}),
    ("context unchanged", "losses", {"attend": attends(drops_the_losses)}),
    ("nothing left behind", r"changed \.last on", {"attend": attends(keeps)}),
    ("nothing left behind", r"changed \.cache on", {"setup": with_cache, "attend": attends(caches)}),
    ("nothing left behind", r"changed \.calls on", {"setup": with_count, "attend": attends(counts)}),
    ("wrong shapes", "19 tokens were accepted", {"accept": lambda self, x, grid: None}),
    ("wrong shapes", "RuntimeError", {"accept": lambda self, x, grid: torch.ones(2) + torch.ones(3)}),
    ("reduced grids", "but the call was served", {"refuses": lambda self, grid: "no" * grid.reduced, "check": id}),
    ("gradients", "gradient of the input is not finite", {"attend": attends(lambda s, out, c: (Nans.apply(out), c))}),
    ("gradients", "no gradient reaches the input", {"attend": attends(lambda s, out, c: (out * 0, c))}),
    ("checkpointing", "with checkpointing: off by", {"attend": attends(lambda s, out, c: (Random.apply(out), c))}),
    ("deterministic", "off by", {"attend": attends(lambda s, out, c: (out + torch.rand(()), c))}),
    ("images alone", "off by", {"attend": attends(lambda s, out, c: (out - out.mean(0), c))}),
    ("round trips", "off by", {"setup": with_secret, "attend": attends(lambda s, out, c: (out + s.secret, c))}),
    ("weights by name", "are not of full attention's shape", {"setup": of_its_own_shape}),
    ("weights by name", "none of full attention's weights", {"setup": renamed}),
    ("macs", "stated", {"core_macs": lambda self, grid: 1}),
    ("macs", "stated", {"core_macs": lambda self, grid: 10**9, "executes_more": "so it says"}),
    ("macs", "leaving scores", {"provides": frozenset({"scores"}), "leaving_macs": lambda s, grid, wants: len(wants)}),
    ("maps", "rows, which should be one", {"attend": attends(lambda s, out, c: (2 * out, c)), "map": Attention.map}),
    ("maps", "the map is", {"map": lambda self, x, context, query=None: torch.ones(1)}),
    ("maps", "single query", {"map": lambda self, x, c, query=slice(0): Full.map(self, x, c, slice(query == 3, None))}),
    ("provides", "must provide scores, but did not", {"provides": frozenset({"scores"}), "attend": attends(
        lambda s, out, context: (out, context.replace(scores=None)))}),
    ("provides", "scores is", {"provides": frozenset({"scores"}), "attend": attends(
        lambda s, out, context: (out, context.replace(scores=torch.ones(3))))}),
    ("provides", "against the first row", {"provides": frozenset({"class_attention"}),
        "attend": lambda self, q, k, v, context: Plain.attend(self, 3 * q, k, v, context), "map": Attention.map}),
    ("provides", "names secrets: there are only scores", {"provides": frozenset({"secrets"})}),
    ("reads", "does not use it", {"reads": frozenset({"scores"})}),
    ("reads", "names secrets", {"reads": frozenset({"secrets"})}),
    ("compiles", "Unsupported", {"attend": attends(lambda s, out, c: (out * float(out.sum() > 0 or 1), c))}),
    ("half precision", "not finite", {"attend": attends(lambda s, out, c: (out * out.new_tensor(1e38) * 1e38, c))}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "says", "changes"), BROKEN)
def test_a_broken_attention_fails(name: str, says: str, changes: dict) -> None:
    broken(**changes)
    verdict = attempt(CHECKS[name], "broken")
    assert verdict.result == "failed"
    assert re.search(says, verdict.note), verdict.note


def test_every_check_is_shown_to_fail() -> None:
    assert {name for name, *_ in BROKEN} | {"backends agree"} == set(CHECKS)


def test_an_backend_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_BACKENDS", {op: dict(known) for op, known in backend._BACKENDS.items()})
    plain = backend.backend("foveal", "torch")

    @backend.register_backend
    class Wrong(type(plain)):
        name, standing = "wrong", -1

        def run(self, case, *tensors, **more):
            return 1.1 * super().run(case, *tensors, **more)

    assert others("foveal")[-1] == "wrong"
    assert attempt(CHECKS["backends agree"], "foveal").result == "passed"
    verdict = attempt(CHECKS["backends agree"], "foveal", "wrong")
    assert verdict.result == "failed"
    assert "what the default backend computes: off by" in verdict.note


def test_a_sound_attention_passes_and_a_refusal_is_told() -> None:
    broken(refuses=lambda self, grid: "it wants patches and nothing but patches" if grid.prefix else None)
    found = {verdict.check: verdict for verdict in check("broken")}
    assert list(found) == list(CHECKS)
    assert {verdict.result for verdict in found.values()} == {"passed", "refused"}
    assert found["shapes"].note.startswith(
        "13 of 20 grids refused: attention 'broken' cannot serve grid 1+6x6: it wants"
    )
    assert found["reads"].result == "refused"


def test_a_reader_of_scores_passes() -> None:
    """The context is drawn once, so that whoever reads it can give the same answer twice."""

    def attend(self, q, k, v, context):
        return torch.softmax(self.scale * q @ k.transpose(-2, -1) + context.scores, dim=-1) @ v, context

    broken(reads=frozenset({"scores"}), attend=attend, map=Attention.map)
    assert {(v.check, v.result, v.note) for v in check("broken") if v.result != "passed"} == set()


def test_what_cannot_be_read_is_said_at_once() -> None:
    with pytest.raises(UserError, match="unknown attention 'nothing'"):
        list(check("nothing"))
