"""bfloat16 in the kernels, against its definition (`sparse.bf16`), on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import test_native_block
import test_native_gather
import test_native_sparsifiner
from attendless.sparse import bf16, blocks, foveal, native, topk
from bf16_cases import same_rounding
from native_cases import Case, cases, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401

pytestmark = needs_kernels
#: Which of k and v are bfloat16 besides q, which decides: all of them, as a model has it, or some.
mixtures = st.sampled_from(["qkv", "qkv", "qkv", "q", "qv"])
special = st.sampled_from([torch.nan, torch.inf, -torch.inf, -0.0])


def packed(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, H, N, ·] as a view of a tensor of three such, as a model's projection leaves them."""
    B, H, N, D = x.shape
    view = torch.empty(B, N, 3, H, D, dtype=dtype)[:, :, 1].transpose(1, 2)
    return view.copy_(x)


def low(tensors: tuple[Tensor, ...], mixture: str = "qkv") -> list[Tensor]:
    """q, k and v, those of the mixture in bfloat16."""
    return [packed(x) if name in mixture else x for name, x in zip("qkv", tensors, strict=True)]


@given(case=cases(), mixture=mixtures)
@sweep
def test_foveal(path: str, case: Case, mixture: str) -> None:
    *tensors, bias, places = case.tensors()
    q, k, v = low(tuple(tensors), mixture)
    more = (bias, places, case.sizes, 0.2)
    with threads(case.threads):
        out, _, chosen = native.functions.foveal(q, k, v, *more)
        assert torch.equal(native.functions.foveal_select(q, k, *more), chosen)
        assert torch.equal(native.functions.foveal_attend(q, k, v, *more, chosen)[0], out)
        assert torch.equal(native.functions.foveal_forward(q, k, v, *more), out)
        same = [x.bfloat16().float() for x in (q, k)]
        assert torch.equal(native.functions.foveal_select(*same, *more), chosen), "cells are chosen in fp32"
    wanted = bf16.foveal_attend(q, k, v, chosen, case.layout, scale=0.2, key_bias=bias, places=places)
    same_rounding(out, wanted, float(v.abs().max()))


@given(case=cases(longest=6))
@sweep
def test_cells_are_chosen_as_by_the_definition(path: str, case: Case) -> None:
    *tensors, bias, places = case.tensors()
    q, k, _ = low(tuple(tensors))
    ours = native.functions.foveal_select(q, k, bias, places, case.sizes, 0.2)
    wanted = foveal.select(q, k, case.layout, scale=0.2, key_bias=bias, places=places)
    assert (ours == wanted).float().mean() > 0.9, "but for near-ties"


@given(problem=test_native_block.problems(), mixture=mixtures, count=thread_counts)
@sweep
def test_block(path: str, problem: tuple, mixture: str, count: int) -> None:
    pattern, tensors, bias = problem
    q, k, v = low(tensors, mixture)
    with threads(count):
        out, _ = native.functions.block_attend(q, k, v, bias, blocks.block_lists(pattern), 0.3)
    mask = torch.zeros(pattern.mask().shape)[None].masked_fill(~pattern.mask(), -torch.inf)
    if bias is not None:
        mask = mask + bias[:, None, None]
    same_rounding(out, bf16.attend(q, k, v, mask, scale=0.3).bfloat16(), float(v.abs().max()))


@pytest.mark.parametrize("tokens", [1, 47, 48, 49, 197])
@pytest.mark.parametrize("width", [1, 7, 33, 64])
def test_full(path: str, tokens: int, width: int) -> None:
    draws = torch.Generator().manual_seed(tokens)
    q, k, v = low(tuple(torch.randn(3, 2, 3, tokens, width, generator=draws)))
    bias = torch.randn(2, tokens, generator=draws)
    every = torch.arange(tokens, dtype=torch.int32)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    out, lse = native.functions.block_attend(q, k, v, bias, [ends, every, ends, every], 0.5)
    same_rounding(out, bf16.full(q, k, v, scale=0.5, key_bias=bias), float(v.abs().max()))
    scores = 0.5 * q.float() @ k.float().mT + bias[:, None, None]
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=2**-8, rtol=0)


@given(problem=test_native_gather.problems(), mixture=mixtures)
@sweep
def test_gather(path: str, problem: test_native_gather.Lists, mixture: str) -> None:
    *tensors, bias, indices, counts = problem.tensors()
    q, k, v = low(tuple(tensors), mixture)
    with threads(problem.threads):
        out, _ = native.functions.gather_attend(q, k, v, bias, indices, counts, 0.2)
    wanted = bf16.gather_attend(q, k, v, indices, counts, scale=0.2, key_bias=bias)
    same_rounding(out, wanted, float(v.abs().max()))


@given(case=test_native_sparsifiner.cases(), mixture=mixtures)
@sweep
def test_sparsifiner(path: str, case: test_native_sparsifiner.Case, mixture: str) -> None:
    """The tail as well: `topk.seen` computes it from averages, the kernel is given it."""
    tensors = case.tensors()
    q, k, v = low((tensors["q"], tensors["k"], tensors["v"]), mixture)
    given = tensors | {"q": q, "k": k, "v": v}
    arguments = test_native_sparsifiner.arguments(given, case)
    limits = (case.budget, case.prefix, 0.0, 0)
    with threads(case.threads):
        out = native.functions.sparsifiner(*arguments)
        lists = native.functions.sparsifiner_select(given["coefficients"], given["basis"], *limits)
    chosen = topk.unlisted(*lists, case.tokens, case.prefix)
    scores = test_native_sparsifiner.SCALE * q.float() @ bf16.rounded(k).mT
    if given["key_bias"] is not None:
        scores = scores + given["key_bias"][:, None, None]
    scores, values = scores.masked_fill(~chosen, -torch.inf), v.float()
    if case.tail:
        share = given["share"] if case.own else given["share"][None]
        total = share.sum(1)[:, None, None]
        left = total - chosen.float() @ share[:, None]
        left[:, :, : case.prefix] = 0
        tail = (given["tail_scores"] + left.log()).masked_fill(left <= 1e-4 * total, -torch.inf)
        scores, values = torch.cat([scores, tail], -1), torch.cat([values, given["tail_values"]], 2)
    wanted = (bf16.weigh(scores) @ bf16.rounded(values)).bfloat16()
    same_rounding(out, wanted, float(values.abs().max()))


@given(case=cases(longest=6), put=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**20), special), max_size=4))
@sweep
def test_what_is_not_finite_passes_as_in_32_bits(path: str, case: Case, put: list) -> None:
    *tensors, bias, places = case.tensors()
    given = low(tuple(tensors))
    for which, where, what in put:
        x = given[which]
        x[torch.unravel_index(torch.tensor(where % x.numel()), x.shape)] = what
    out = native.functions.foveal_forward(*given, bias, places, case.sizes, 0.2)
    wide = native.functions.foveal_forward(*(x.float() for x in given), bias, places, case.sizes, 0.2)
    assert torch.equal(out.isnan(), wide.isnan())


@pytest.mark.parametrize("shift", [-30, 1, 7])
def test_weights_are_rounded_alike_whatever_the_largest_score(path: str, shift: int) -> None:
    """Powers of two for all keys change no weight; keys far below the largest come first, so the kernel rescales."""
    q, k, v = low(tuple(torch.randn(3, 1, 1, 200, 16, generator=torch.Generator().manual_seed(0))))
    bias = torch.linspace(-40, 0, 200)[None]
    every, ends = torch.arange(200, dtype=torch.int32), torch.tensor([0, 200], dtype=torch.int32)

    def run(bias: Tensor) -> Tensor:
        return native.functions.block_attend(q, k, v, bias, [ends, every, ends, every], 0.3)[0]

    same_rounding(run(bias + shift * math.log(2)), run(bias))
    same_rounding(run(bias), bf16.full(q, k, v, scale=0.3, key_bias=bias))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_threads_change_nothing(path: str, count: int) -> None:
    q, k, v = low(tuple(torch.randn(3, 1, 2, 257, 64, generator=torch.Generator().manual_seed(0))))
    more = (None, None, [16, 16, 1, 2, 4, 4, 8, 1], 0.125)
    with threads(1):
        alone = native.functions.foveal_forward(q, k, v, *more)
    with threads(count):
        assert torch.equal(native.functions.foveal_forward(q, k, v, *more), alone)


def look_at(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Each query of `dtype` sees one key: its value comes out as it is, in that type."""
    q = torch.zeros(*v.shape[:3], 8, dtype=dtype)
    itself = torch.arange(v.shape[2], dtype=torch.int32).expand(1, 1, -1)[..., None]
    return native.functions.gather_attend(q, q, v, None, itself, None, 1.0)[0]


def normal(x: Tensor, path: str) -> Tensor:
    """x as the instructions for bfloat16 read it: they take numbers below 2⁻¹²⁶ for zero."""
    return x.where(x.isnan() | (x.abs() >= 2.0**-126), 0 * x.sign()) if path == "avx512bf16" else x


def test_every_bfloat16_is_widened(path: str) -> None:
    v = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(1, 1, -1, 64)
    torch.testing.assert_close(look_at(v, torch.float32), v.float(), atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(look_at(v, torch.bfloat16), normal(v, path), atol=0, rtol=0, equal_nan=True)


def test_results_are_rounded_to_the_nearest(path: str) -> None:
    """Next to every bfloat16: halves of its last place, numbers that become infinite, NaNs that would."""
    upper, lower = torch.arange(-(2**15), 2**15), torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    v = (upper * 2**16 + lower[:, None]).int().view(torch.float32).view(1, 1, -1, 64)
    wanted = normal(normal(v, path).bfloat16(), path)
    torch.testing.assert_close(look_at(v, torch.bfloat16), wanted, atol=0, rtol=0, equal_nan=True)


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
