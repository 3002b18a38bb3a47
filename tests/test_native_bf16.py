"""bfloat16 in the kernels: what they compute of the same numbers in 32 bits, rounded once.

Bit for bit: widening is exact, and between it and the last rounding nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import test_native_block
import test_native_gather
import test_native_sparsifiner
from attendless.sparse import blocks, native
from native_cases import Case, cases, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401

pytestmark = needs_kernels
#: Which of q, k and v are bfloat16: all of them, as a model has it, or some.
mixtures = st.sampled_from(["qkv", "qkv", "qkv", "q", "kv"])
special = st.sampled_from([torch.nan, torch.inf, -torch.inf, 3.38e38, 1e-40, -0.0])


def packed(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, H, N, ·] as a view of a tensor of three such, as a model's projection leaves them."""
    B, H, N, D = x.shape
    view = torch.empty(B, N, 3, H, D, dtype=dtype)[:, :, 1].transpose(1, 2)
    return view.copy_(x)


def both(tensors: tuple[Tensor, Tensor, Tensor], mixture: str) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v, those of the mixture in bfloat16; and the same numbers, all in 32 bits."""
    low = [packed(x) if name in mixture else x for name, x in zip("qkv", tensors, strict=True)]
    return low, [x.float() for x in low]


def same(low: Tensor, wide: Tensor, q: Tensor) -> None:
    assert low.dtype is q.dtype
    assert low.stride() == wide.stride()
    torch.testing.assert_close(low, wide.to(q.dtype), atol=0, rtol=0, equal_nan=True)


@given(case=cases(), mixture=mixtures)
@sweep
def test_foveal(path: str, case: Case, mixture: str) -> None:
    *tensors, bias, places = case.tensors()
    low, wide = both(tuple(tensors), mixture)
    more = (bias, places, case.sizes, 0.2)
    with threads(case.threads):
        out, lse, chosen = native.functions.foveal(*low, *more)
        wanted, exact, cells = native.functions.foveal(*wide, *more)
        same(out, wanted, low[0])
        assert torch.equal(lse, exact)
        assert torch.equal(chosen, cells)
        assert torch.equal(native.functions.foveal_select(*low[:2], *more), cells)
        assert torch.equal(native.functions.foveal_attend(*low, *more, chosen)[0], out)
        assert torch.equal(native.functions.foveal_forward(*low, *more), out)


@given(problem=test_native_block.problems(), mixture=mixtures, count=thread_counts)
@sweep
def test_block(path: str, problem: tuple, mixture: str, count: int) -> None:
    pattern, tensors, bias = problem
    low, wide = both(tensors, mixture)
    with threads(count):
        out, lse = native.functions.block_attend(*low, bias, blocks.block_lists(pattern), 0.3)
        wanted, exact = native.functions.block_attend(*wide, bias, blocks.block_lists(pattern), 0.3)
    same(out, wanted, low[0])
    assert torch.equal(lse, exact)


@given(problem=test_native_gather.problems(), mixture=mixtures)
@sweep
def test_gather(path: str, problem: test_native_gather.Lists, mixture: str) -> None:
    *tensors, bias, indices, counts = problem.tensors()
    low, wide = both(tuple(tensors), mixture)
    with threads(problem.threads):
        out, lse = native.functions.gather_attend(*low, bias, indices, counts, 0.2)
        wanted, exact = native.functions.gather_attend(*wide, bias, indices, counts, 0.2)
    same(out, wanted, low[0])
    assert torch.equal(lse, exact)


@given(case=test_native_sparsifiner.cases(), mixture=mixtures)
@sweep
def test_sparsifiner(path: str, case: test_native_sparsifiner.Case, mixture: str) -> None:
    tensors = case.tensors()
    low, wide = both((tensors["q"], tensors["k"], tensors["v"]), mixture)

    def run(qkv: list[Tensor]) -> Tensor:
        given = tensors | dict(zip("qkv", qkv, strict=True))
        return native.functions.sparsifiner(*test_native_sparsifiner.arguments(given, case))

    with threads(case.threads):
        same(run(low), run(wide), low[0])


@given(case=cases(longest=6), put=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**20), special), max_size=4))
@sweep
def test_what_is_not_finite_passes_as_in_32_bits(path: str, case: Case, put: list) -> None:
    *tensors, bias, places = case.tensors()
    low, _ = both(tuple(tensors), "qkv")
    for which, where, what in put:
        x = low[which]
        x[torch.unravel_index(torch.tensor(where % x.numel()), x.shape)] = what
    out = native.functions.foveal_forward(*low, bias, places, case.sizes, 0.2)
    same(out, native.functions.foveal_forward(*(x.float() for x in low), bias, places, case.sizes, 0.2), out)


def look_at(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Each query of `dtype` sees one key: its value comes out as it is, in that type."""
    q = torch.zeros(*v.shape[:3], 8, dtype=dtype)
    itself = torch.arange(v.shape[2], dtype=torch.int32).expand(1, 1, -1)[..., None]
    return native.functions.gather_attend(q, q, v, None, itself, None, 1.0)[0]


def test_every_bfloat16_is_widened(path: str) -> None:
    v = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(1, 1, -1, 64)
    torch.testing.assert_close(look_at(v, torch.float32), v.float(), atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(look_at(v, torch.bfloat16), v, atol=0, rtol=0, equal_nan=True)


def test_results_are_rounded_to_the_nearest(path: str) -> None:
    """Next to every bfloat16: halves of its last place, numbers that become infinite, NaNs that would."""
    upper, lower = torch.arange(-(2**15), 2**15), torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    v = (upper * 2**16 + lower[:, None]).int().view(torch.float32).view(1, 1, -1, 64)
    torch.testing.assert_close(look_at(v, torch.bfloat16), v.bfloat16(), atol=0, rtol=0, equal_nan=True)


def forwards() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    lists = [torch.tensor(x, dtype=torch.int32) for x in ([0, 16], list(range(16)), [0, 16], list(range(16)))]
    indices = torch.arange(16, dtype=torch.int32).expand(1, 2, 16, 16)
    guess = (torch.rand(1, 2, 16, 3), torch.rand(3, 16), None, None, None, 4, 1, 0.0, 0, 0.2)
    return {
        "foveal": lambda q, k, v: native.functions.foveal_forward(q, k, v, None, None, [4, 4, 0, 2, 2, 0, 2, 1], 0.2),
        "block": lambda q, k, v: native.functions.block_attend(q, k, v, None, lists, 0.2)[0],
        "gather": lambda q, k, v: native.functions.gather_attend(q, k, v, None, indices, None, 0.2)[0],
        "sparsifiner": lambda q, k, v: native.functions.sparsifiner(q, k, v, None, *guess),
    }


@pytest.mark.parametrize("name", forwards())
def test_nothing_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(1, 16, 3, 2, 8).bfloat16().permute(2, 0, 3, 1, 4)
    run = forwards()[name]
    for way in ("float", "to", "contiguous", "clone"):
        real = getattr(Tensor, way)

        def watched(x: Tensor, *arguments: object, real: Callable[..., Tensor] = real) -> Tensor:
            assert x.dtype is not torch.bfloat16, "a copy"
            return real(x, *arguments)

        monkeypatch.setattr(Tensor, way, watched)
    out = run(q, k, v)
    assert out.dtype is torch.bfloat16
    assert out.transpose(1, 2).is_contiguous(), "so that joining the heads costs nothing"


def test_gradients_are_those_of_32_bits_rounded(path: str) -> None:
    q, k, v = torch.randn(1, 16, 3, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16().permute(2, 0, 3, 1, 4)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sizes = [4, 4, 0, 2, 2, 0, 2, 1]
    out, lse, chosen = torch.ops.attendless.foveal(*leaves, None, None, sizes, 0.2)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = torch.autograd.grad(out, leaves, seed)
    wide = [x.detach().float() for x in (seed, q, k, v, out)]
    wanted = native.functions.foveal_backward(*wide, lse, None, None, sizes, 0.2, chosen, False)
    for gradient, truth in zip(ours, wanted[:3], strict=True):
        assert torch.equal(gradient, truth.bfloat16())
