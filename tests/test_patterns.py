"""Patterns against a token-by-token reading of their definitions; their sparse execution against a dense mask."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attendless.sparse import blocks as execution
from attendless.sparse.blocks import plan
from attendless.sparse.operations import block as block_attention
from attendless.sparse.patterns import (
    Pattern,
    axial_pattern,
    global_pattern,
    grid_blocks,
    no_pattern,
    prefix_pattern,
    random_pattern,
    sequence_blocks,
    spread,
    window_pattern,
)

SIDES = st.integers(1, 9)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The definition: softmax over the visible keys, zeros where nothing is visible."""
    weights = (scale * q @ k.transpose(-2, -1)).exp() * mask
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v


@given(SIDES, SIDES, st.integers(0, 5), st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_grid_blocks_hold_the_patches_of_a_square(height: int, width: int, prefix: int, side: int) -> None:
    blocks = grid_blocks(height, width, prefix, side)
    members = [set(blocks.order[a:b].tolist()) for a, b in itertools.pairwise(blocks.starts)]
    assert members[0] == set(range(prefix))
    for (row, column), block in zip(blocks.places, members[1:], strict=True):
        rows = range(row * side, min(row * side + side, height))
        columns = range(column * side, min(column * side + side, width))
        assert block == {prefix + y * width + x for y in rows for x in columns} != set()
    assert sorted(blocks.order) == list(range(prefix + height * width))


@pytest.mark.parametrize(("tokens", "prefix", "sizes"), [(23, 1, [1, 9, 10, 3]), (12, 12, [12, 0, 0]), (7, 0, [0, 7])])
def test_sequence_blocks_count_the_prefix_in(tokens: int, prefix: int, sizes: list[int]) -> None:
    blocks = sequence_blocks(tokens, prefix, 10)
    assert blocks.sizes.tolist() == sizes
    assert blocks.order.tolist() == list(range(tokens))


@given(SIDES, SIDES, st.integers(0, 2), st.integers(1, 4), st.integers(0, 2))
@settings(deadline=None, max_examples=30)
def test_masks_token_by_token(height: int, width: int, prefix: int, side: int, radius: int) -> None:
    blocks = grid_blocks(height, width, prefix, side)
    hubs = spread(blocks, 2)
    window = (window_pattern(blocks, radius) | prefix_pattern(blocks)).mask()[0]
    hub = global_pattern(blocks, hubs).mask()[0]
    axial = axial_pattern(height, width, prefix).mask()[0]

    def place(token: int) -> tuple[int, int]:
        return divmod(token - prefix, width)

    def block(token: int) -> int:
        y, x = place(token)
        return 0 if token < prefix else 1 + y // side * -(-width // side) + x // side

    tokens = range(prefix + height * width)
    for i, j in itertools.product(tokens, tokens):
        (y, x), (v, u) = place(i), place(j)
        edge = min(i, j) < prefix
        assert window[i, j] == (edge or max(abs(y // side - v // side), abs(x // side - u // side)) <= radius)
        assert hub[i, j] == (block(i) in hubs or block(j) in hubs)
        assert axial[i, j] == (edge or y == v or x == u)


def test_patterns_join_only_over_the_same_blocks() -> None:
    blocks = grid_blocks(4, 4, 1, 2)
    window, prefix = window_pattern(blocks, 0), prefix_pattern(blocks)
    assert torch.equal((window | prefix).mask(), window.mask() | prefix.mask())
    assert not no_pattern(blocks).sees.any()
    with pytest.raises(ValueError, match="patterns of 5 and 17 blocks are cut differently"):
        _ = window | axial_pattern(4, 4, 1)


def test_lists_and_edges_say_what_the_mask_says() -> None:
    blocks = grid_blocks(7, 5, 2, 3)
    free = np.ones((6, 6), dtype=bool)
    pattern = prefix_pattern(blocks) | random_pattern(blocks, free, 2, heads=3, seed=0)
    mask, (starts, keys) = torch.zeros_like(pattern.mask()), pattern.lists()
    members = [blocks.order[a:b] for a, b in itertools.pairwise(blocks.starts)]
    for head, query in itertools.product(range(3), range(len(blocks))):
        number = head * len(blocks) + query
        for key in keys[starts[number] : starts[number + 1]]:
            mask[head, members[query][:, None], members[key][None]] = True
    assert torch.equal(mask, pattern.mask())
    assert pattern.edges(3) == int(mask.sum())
    assert prefix_pattern(blocks).edges(3) == 3 * int(prefix_pattern(blocks).mask().sum())


def test_random_blocks_are_drawn_from_the_allowed_ones_and_fixed_by_the_seed() -> None:
    blocks = grid_blocks(12, 12, 1, 2)
    allowed = np.random.RandomState(0).random_sample((36, 36)) < 0.5
    allowed[7] = np.arange(36) < 2
    sees = random_pattern(blocks, allowed, 3, heads=4, seed=5).sees
    assert not sees[:, 0].any()
    assert not sees[:, :, 0].any()
    assert not (sees[:, 1:, 1:] & ~allowed).any()
    assert (sees[:, 1:, 1:].sum(-1) == np.minimum(3, allowed.sum(-1))).all()
    assert (sees[0] != sees[1]).any()
    assert np.array_equal(sees, random_pattern(blocks, allowed, 3, heads=4, seed=5).sees)
    assert (sees != random_pattern(blocks, allowed, 3, heads=4, seed=6).sees).any()
    # Saved models rely on these very blocks.
    free = np.ones((36, 36), dtype=bool)
    first = random_pattern(blocks, free, 3, heads=1, seed=5).sees[0, 1]
    assert np.flatnonzero(first).tolist() == [11, 31, 35]


def test_spread_blocks_lie_far_apart() -> None:
    assert spread(sequence_blocks(530, 1, 10), 3) == [1, 53, 27]
    assert spread(grid_blocks(12, 12, 0, 4), 5) == [1, 9, 3, 7, 5]
    assert sorted(spread(grid_blocks(6, 6, 0, 2), 99)) == list(range(1, 10))


@given(SIDES, SIDES, st.integers(0, 5), st.integers(1, 4), st.booleans(), st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_sparse_execution_equals_the_dense_mask(
    height: int, width: int, prefix: int, side: int, shared: bool, density: float, seed: int
) -> None:
    """Any pattern whatever, whole and empty rows included, with gradients."""
    blocks, random = grid_blocks(height, width, prefix, side), np.random.RandomState(seed)
    sees = random.random_sample((1 if shared else 2, len(blocks), len(blocks))) < density
    pattern = Pattern(blocks, sees | (random.random_sample((len(blocks), 1)) < 0.2))
    check_execution(pattern, seed)


def check_execution(pattern: Pattern, seed: int) -> None:
    torch.manual_seed(seed)
    N = pattern.blocks.tokens
    q, k = torch.randn(2, 2, 2, N, 8, requires_grad=True).unbind(0)
    v, weight = torch.randn(2, 2, N, 6, requires_grad=True), torch.randn(2, 2, N, 6)
    sparse = block_attention(q, k, v, plan(pattern, 2), scale=0.3)
    reference = dense(q, k, v, pattern.mask(), 0.3)
    torch.testing.assert_close(sparse, reference, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), mock.patch.object(execution, "_GATHERED", 40):
        piece_by_piece = block_attention(q, k, v, plan(pattern, 2), scale=0.3)
    torch.testing.assert_close(piece_by_piece, reference, atol=1e-5, rtol=1e-5)
    if not pattern.edges(2):
        return  # zeros, whatever the inputs: nothing to differentiate
    ours = torch.autograd.grad((sparse * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((reference * weight).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_quadratic_tensor_and_hardly_more_work_than_edges() -> None:
    blocks = grid_blocks(32, 32, 1, 4)
    pattern = window_pattern(blocks, 1) | prefix_pattern(blocks)
    q, k, v = torch.randn(3, 1, 2, 1025, 16).unbind(0)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in torch.utils._pytree.tree_leaves(out):
                if isinstance(value, Tensor):
                    self.numel = max(self.numel, value.numel())
            return out

    with torch.no_grad(), FlopCounterMode(display=False) as counter, Largest() as largest:
        block_attention(q, k, v, plan(pattern, 2), scale=1.0)
    assert largest.numel < 1025**2 / 4
    edges = pattern.edges(2)
    assert edges * 2 * 16 <= counter.get_total_flops() // 2 < 1.1 * edges * 2 * 16
    assert edges < 0.15 * 2 * 1025**2
