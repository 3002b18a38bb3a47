"""Merging tokens that are alike: the definition against loops, its gradients, and what must hold whatever is merged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attendless.attention import Grid
from attendless.errors import UserError
from attendless.sparse import merging
from attendless.sparse.merging import Merged, Merging


@dataclasses.dataclass
class Problem:
    """A call, and what an earlier one left."""

    plan: Merging
    x: Tensor
    keys: Tensor
    more: dict[str, Tensor | None]

    def merge(self) -> Merged:
        return merging.merge(self.x, self.keys, self.plan, **self.more)


def problem(
    height: int,
    width: int,
    prefix: int,
    r: int,
    window: int = 0,
    protect: float = 0.0,
    past: int = 0,
    sources: int = 0,
    seed: int = 0,
) -> Problem:
    """Random tokens of two images. If `past` patches were merged before, nobody stands for the first's last cell."""
    draws, cells = torch.Generator().manual_seed(seed), height * width
    tokens = [torch.randn(2, prefix + cells, width, generator=draws) for width in (5, 4)]
    sizes = places = owners = None
    if past:
        before = Merging(height, width, prefix, cells, past)
        first, keys = (merging.merge(x, tokens[1], before) for x in tokens)
        tokens = [first.x, keys.x]
        sizes, places, owners = first.sizes, first.cells, first.owners.clone()
        owners[0, -1] = -1
    n = cells - past
    importance = torch.rand(2, prefix + n, generator=draws) if protect or sources else None
    plan = Merging(height, width, prefix, n, min(r, sources or n // 2), window, sources, protect)
    return Problem(plan, *tokens, {"importance": importance, "sizes": sizes, "cells": places, "owners": owners})


def dot(u: Sequence[float], v: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(u, v, strict=True))


def by_hand(p: Problem, image: int) -> tuple[list[list[float]], list[float], list[int], list[int]]:
    """The same for one image, in lists of numbers."""
    plan, past = p.plan, {name: y if y is None else y[image].tolist() for name, y in p.more.items()}
    x, keys = p.x[image].tolist(), p.keys[image].tolist()
    sizes = past["sizes"] or [1.0] * plan.patches
    cells = past["cells"] or list(range(plan.patches))
    owners = past["owners"]
    if owners is None:
        owners = [cells.index(cell) if cell in cells else -1 for cell in range(plan.height * plan.width)]

    def cosine(i: int, j: int) -> float:
        u, v = keys[plan.prefix + i], keys[plan.prefix + j]
        return dot(u, v) / math.hypot(*u) / math.hypot(*v) if any(u) and any(v) else 0.0

    def window(i: int) -> tuple[int, int]:
        row, column = divmod(cells[i], plan.width)
        return row // plan.window, column // plan.window

    patches = range(plan.patches)
    sources = [*patches[1::2]]
    if plan.sources:
        sources = sorted(patches, key=lambda i: (past["importance"][plan.prefix + i], -i))[: plan.sources]
    targets = [i for i in patches if i not in sources]
    pairs = []
    for i in sources:
        best, partner = -math.inf, targets[0]
        for j in targets:
            near = not plan.window or window(i) == window(j)
            if near and cosine(i, j) > best:
                best, partner = cosine(i, j), j
        if plan.protect:
            best -= plan.protect * math.log(past["importance"][plan.prefix + i])
        pairs.append((-best, i, partner))
    joins = {i: partner for _, i, partner in sorted(pairs)[: plan.r]}
    kept = [i for i in sorted(sources) if i not in joins] + targets
    members = [[j for j in range(plan.patches) if j == i or joins.get(j) == i] for i in kept]
    rows, totals = x[: plan.prefix], []
    for group in members:
        vectors, weights = [x[plan.prefix + j] for j in group], [sizes[j] for j in group]
        totals.append(sum(weights))
        if plan.sources:
            weights = [past["importance"][plan.prefix + j] for j in group]
        mean = [dot(column, weights) / sum(weights) for column in zip(*vectors, strict=True)]
        length = dot([math.hypot(*vector) for vector in vectors], weights) / sum(weights)
        longer = min(2.0, length / math.hypot(*mean)) if plan.sources else 1.0
        rows.append([longer * value for value in mean])
    now = {j: k for k, group in enumerate(members) for j in group}
    return rows, totals, [cells[i] for i in kept], [now.get(owner, -1) for owner in owners]


#: height, width, prefix, r, window, protect, past, sources.
SHAPES = [
    *((1, 2, 0, r, 0, 0.0, 0) for r in (0, 1)),
    *((3, 3, 1, r, 0, 0.0, 0) for r in (0, 1, 3, 4)),
    *((4, 5, 2, r, 0, 0.0, 0) for r in (0, 7, 10)),
    *((4, 5, 1, r, 0, 0.0, past) for r in (2, 99) for past in (3, 10)),
    (1, 1, 1, 0, 0, 0.0, 0),
    (5, 4, 0, 5, 2, 0.0, 0),
    (5, 4, 1, 99, 2, 0.0, 0),
    (5, 4, 2, 6, 3, 0.0, 4),
    (5, 4, 0, 99, 1, 0.0, 5),
    (5, 4, 1, 3, 9, 0.0, 0),
    (4, 4, 1, 3, 0, 0.1, 0),
    (4, 4, 1, 4, 0, 2.0, 4),
    (4, 4, 1, 5, 2, 0.5, 3),
    *((4, 5, 1, r, 0, 0.0, past, r) for r in (1, 6, 16) for past in (0, 3)),
    (4, 5, 0, 4, 2, 0.0, 0, 9),
    (5, 4, 2, 3, 3, 0.2, 4, 10),
    (1, 2, 1, 1, 0, 0.0, 0, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition_is_its_loops(shape: tuple) -> None:
    for seed in range(3):
        p = problem(*shape, seed=seed)
        found = p.merge()
        for image in range(2):
            x, sizes, cells, owners = by_hand(p, image)
            torch.testing.assert_close(found.x[image], torch.tensor(x).view(-1, 5))
            torch.testing.assert_close(found.sizes[image], torch.tensor(sizes))
            assert found.cells[image].tolist() == cells
            assert found.owners[image].tolist() == owners


def test_of_equals_the_earlier_goes_to_the_earlier() -> None:
    """Keys that are all alike or nothing: every cosine is exactly 1 or 0."""
    for seed in range(20):
        p = problem(4, 4, 1, 1 + seed % 8, seed=seed)
        draws = torch.Generator().manual_seed(seed)
        p.keys = torch.eye(4)[torch.randint(3, (2, 17), generator=draws)]
        p.keys[:, 3] = 0
        found = p.merge()
        for image in range(2):
            assert found.owners[image].tolist() == by_hand(p, image)[3]


@pytest.mark.parametrize(("window", "protect", "past"), [(0, 0.0, 0), (0, 0.0, 4), (2, 0.0, 3), (0, 0.5, 0)])
def test_gradients_of_tokens_and_sizes(window: int, protect: float, past: int) -> None:
    p = problem(4, 4, 1, 5, window, protect, past)
    sizes = (p.more.pop("sizes") if past else torch.ones(2, p.plan.patches)).double().requires_grad_()

    def run(x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return merging.merge(x, p.keys, p.plan, **(p.more | {"sizes": sizes}))[:2]

    assert torch.autograd.gradcheck(run, (p.x.double().requires_grad_(), sizes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_must_hold(shape: tuple) -> None:
    p = problem(*shape)
    found, plan = p.merge(), p.plan
    before = torch.ones(2, plan.patches) if p.more["sizes"] is None else p.more["sizes"]
    torch.testing.assert_close(found.sizes.sum(1), before.sum(1))
    assert torch.equal(found.x[:, : plan.prefix], p.x[:, : plan.prefix])
    # Who stands in a cell stands for it, unless it was gone before.
    there = found.owners.gather(1, found.cells)
    assert ((there == torch.arange(plan.left)) | (there == -1)).all()
    assert len({*found.cells[1].tolist()}) == plan.left


def test_restored_it_is_the_mean_of_those_that_became_one() -> None:
    """Merged twice, then put back on the grid: every cell has the mean of all cells that share its owner."""
    p = problem(5, 4, 1, 4)
    once = p.merge()
    again = Merging(5, 4, 1, 16, 6)
    found = merging.merge(once.x, torch.randn(2, 17, 4), again, sizes=once.sizes, cells=once.cells, owners=once.owners)
    grid = Grid(5, 4, 1, cells=found.cells, sizes=found.sizes, owners=found.owners)
    back = grid.restore(found.x)
    for image in range(2):
        for cell in range(20):
            same = found.owners[image] == found.owners[image, cell]
            assert found.sizes[image, found.owners[image, cell]] == same.sum()
            torch.testing.assert_close(back[image, 1 + cell], p.x[image, 1:][same].mean(0))


def test_with_windows_less_is_compared() -> None:
    whole, windowed = Merging(32, 32, 1, 1024, 100), Merging(32, 32, 1, 1024, 100, window=4)
    assert merging.macs(whole, 64) == 512 * 512 * 64
    assert merging.macs(windowed, 64) == 512 * 8 * 64
    assert merging.macs(Merging(4, 4, 0, 16, 4, window=9), 8) == 8 * 8 * 8


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="9 of 16 patches cannot merge: 8 at most have a partner"):
        Merging(4, 4, 1, 16, 9)
    with pytest.raises(UserError, match="no number may be below 0"):
        Merging(4, 4, -1, 16, 2)
