"""Every operation gives the same bits for any number of threads, with one head or many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attendless.sparse import foveal, native
from native_cases import every_path, needs_kernels, threads  # noqa: F401

pytestmark = needs_kernels

SIDE, PREFIX, WIDTH, SCALE = 13, 2, 40, 0.2
TOKENS = PREFIX + SIDE * SIDE
Run = Callable[[], tuple[Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operations(heads: int, dtype: torch.dtype) -> dict[str, Run]:
    """Each operation of q, k and v in this type; in fp32 with its gradients."""
    call = native.functions
    q, k, v = (draw(1, heads, TOKENS, WIDTH, seed=i).to(dtype) for i in range(3))
    out_grad, coefficients = draw(1, heads, TOKENS, WIDTH, seed=3), draw(1, heads, TOKENS, 8, seed=4)
    layout = list(foveal.layout(SIDE, SIDE, PREFIX, keep=0.2, cell=2, tile=4, coarse=4).sizes)
    every = torch.arange(TOKENS, dtype=torch.int32)
    # One tile of all queries and one of none: fewer tiles than threads.
    lists = [torch.tensor(x, dtype=torch.int32) for x in ([0, TOKENS, TOKENS], [0, TOKENS, TOKENS])]
    lists = [lists[0], every, lists[1], every]
    near = (every[:, None] + every[:7]).remainder(TOKENS).expand(1, heads, TOKENS, 7).contiguous()
    basis, share = draw(8, TOKENS, seed=5).relu(), torch.softmax(draw(TOKENS, 8, seed=6), 0)
    tail = (draw(1, heads, TOKENS, 8, seed=7), draw(1, heads, 8, WIDTH, seed=8), share)

    def foveal_() -> tuple[Tensor, ...]:
        if dtype is not torch.float32:
            return (call.foveal_forward(q, k, v, None, None, layout, SCALE),)
        out, lse, chosen = call.foveal(q, k, v, None, None, layout, SCALE)
        grads = call.foveal_backward(out_grad, q, k, v, out, lse, None, None, layout, SCALE, chosen, False)
        return out, lse, chosen, *grads

    def block() -> tuple[Tensor, ...]:
        out, lse = call.block_attend(q, k, v, None, lists, SCALE)
        if dtype is not torch.float32:
            return out, lse
        return out, lse, *call.block_backward(out_grad, q, k, v, out, lse, None, lists, SCALE, False)

    def gather() -> tuple[Tensor, ...]:
        out, lse = call.gather_attend(q, k, v, None, near, None, SCALE)
        if dtype is not torch.float32:
            return out, lse
        return out, lse, *call.gather_backward(out_grad, q, k, v, out, lse, None, near, None, SCALE, False)

    def sparsifiner() -> tuple[Tensor, ...]:
        return (call.sparsifiner(q, k, v, None, coefficients, basis, *tail, 9, PREFIX, 0.0, 0, SCALE),)

    return {"foveal": foveal_, "block": block, "gather": gather, "sparsifiner": sparsifiner}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_any_number_of_threads_gives_the_same_bits(path: str, heads: int, dtype: torch.dtype) -> None:
    for name, run in operations(heads, dtype).items():
        with threads(1):
            alone = run()
        for count in (2, 3, 8, 24):
            with threads(count):
                shared = run()
            assert all(map(torch.equal, alone, shared)), (name, count)


def test_a_table_larger_than_caches(path: str) -> None:
    """Rows are then prefetched: 4,352 rows of 1,024 numbers; each query sees its window of 100 keys."""
    tokens, width, window, tile = 4352, 512, 100, 64
    q, k, v = (draw(1, 1, tokens, width, seed=i) for i in range(3))
    starts = torch.arange(0, tokens + 1, tile, dtype=torch.int32)
    windows = [
        range(min(first, tokens - window), min(first, tokens - window) + window) for first in starts[:-1].tolist()
    ]
    keys = torch.tensor([list(seen) for seen in windows], dtype=torch.int32)
    ends = torch.arange(0, keys.numel() + 1, window, dtype=torch.int32)
    lists = [starts, torch.arange(tokens, dtype=torch.int32), ends, keys.flatten()]
    out = native.functions.block_attend(q, k, v, None, lists, 0.05)[0]
    seen_k, seen_v = (x[0, 0][keys.long()] for x in (k, v))  # [tiles, window, width]
    scores = 0.05 * q.view(-1, tile, width) @ seen_k.mT
    torch.testing.assert_close(out.view(-1, tile, width), scores.softmax(-1) @ seen_v, atol=2e-5, rtol=1e-4)
