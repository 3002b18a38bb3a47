"""Foveal attention against loops over its definition: one query, one cell, one token at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from attendless import (
    Attention,
    Context,
    Grid,
    UserError,
    create,
)
from attendless.sparse import foveal
from attendless.sparse.foveal import Layout

#            height width prefix keep cell tile coarse
CASES = {
    "square": (6, 6, 1, 0.3, 2, 2, 0),
    "per query": (6, 4, 1, 0.3, 2, 1, 0),
    "odd grid, partial cells and tiles": (7, 5, 0, 0.3, 2, 4, 0),
    "registers": (5, 8, 5, 0.2, 3, 2, 0),
    "tiles across cells": (7, 7, 1, 0.5, 2, 3, 0),
    "cells larger than tiles": (9, 6, 1, 0.2, 4, 2, 0),
    "two levels": (8, 8, 1, 0.15, 2, 2, 4),
    "two levels, partial everywhere": (7, 11, 5, 0.2, 2, 3, 4),
    "two levels, one token a cell": (5, 6, 0, 0.1, 1, 1, 3),
    "one cell": (3, 3, 1, 0.1, 4, 2, 4),
    "one token": (1, 1, 1, 0.1, 2, 2, 0),
}
SCALE = 0.6


def draw(plan: Layout, batch: int = 2, heads: int = 2, dim: int = 4, patches: int | None = None) -> list[Tensor]:
    tokens = plan.prefix + (plan.patches if patches is None else patches)
    return [torch.randn(batch, heads, tokens, dim, dtype=torch.float64) for _ in range(3)]


def plan_of(case: str, order: int = 1) -> Layout:
    height, width, prefix, keep, cell, tile, coarse = CASES[case]
    return foveal.layout(height, width, prefix, keep=keep, cell=cell, tile=tile, coarse=coarse, order=order)


class Loops:
    """The definition for one image and one head, with dictionaries and loops."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Layout, bias: Tensor, places: list[int]) -> None:
        self.q, self.k, self.v, self.plan = q, k, v, plan
        self.size = [math.exp(b) for b in bias.tolist()]
        self.where = [divmod(place, plan.width) for place in places]

    def inside(self, size: int) -> dict[tuple[int, int], list[int]]:
        """Tokens of each size × size block that the grid has, also of empty ones, in the grid's order."""
        rows, columns = math.ceil(self.plan.height / size), math.ceil(self.plan.width / size)
        blocks: dict[tuple[int, int], list[int]] = {p: [] for p in itertools.product(range(rows), range(columns))}
        for i, (y, x) in enumerate(self.where):
            blocks[y // size, x // size].append(self.plan.prefix + i)
        return blocks

    @functools.cache  # noqa: B019 - lives as long as the test
    def mean(self, name: str, tokens: tuple[int, ...]) -> Tensor:
        x = getattr(self, name)
        return sum(self.size[t] * x[t] for t in tokens) / sum(self.size[t] for t in tokens)

    def choose(self) -> dict[tuple[int, int], list[int]]:
        plan, cells = self.plan, self.inside(self.plan.cell)
        chosen = {}
        for (row, column), queries in self.inside(plan.tile).items():
            ys = range(row * plan.tile, min((row + 1) * plan.tile, plan.height))
            xs = range(column * plan.tile, min((column + 1) * plan.tile, plan.width))
            own = {(y // plan.cell, x // plan.cell) for y in ys for x in xs}
            q_mean = sum(self.q[t] for t in queries) / len(queries) if queries else torch.zeros_like(self.q[0])
            ranks = []
            for index, (cell, tokens) in enumerate(cells.items()):
                score = SCALE * (q_mean @ self.mean("k", tuple(tokens))).item() if tokens else -math.inf
                ranks.append((-math.inf if cell in own else -score, index))
            chosen[row, column] = sorted(index for _, index in sorted(ranks)[: plan.budget])
        return chosen

    def weight(self, i: int, tokens: list[int]) -> Tensor:
        """How much query i looks at the mean of these tokens, before it is shared out."""
        return sum(self.size[t] for t in tokens) * torch.exp(SCALE * self.q[i] @ self.mean("k", tuple(tokens)))

    @functools.cache  # noqa: B019
    def slope(self, size: int) -> Tensor:
        """How values vary with keys inside size × size blocks, token by token."""
        total, weight = torch.zeros(self.k.shape[1], self.v.shape[1], dtype=self.k.dtype), 0.0
        for tokens in self.inside(size).values():
            for t in tokens:
                dk, dv = (getattr(self, name)[t] - self.mean(name, tuple(tokens)) for name in "kv")
                total, weight = total + self.size[t] * torch.outer(dk, dv), weight + self.size[t]
        return total / weight

    def attend(self, chosen: dict[tuple[int, int], list[int]]) -> tuple[Tensor, list[int]]:
        """Each token's output, and how many keys it met."""
        plan, outputs, met = self.plan, [], []
        cells = self.inside(plan.cell)
        for i in range(len(self.q)):
            blurs: list[tuple[int, list[list[int]]]] = []
            if i < plan.prefix:
                groups = [[t] for t in range(len(self.q))]
            else:
                y, x = self.where[i - plan.prefix]
                sharp = {list(cells)[index] for index in chosen[y // plan.tile, x // plan.tile]}
                groups = [[t] for t in range(plan.prefix)]
                groups += [[t] for cell in sharp for t in cells[cell]]
                ratio = plan.coarse // plan.cell if plan.coarse else 1
                touched = {(row // ratio, column // ratio) for row, column in sharp}
                near = [
                    tokens
                    for (row, column), tokens in cells.items()
                    if (row, column) not in sharp and (not plan.coarse or (row // ratio, column // ratio) in touched)
                ]
                blurs = [(plan.cell, near)]
                if plan.coarse:
                    far = [tokens for place, tokens in self.inside(plan.coarse).items() if place not in touched]
                    blurs.append((plan.coarse, far))
            groups = [tokens for tokens in [*groups, *(t for _, blurred in blurs for t in blurred)] if tokens]
            weights = {tuple(tokens): self.weight(i, tokens) for tokens in groups}
            total = sum(weights.values())
            out = sum(weight / total * self.mean("v", tokens) for tokens, weight in weights.items())
            for size, blurred in blurs:
                mass = sum(weights[tuple(tokens)] / total for tokens in blurred if tokens)
                if plan.order:
                    out = out + mass * SCALE * (self.q[i] @ self.slope(size))
            outputs.append(out)
            met.append(len(groups))
        return torch.stack(outputs), met


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, plan: Layout, bias: Tensor | None = None, places: Tensor | None = None
) -> tuple[Tensor, Tensor, list[int]]:
    B, H, N, _ = q.shape
    bias = torch.zeros(B, N) if bias is None else bias
    places = torch.arange(plan.patches).expand(B, -1) if places is None else places
    chosen, outputs, met = [], [], []
    for b, h in itertools.product(range(B), range(H)):
        loops = Loops(q[b, h], k[b, h], v[b, h], plan, bias[b], places[b].tolist())
        chosen.append(loops.choose())
        out, keys = loops.attend(chosen[-1])
        outputs.append(out)
        met += keys
    cells = torch.tensor([list(c.values()) for c in chosen], dtype=torch.int32)
    return cells.reshape(B, H, plan.tiles, plan.budget), torch.stack(outputs).reshape(*v.shape), met


def computed(q: Tensor, k: Tensor, v: Tensor, plan: Layout, **given: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen = foveal.select(q, k, plan, scale=SCALE, **given)
    return chosen, foveal.attend(q, k, v, chosen, plan, scale=SCALE, **given)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("order", "merged"), [(0, False), (1, False), (1, True)])
def test_equals_the_definition_with_gradients(case: str, order: int, merged: bool) -> None:
    plan = plan_of(case, order)
    inputs = [x.requires_grad_() for x in draw(plan)]
    bias = torch.randint(1, 5, (2, plan.prefix + plan.patches)).double().log() if merged else None
    cells, expected, _ = by_loops(*inputs, plan, bias)
    chosen, out = computed(*inputs, plan, key_bias=bias)
    assert torch.equal(chosen, cells)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for a, b in zip(found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", ["square", "odd grid, partial cells and tiles", "two levels, partial everywhere"])
def test_reduced_sets_stand_where_they_came_from(case: str) -> None:
    plan = plan_of(case)
    # The second image loses a whole corner, so that cells, coarse cells and tiles of it are empty.
    kept = plan.patches // 3
    places = torch.stack([torch.randperm(plan.patches)[:kept].sort().values, torch.arange(kept)])
    bias = torch.nn.functional.pad(torch.randint(1, 4, (2, kept)).double().log(), (plan.prefix, 0))
    inputs = [x.requires_grad_() for x in draw(plan, patches=kept)]
    cells, expected, met = by_loops(*inputs, plan, bias, places)
    chosen, out = computed(*inputs, plan, key_bias=bias, places=places)
    assert torch.equal(chosen, cells)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))
    tokens = plan.prefix + kept
    patch_keys = [keys for i, keys in enumerate(met) if i % tokens >= plan.prefix]
    assert max(patch_keys) <= foveal.keys_seen(plan, kept)


@pytest.mark.parametrize("case", CASES)
def test_each_tile_sees_every_patch_once(case: str) -> None:
    """A patch is a token, or part of the mean of a cell, or part of the mean of a coarse cell without a chosen cell."""
    plan = plan_of(case)
    q, k, _ = draw(plan)
    chosen = foveal.select(q, k, plan, scale=SCALE)
    sharp, blurred = foveal.visibility(chosen, plan)
    blocks = [foveal.block_of(plan, size)[0].tolist() for size, _ in plan.levels]
    for place in itertools.product(*map(range, chosen.shape[:3])):
        cells = set(chosen[place].tolist())
        touched = {coarse for cell, coarse in zip(blocks[0], blocks[-1], strict=True) if cell in cells}
        for patch in zip(*blocks, strict=True):
            as_token = patch[0] in cells
            as_cell = not as_token and (not plan.coarse or patch[-1] in touched)
            expected = [as_token, as_cell, not as_token and not as_cell][: 1 + len(blocks)]
            seen = [sharp[place][patch[0]], *(level[place][block] for level, block in zip(blurred, patch, strict=True))]
            assert [bool(x) for x in seen] == expected
            assert sum(expected) == 1


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiler_traces_the_definition_in_one_graph() -> None:
    plan = plan_of("two levels, partial everywhere")
    q, k, v = draw(plan)
    chosen = foveal.select(q, k, plan, scale=SCALE)
    compiled = torch.compile(
        functools.partial(foveal.attend, layout=plan, scale=SCALE), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(q, k, v, chosen), foveal.attend(q, k, v, chosen, plan, scale=SCALE))


@pytest.mark.parametrize("case", CASES)
def test_a_full_budget_is_full_attention(case: str) -> None:
    height, width, prefix, _, cell, tile, coarse = CASES[case]
    plan = foveal.layout(height, width, prefix, keep=1, cell=cell, tile=tile, coarse=coarse)
    q, k, v = draw(plan, dim=16)
    expected = torch.softmax(SCALE * q @ k.transpose(-2, -1), dim=-1) @ v
    torch.testing.assert_close(computed(q, k, v, plan)[1], expected, atol=1e-12, rtol=0)
    # In single precision with a model's own scale, against the double result: only rounding is left.
    q, k, v = q.float(), k.float(), v.float()
    chosen = foveal.select(q, k, plan, scale=0.25)
    expected = torch.softmax(0.25 * q.double() @ k.double().transpose(-2, -1), dim=-1) @ v.double()
    found = foveal.attend(q, k, v, chosen, plan, scale=0.25)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def test_equal_scores_go_to_the_lower_cell() -> None:
    plan = foveal.layout(8, 8, keep=0.25, cell=2, tile=2, coarse=0)
    zeros = torch.zeros(1, 1, 64, 4)
    chosen = foveal.select(zeros, zeros, plan, scale=1)
    assert chosen[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert chosen[0, 0, 9].tolist() == [0, 1, 2, 9]  # its own cell, then the first ones


@pytest.mark.parametrize("case", CASES)
def test_a_tile_always_looks_at_itself(case: str) -> None:
    plan = plan_of(case)
    q, k, _ = draw(plan)
    chosen = foveal.select(q, -q + k, plan, scale=SCALE)  # keys that score lowest at home
    own = foveal.own_cells(plan)
    taken = torch.zeros(*chosen.shape[:3], plan.cells, dtype=torch.bool).scatter(3, chosen.long(), True)
    assert (taken | ~own).all()
    assert (taken.sum(-1) == plan.budget).all()


def test_the_budget() -> None:
    def budget(keep: float, tile: int, cell: int = 2, side: int = 14) -> int:
        return foveal.layout(side, side, keep=keep, cell=cell, tile=tile, coarse=0).budget

    assert budget(0.1, tile=2) == 5  # round(4.9)
    assert budget(0.25, tile=2) == 12
    assert budget(0, tile=4) == 4  # its own cells, whatever `keep`
    assert budget(0, tile=3) == 4  # the third tile of a row straddles two cells
    assert budget(0, tile=1) == 1
    assert budget(1, tile=4, side=15) == 64
    assert budget(0, tile=8, cell=4, side=3) == 1  # tile and cell larger than the grid


@pytest.mark.parametrize("case", CASES)
def test_macs_count_the_keys_met(case: str) -> None:
    plan = plan_of(case)
    q, k, v = draw(plan)
    met = by_loops(q, k, v, plan)[2]
    tokens, dim = plan.prefix + plan.patches, 24
    first_order = 8 * foveal.slope_macs(plan, plan.patches)
    counted = dim * (plan.tiles * plan.cells + 2 * sum(met) / 4 + first_order)  # 2 images × 2 heads
    whole = plan.height % plan.cell == plan.width % plan.cell == 0
    if whole and not plan.coarse:
        assert foveal.macs(plan, dim, 8) == counted
    else:
        most = dim * (plan.tiles * plan.cells + 2 * tokens**2 + first_order)
        assert counted <= foveal.macs(plan, dim, 8) <= most


def test_macs_of_the_first_order() -> None:
    """One row by one row of each head: to make H of every patch, and for every patch query."""
    plans = {
        (order, coarse): foveal.layout(8, 8, 1, keep=0.1, cell=2, tile=2, coarse=coarse, order=order)
        for order in (0, 1)
        for coarse in (0, 4)
    }
    added = {coarse: foveal.macs(plans[1, coarse], 32, 16) - foveal.macs(plans[0, coarse], 32, 16) for coarse in (0, 4)}
    heads = 2
    assert added == {0: heads * 16 * 16 * (64 + 64), 4: heads * 16 * 16 * (64 + 16 + 2 * 64)}


def test_the_first_order_gives_back_what_varies_within_cells() -> None:
    """Values that are a linear function of keys, and so small scores that softmax is nearly linear."""
    torch.manual_seed(0)
    plan = foveal.layout(8, 8, keep=0, cell=4, tile=1, coarse=0)
    q, k, _ = draw(plan)
    turn, scale = torch.randn(4, 4, dtype=torch.float64), 1e-3
    v = k @ turn
    full = torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1) @ v
    error = {}
    for order in (0, 1):
        blurred = dataclasses.replace(plan, order=order)
        chosen = foveal.select(q, k, blurred, scale=scale)
        error[order] = (foveal.attend(q, k, v, chosen, blurred, scale=scale) - full).abs().max().item()
    assert error[1] < error[0] / 3


def test_where_nothing_is_blurred_or_varies_there_is_no_first_order() -> None:
    assert foveal.layout(8, 8, keep=0.1, cell=2).order == 1
    assert foveal.layout(8, 8, keep=1, cell=2).order == 0
    assert foveal.layout(8, 8, keep=0.1, cell=1, coarse=0).order == 0
    assert foveal.layout(8, 8, keep=0.1, cell=1, coarse=2).order == 1


@pytest.mark.parametrize(
    ("side", "order", "sizes"),
    [
        (14, 1, (2, 1, 0)),
        (24, 1, (2, 4, 0)),
        (32, 1, (2, 4, 0)),
        (48, 1, (4, 4, 0)),
        (14, 0, (2, 1, 0)),
        (24, 0, (2, 4, 0)),
        (48, 0, (2, 4, 4)),
    ],
)
def test_auto_follows_the_grid_and_the_order(side: int, order: int, sizes: tuple[int, int, int]) -> None:
    """Order 0 is how files of the first generation were made: its sizes stay as they were."""
    plan = foveal.layout(side, side, 1, keep=0.1, order=order)
    assert (plan.cell, plan.tile, plan.coarse) == sizes


def test_sizes_that_do_not_fit_are_answered() -> None:
    with pytest.raises(UserError, match="coarse=3 does not fit cell=2: expected a multiple"):
        foveal.layout(8, 8, keep=0.1, cell=2, coarse=3)
    with pytest.raises(UserError, match="coarse=3 does not fit cell=2"):
        create("foveal:cell=2,coarse=3", 32, 2, grid=Grid(8, 8))
    with pytest.raises(UserError, match=r"keep=1\.5 is out of range: expected 0 to 1"):
        create("foveal:keep=1.5", 32, 2, grid=Grid(8, 8))
    with pytest.raises(UserError, match="expected a whole number or auto"):
        create("foveal:cell=big", 32, 2, grid=Grid(8, 8))


# The module ----------------------------------------------------------------------------------------------------------


def module_for(spec: str, grid: Grid) -> Attention:
    return create(spec, 32, 2, grid=grid).eval()


def test_the_module_is_the_functions_between_projections() -> None:
    grid = Grid(7, 5, 1)
    module = module_for("foveal:keep=0.3,cell=2,tile=2,coarse=4", grid)
    x = torch.randn(2, grid.tokens, 32)
    q, k, v = module.project(x)
    plan = foveal.layout(7, 5, 1, keep=0.3, cell=2, tile=2, coarse=4)
    chosen = foveal.select(q, k, plan, scale=module.scale)
    expected = module.merge(foveal.attend(q, k, v, chosen, plan, scale=module.scale))
    torch.testing.assert_close(module(x, Context(grid))[0], expected, atol=1e-5, rtol=1e-5)
    assert module.core_macs(grid) == foveal.macs(plan, 32, 16)


def test_the_module_serves_reduced_grids_and_leaves_the_class_row() -> None:
    cells = torch.stack([torch.randperm(35)[:12].sort().values for _ in range(2)])
    grid = Grid(7, 5, 1, cells=cells, sizes=torch.randint(1, 4, (2, 12)))
    full, ours = module_for("full", grid), module_for("foveal:keep=1", grid)
    ours.load_state_dict(full.state_dict())
    x, context = torch.randn(2, grid.tokens, 32), Context(grid, frozenset({"class_attention"}))
    expected, left = full(x, context)
    found, ours_left = ours(x, context)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours_left.class_attention, left.class_attention)


def test_dropout_of_the_map_acts_in_training_only() -> None:
    grid = Grid(6, 6, 1)
    module = create("foveal:keep=0.3", 32, 2, grid=grid, attn_drop=0.5)
    x, context = torch.randn(1, grid.tokens, 32), Context(grid)
    assert not torch.equal(module(x, context)[0], module(x, context)[0])
    module.eval()
    assert torch.equal(module(x, context)[0], module(x, context)[0])
