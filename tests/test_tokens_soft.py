"""`soft` against loops over its equations, and what it conserves."""

from __future__ import annotations

import pytest
import torch

from attendless.attention import Context, Grid
from merging_loops import cosines, reducer


@pytest.mark.parametrize("threshold", [-1.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("grid", [Grid(3, 4, 2), Grid(3, 4), Grid(2, 3, 1, depth=2)], ids=str)
def test_two_layers_equal_loops(grid: Grid, threshold: float) -> None:
    draws = torch.Generator().manual_seed(0)
    x, context, P = torch.randn(2, grid.tokens, 8, generator=draws), Context(grid), grid.prefix
    sizes = torch.ones(2, 12)
    for layer, targets in enumerate([[0, 1, 3, 4, 6, 7, 9, 10], [0, 2, 5]]):
        keys, n = torch.randn(2, 2, x.shape[1], 4, generator=draws), x.shape[1] - P
        out, left = reducer(f"soft:r=4/5/0/0,threshold={threshold}", layer)(x, context.replace(keys=keys))
        masses = []
        for image in range(2):
            similar = cosines(keys[image, :, P:])
            total = {j: float(sizes[image, j]) for j in targets}
            tokens = {j: total[j] * x[image, P + j] for j in targets}
            for i in set(range(n)) - set(targets):
                above = {j: max(0.0, similar[i][j] - threshold) for j in targets}
                if sum(above.values()) == 0:
                    above = {max(targets, key=lambda j: similar[i][j]): 1.0}
                for j, part in above.items():
                    total[j] += part / sum(above.values()) * float(sizes[image, i])
                    tokens[j] = tokens[j] + part / sum(above.values()) * float(sizes[image, i]) * x[image, P + i]
            expected = torch.stack([*x[image, :P], *(tokens[j] / total[j] for j in targets)])
            torch.testing.assert_close(out[image], expected, atol=1e-5, rtol=1e-4)
            masses.append([total[j] for j in targets])
        x, context, sizes = out, left.replace(keys=None), torch.tensor(masses)
        torch.testing.assert_close(context.grid.sizes, sizes)


def test_sizes_and_the_mean_of_all_patches_are_conserved() -> None:
    x, keys = torch.randn(2, 65, 8), torch.randn(2, 2, 65, 4)
    out, context = reducer("soft:r=20,threshold=0.1")(x, Context(Grid(8, 8, 1), keys=keys))
    torch.testing.assert_close(context.grid.sizes.sum(1), torch.full((2,), 64.0))
    torch.testing.assert_close(context.grid.balanced(out)[:, 1:].mean(1), x[:, 1:].mean(1))


def test_a_cell_belongs_to_the_token_with_the_largest_part() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [1.0, 0.1]])[None, None]
    _, context = reducer("soft:r=2,threshold=0")(torch.randn(1, 4, 8), Context(Grid(2, 2), keys=keys))
    assert context.grid.cells[0].tolist() == [0, 2]
    assert context.grid.owners[0].tolist() == [0, 1, 1, 0]
