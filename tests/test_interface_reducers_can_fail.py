"""Every interface check of reducers fails for a reducer that breaks its rule, and names the reason; a user's passes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attendless
from attendless import Context, Grid, Reducer, UserError, plugins, register_reducer
from attendless.check.reducers import CHECKS
from attendless.check.trial import attempt
from attendless.options import Options
from attendless.tokens import registry
from attendless_cli.main import main


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reducers that are registered here are removed afterwards."""
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))
    monkeypatch.setattr(plugins, "_sources", {})


class Half(Reducer):
    """Drops the second half of the patches in layer 0; what is broken in it is said below."""

    drops = True

    @classmethod
    def layers(cls, options: Options, depth: int) -> list[int]:
        return [0]

    def remaining(self, grid: Grid) -> int:
        return grid.patches // 2

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, left = context.grid, self.remaining(context.grid)
        reduced = dataclasses.replace(grid, cells=grid.places(x)[:, :left], sizes=None, owners=None)
        return x[:, : grid.prefix + left], context.replace(grid=reduced)


def broken(**changes: object) -> None:
    register_reducer(type("Broken", (Half,), {"name": "broken", **changes}))


def then(change):
    """A `forward` that reduces as `Half` does and then does something wrong."""

    def forward(self, x, context):
        return change(self, *Half.forward(self, x, context))

    return forward


def on_grid(**changes):
    """A `forward` that returns a grid with wrong entries; each is a function of the right grid."""

    def change(self, x, context):
        wrong = {name: value(context.grid) for name, value in changes.items()}
        return x, context.replace(grid=dataclasses.replace(context.grid, **wrong))

    return then(change)


def owned(grid):
    """The owners of a grid on which every cell without a token belongs to token 0."""
    none = grid.cells.new_zeros(len(grid.cells), grid.area)
    return none.scatter(1, grid.cells, torch.arange(grid.patches).expand_as(grid.cells))


def leaves_18(self, x, context):
    left = dataclasses.replace(context.grid, cells=context.grid.places(x)[:, :18])
    return x[:, : left.tokens], context.replace(grid=left)


def writes_tokens(self, x, context):
    return Half.forward(self, x.mul_(2), context)


def writes_scores(self, x, context):
    context.scores.mul_(2)
    return Half.forward(self, x, context)


def moves_in_layer_1(self, x, context):
    moved = on_grid(cells=lambda grid: grid.cells + grid.area // 2)
    return (moved if self.layer else Half.forward)(self, x, context)


def with_cache(self):
    self.cache = {}


def caches(self, x, context):
    self.cache[len(self.cache)] = 1
    return x, context


def with_secret(self):
    self.secret = float(torch.rand(()))  # a weight that the state dict does not hold


def with_weight(self):
    self.weight = nn.Linear(self.dim, 1)


class Nans(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def only_patches(change):
    return then(lambda self, x, context: (
        torch.cat([x[:, : context.grid.prefix], change(self, x[:, context.grid.prefix :])], dim=1), context
    ))  # fmt: skip


#: The check that must fail, what its note must contain, and the reducer that breaks the rule.
BROKEN = [
    ("token counts", "expected .3, 10, 32", {
        "remaining": lambda self, grid: grid.patches // 4, "forward": leaves_18}),
    ("token counts", "returned grid has", {"forward": lambda self, x, c: (x[:, : 1 + self.remaining(c.grid)], c)}),
    ("token counts", "tuple, expected a Context", {"forward": then(lambda self, x, c: (x, (c,)))}),
    ("token counts", "not finite", {"forward": only_patches(lambda self, x: x / 0)}),
    ("token counts", "in no layer", {"layers": classmethod(lambda cls, options, depth: [])}),
    ("token counts", "no token leaves", {"remaining": lambda self, grid: grid.patches}),
    ("token counts", "without saying what and why", {"setup": lambda self: (_ for _ in ()).throw(UserError("no"))}),
    ("token counts", "refuses every grid .* reads secrets: there are only scores", {"reads": frozenset({"secrets"})}),
    ("token counts", "cannot be built .* KeyError", {"setup": lambda self: {}["none"]}),
    ("prefix tokens", "prefix tokens: off by", {"forward": then(lambda self, x, c: (2 * x, c))}),
    ("whole grid", "belongs to 1.4x6, expected 1.3x4x6", {"forward": then(lambda self, x, c: (x, c.replace(grid=Grid(
        c.grid.height, c.grid.width, c.grid.prefix, c.grid.cells))))}),
    ("cells", "cells is", {"forward": on_grid(cells=lambda grid: grid.cells[:1])}),
    ("cells", "outside the grid", {"forward": on_grid(cells=lambda grid: grid.cells + grid.area)}),
    ("cells", "the same cell", {"forward": on_grid(cells=lambda grid: torch.zeros_like(grid.cells))}),
    ("cells", "held no token before", {
        "layers": classmethod(lambda cls, options, depth: [0, 1]), "forward": moves_in_layer_1}),
    ("owners", "owners is", {"forward": on_grid(owners=lambda grid: torch.zeros(3, 5, dtype=torch.long))}),
    ("owners", "not one of the", {"forward": on_grid(owners=lambda grid: owned(grid) + 1)}),
    ("owners", "does not own its own cell", {"forward": on_grid(owners=lambda grid: 0 * owned(grid))}),
    ("owners", "cells lost their token", {"drops": False}),
    ("owners", "has one again", {"layers": classmethod(lambda cls, options, depth: [0, 1]),
        "forward": lambda self, x, c: (on_grid(owners=owned) if self.layer else Half.forward)(self, x, c)}),
    ("sizes", "sizes is", {"forward": on_grid(sizes=lambda grid: torch.ones(3, 5))}),
    ("sizes", "sizes sum to", {"drops": False, "forward": on_grid(
        owners=owned, sizes=lambda grid: torch.ones(grid.cells.shape))}),
    ("sizes", "number of cells that it owns", {"forward": on_grid(
        owners=owned, sizes=lambda grid: torch.ones(grid.cells.shape))}),
    ("restores", "Error", {"forward": on_grid(owners=lambda grid: owned(grid) + grid.patches)}),
    ("restores", "restored tokens at", {"forward": on_grid(owners=lambda grid: 0 * owned(grid))}),
    ("restores", "restored tokens are", {"forward": on_grid(owners=lambda grid: owned(grid)[:, 1:], cells=lambda grid:
        grid.cells)}),
    ("context unchanged", "tokens were written to", {"forward": writes_tokens}),
    ("context unchanged", "context was changed", {"forward": writes_scores, "reads": frozenset({"scores"})}),
    ("context unchanged", "losses of earlier layers", {"forward": then(lambda self, x, c: (x, Context(c.grid)))}),
    ("nothing left behind", r"changed \.cache on", {"setup": with_cache, "forward": then(caches)}),
    ("reads", "reads keys, but does not use it", {"reads": frozenset({"keys"})}),
    ("deterministic", "second run: off by", {"forward": only_patches(lambda self, x: x + next(self.counter)),
        "counter": iter(range(10**6))}),
    ("images alone", "an image alone", {"forward": only_patches(lambda self, x: x - x.mean(0))}),
    ("round trips", "the copy with its state dict: off by", {"setup": with_secret,
        "forward": only_patches(lambda self, x: x + self.secret)}),
    ("gradients", "gradient of the input is not finite", {"forward": then(lambda self, x, c: (Nans.apply(x), c))}),
    ("gradients", "no gradient reaches", {"forward": then(lambda self, x, c: (x.detach().requires_grad_(), c))}),
    ("macs", "0 MACs stated, 576 counted", {"setup": with_weight,
        "forward": only_patches(lambda self, x: x * self.weight(x))}),
    ("compiles", "Unsupported", {"forward": only_patches(lambda self, x: x * float(x.sum() > 0 or 1))}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "says", "changes"), BROKEN)
def test_a_broken_reducer_fails(name: str, says: str, changes: dict) -> None:
    broken(**changes)
    verdict = attempt(CHECKS[name], "broken")
    assert verdict.result == "failed", verdict
    assert re.search(says, verdict.note), verdict.note


def test_every_check_is_shown_to_fail() -> None:
    assert {name for name, *_ in BROKEN} == set(CHECKS)


def test_a_sound_reducer_passes_and_a_refusal_is_reported() -> None:
    def remaining(self: Reducer, grid: Grid) -> int:
        if grid.depth > 1:
            raise UserError(f"reducer 'broken' cannot serve grid {grid}: it takes one frame at a time")
        return grid.patches // 2

    broken(remaining=remaining)
    found = {verdict.check: verdict for verdict in attendless.check("broken")}
    assert list(found) == list(CHECKS)
    assert {verdict.result for verdict in found.values()} == {"passed"}
    assert found["token counts"].note.startswith("3 of 7 grids refused: reducer 'broken' cannot serve grid 1+3x4x6")


PLUGIN = '''
"""Every second patch leaves: a reducer of a user's own."""

import dataclasses

import torch

import attendless


@dataclasses.dataclass(frozen=True)
class EveryOptions(attendless.Options):
    step: int = attendless.option(2, "one of so many patches stays", low=1)


@attendless.register_reducer
class Every(attendless.Reducer):
    name = "every"
    Options = EveryOptions
    drops = True

    @classmethod
    def layers(cls, options, depth):
        return [depth // 2]

    def remaining(self, grid):
        return -(-grid.patches // self.options.step)

    def forward(self, x, context):
        grid, step = context.grid, self.options.step
        left = dataclasses.replace(grid, cells=grid.places(x)[:, ::step], sizes=None, owners=None)
        kept = torch.cat([x[:, : grid.prefix], x[:, grid.prefix :: step]], dim=1)
        return kept, context.replace(grid=left)
'''


def test_a_reducer_of_a_users_own_passes_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    assert main(["check", "every", "every:step=3", "--plugin", str(path)]) == 0
    assert capsys.readouterr().out.count(f"{len(CHECKS)} passed") == 2
    model = attendless.Columnar(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, tokens="every")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


def test_a_broken_one_is_reported_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    broken(drops=False)
    assert main(["check", "broken"]) == 1
    out = capsys.readouterr().out
    assert "cells lost their token, but `drops` is False" in out
    assert f"{len(CHECKS) - 1} passed, 1 failed" in out
