"""Exact top-k against a loop, and as the bound it is meant to be."""

from __future__ import annotations

import pytest
import torch

from attendless import Context, Grid, create
from attendless.sparse import topk

GRID = Grid(4, 4, 1)


def test_against_a_loop() -> None:
    torch.manual_seed(0)
    module = create("topk:keep=0.2", 16, 2, grid=GRID).double()
    x = torch.randn(2, 17, 16, dtype=torch.double)
    q, k, v = module.project(x)
    found, _ = module.attend(q, k, v, Context(GRID))
    for b in range(2):
        for h in range(2):
            for i in range(17):
                scores = (q[b, h, i] @ k[b, h].T).tolist()
                keys = sorted(range(17), key=lambda j: -scores[j])[: 17 if i == 0 else 4]
                weight = torch.softmax(torch.tensor([scores[j] * 8**-0.5 for j in keys], dtype=torch.double), 0)
                torch.testing.assert_close(found[b, h, i], weight @ v[b, h, keys])


@torch.no_grad()
def test_merged_keys_are_chosen_by_what_they_weigh() -> None:
    torch.manual_seed(0)
    module = create("topk:keep=0.2", 16, 2, grid=GRID).double()
    sizes = torch.tensor([[1.0, 9.0, 2.0, 1.0, 1.0, 2.0]], dtype=torch.double)
    grid = Grid(4, 4, 1, cells=torch.arange(6)[None], sizes=sizes)
    q, k, v = module.project(torch.randn(1, 7, 16, dtype=torch.double))
    found, _ = module.attend(q, k, v, Context(grid))
    for h in range(2):
        for i in range(7):
            score = (q[0, h, i] @ k[0, h].T) * 8**-0.5 + torch.cat([torch.ones(1), sizes[0]]).log()
            keys = score.argsort(descending=True)[: 7 if i == 0 else 4]
            torch.testing.assert_close(found[0, h, i], torch.softmax(score[keys], 0) @ v[0, h, keys])


@pytest.mark.parametrize("rest", ["dropped", "pooled"])
def test_keeping_everything_is_full_attention(rest: str) -> None:
    module = create(f"topk:keep=1,rank=5,rest={rest}", 16, 2, grid=GRID)
    full = create("full", 16, 2, grid=GRID)
    full.load_state_dict(module.state_dict())
    x = torch.randn(2, 17, 16)
    torch.testing.assert_close(module(x, Context(GRID))[0], full(x, Context(GRID))[0])


def test_ties_go_to_the_lower_index() -> None:
    scores = torch.tensor([[[[1.0, 3.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 2.0]]]])
    assert topk.largest(scores, 3).nonzero()[:, -1].tolist() == [0, 1, 2, 0, 1, 4]
    assert topk.largest(scores, 3, above=0.0).nonzero()[:, -1].tolist() == [0, 1, 2, 4]


def test_lists_become_a_choice() -> None:
    indices, counts = torch.tensor([[[[0, 0], [3, 1], [2, 9]]]]), torch.tensor([[[0, 2, 1]]])
    found = topk.unlisted(indices, counts, 4, prefix=1)
    assert found.nonzero()[:, 2:].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 1], [1, 3], [2, 2]]
