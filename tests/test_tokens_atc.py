"""`atc` against loops that merge the two closest clusters, and against SciPy's hierarchical clustering."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from attendless.attention import Context, Grid
from attendless.tokens.atc import clusters
from merging_loops import cosines, means, reducer

LINKAGES = {"average": lambda found: sum(found) / len(found), "complete": max, "single": min}


def clusters_by_loops(keys: Tensor, left: int, linkage: str) -> list[list[int]]:
    """One image, keys [H, n, D]: sets of patches, by their first patch."""
    similar = cosines(keys)
    clusters = [[i] for i in range(keys.shape[1])]
    while len(clusters) > left:

        def apart(pair: tuple[list[int], list[int]]) -> float:
            return LINKAGES[linkage]([1 - similar[i][j] for i in pair[0] for j in pair[1]])

        a, b = min(itertools.combinations(clusters, 2), key=apart)
        clusters = [c for c in clusters if c is not a and c is not b] + [a + b]
    return sorted(sorted(cluster) for cluster in clusters)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("grid", [Grid(3, 4, 2), Grid(3, 4), Grid(2, 3, 1, depth=2)], ids=str)
def test_two_layers_equal_loops(grid: Grid, linkage: str) -> None:
    draws = torch.Generator().manual_seed(0)
    x, context, sizes = torch.randn(2, grid.tokens, 8, generator=draws), Context(grid), [None, None]
    for layer, r in enumerate((5, 3)):
        keys = torch.randn(2, 2, x.shape[1], 4, generator=draws)
        out, left = reducer(f"atc:r=5/3/0/0,linkage={linkage}", layer)(x, context.replace(keys=keys))
        for image in range(2):
            patches = keys[image, :, grid.prefix :]
            groups = clusters_by_loops(patches, patches.shape[1] - r, linkage)
            expected, sizes[image] = means(x[image], groups, grid.prefix, sizes[image])
            torch.testing.assert_close(out[image], expected)
            assert left.grid.sizes[image].tolist() == sizes[image]
            sizes[image] = torch.tensor(sizes[image])
        x, context = out, left.replace(keys=None)
    assert context.grid.sizes.sum(1).tolist() == [12, 12]


@pytest.mark.parametrize("linkage", LINKAGES)
def test_equals_scipy(linkage: str) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    keys = torch.randn(1, 1, 40, 6, generator=torch.Generator().manual_seed(1))
    _, context = reducer(f"atc:r=25,linkage={linkage}")(torch.randn(1, 40, 8), Context(Grid(5, 8), keys=keys))
    tree = hierarchy.linkage(keys[0, 0].double().numpy(), method=linkage, metric="cosine")
    found, theirs = context.grid.owners[0].numpy(), hierarchy.fcluster(tree, 15, criterion="maxclust")
    assert len(np.unique(theirs)) == 15
    assert np.array_equal(found[:, None] == found, theirs[:, None] == theirs)


def test_copies_merge_first() -> None:
    """Clusters of any number of equal patches become one token each."""
    kinds = torch.tensor([0, 1, 0, 2, 2, 1, 0, 3])
    keys = torch.eye(4)[kinds][None, None]
    x = torch.randn(4, 8)[kinds][None]
    out, context = reducer("atc:r=4")(x, Context(Grid(2, 4), keys=keys))
    torch.testing.assert_close(context.grid.restore(out), x)
    assert context.grid.cells[0].tolist() == [0, 1, 3, 7]


def test_one_graph_serves_every_batch_size() -> None:
    class Clusters(torch.nn.Module):
        def forward(self, distance: Tensor) -> Tensor:
            return clusters(distance, 2, "average")

    batch = {"distance": {0: torch.export.Dim("batch", max=64)}}
    graph = torch.export.export(Clusters(), (torch.rand(2, 5, 5),), dynamic_shapes=batch).module()
    distance = torch.rand(3, 5, 5)
    assert torch.equal(graph(distance), clusters(distance, 2, "average"))
