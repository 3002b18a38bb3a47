"""Attention over fixed lists of keys against dense attention with the pattern as a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from attendless.errors import UserError
from attendless.sparse import blocks, native, patterns
from native_cases import close, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401

pytestmark = needs_kernels


@st.composite
def problems(draw: st.DrawFn) -> tuple[patterns.Pattern, tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Blocks of any size, each seeing others at random, in all heads alike or each for itself; some see nothing."""
    sides = st.integers(1, 9) | st.integers(9, 20)
    height, width, prefix = draw(sides), draw(sides), draw(st.integers(0, 2))
    blocks = patterns.grid_blocks(height, width, prefix, draw(st.integers(1, 6)))
    B, H = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    sees = random.random((draw(st.sampled_from([1, H])), len(blocks), len(blocks))) < draw(st.sampled_from([0.3, 1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    widths = [draw(st.sampled_from([3, 16, 64]))] * 2 + [draw(st.sampled_from([2, 16, 48]))]
    tensors = tuple(torch.randn(B, H, prefix + height * width, d, generator=generator) for d in widths)
    bias = torch.rand(B, prefix + height * width, generator=generator) if draw(st.booleans()) else None
    return patterns.Pattern(blocks, sees), tensors, bias


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pattern: patterns.Pattern) -> Tensor:
    """In 64 bits: the rounding of a reference is not to be judged."""
    mask = torch.zeros(pattern.mask().shape)[None] if bias is None else bias[:, None, None]
    mask = mask.double().where(pattern.mask(), -torch.inf)
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, scale=0.3).float()


@given(problem=problems(), count=thread_counts)
@sweep
def test_attends_and_differentiates_as_dense_with_a_mask(path: str, problem: tuple, count: int) -> None:
    pattern, tensors, bias = problem
    lists = blocks.block_lists(pattern)
    leaves = [x.requires_grad_() for x in (*tensors, bias) if x is not None]
    expected = masked(*tensors, bias, pattern)
    with threads(count):
        out, lse = native.functions.block_attend(*tensors, bias, lists, 0.3)
    close(out, expected)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, leaves, seed)
    with threads(count):
        ours = native.functions.block_backward(seed, *tensors, out, lse, bias, lists, 0.3, bias is not None)
    for gradient, truth in zip(ours[: len(leaves)], wanted, strict=True):
        close(gradient, truth, tolerance=5e-5)


def test_says_what_is_wrong() -> None:
    q = torch.randn(1, 1, 4, 16)

    def attend(*lists: list[int]) -> None:
        native.functions.block_attend(q, q, q, None, [torch.tensor(x) for x in lists], 1.0)

    attend([0, 2, 4], [0, 1, 2, 3], [0, 1, 3], [3, 0, 2])
    with pytest.raises(UserError, match="every token"):
        attend([0, 2, 3], [0, 1, 2], [0, 1, 3], [3, 0, 2])
    with pytest.raises(UserError, match="every token"):
        attend([0, 2, 4], [0, 1, 1, 3], [0, 1, 3], [3, 0, 2])
    with pytest.raises(UserError, match="keys must be tokens, from 0 to 3"):
        attend([0, 2, 4], [0, 1, 2, 3], [0, 1, 3], [4, 0, 2])
    with pytest.raises(UserError, match="a list of keys for each tile"):
        attend([0, 2, 4], [0, 1, 2, 3], [0, 3], [3, 0, 2])
    with pytest.raises(UserError, match="start at 0"):
        attend([0, 2, 4], [0, 1, 2, 3], [0, 1, 9], [3, 0, 2])
