"""The foveal kernels against the definition in PyTorch, on every instruction set."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from torch import Tensor
from torch.nn import functional as F

from attendless.errors import UserError
from attendless.sparse import foveal, native
from native_cases import Case, cases, close, every_path, needs_kernels, sweep, threads  # noqa: F401

pytestmark = needs_kernels
ONE_TOKEN = Case(foveal.layout(1, 1, 0, keep=0.1, cell=4, tile=4, coarse=8), 1, 1, 16, 16, False, 1.0, 0)
SMALLER_THAN_A_CELL = Case(foveal.layout(3, 2, 1, keep=0.1, cell=4, tile=2, coarse=4), 1, 2, 16, 16, True, 1.0, 0)
DEIT = Case(foveal.layout(14, 14, 1, keep=0.1, cell=2, tile=4, coarse=4), 2, 3, 64, 64, False, 1.0, 0)


def reference(case: Case, chosen: Tensor, tensors: tuple) -> Tensor:
    q, k, v, bias, places = tensors
    scale = case.width**-0.5
    return foveal.attend(q, k, v, chosen, case.layout, scale=scale, key_bias=bias, places=places)


@given(case=cases())
@example(case=ONE_TOKEN)
@example(case=SMALLER_THAN_A_CELL)
@example(case=DEIT)
@sweep
def test_attends_as_defined(path: str, case: Case) -> None:
    q, k, v, bias, places = tensors = case.tensors()
    scale = case.width**-0.5
    with threads(case.threads):
        out, _, chosen = native.functions.foveal(q, k, v, bias, places, case.sizes, scale)
        close(out, reference(case, chosen, tensors))
        assert torch.equal(native.functions.foveal_forward(q, k, v, bias, places, case.sizes, scale), out)
        given = foveal.select(q, k, case.layout, scale=scale, key_bias=bias, places=places)
        out, _ = native.functions.foveal_attend(q, k, v, bias, places, case.sizes, scale, given)
        close(out, reference(case, given, tensors))


@given(case=cases())
@example(case=ONE_TOKEN)
@example(case=DEIT)
@sweep
def test_chooses_the_best_cells(path: str, case: Case) -> None:
    """Sums run in another order, so two cells may swap places; what is chosen must be as good up to rounding."""
    q, k, _, bias, places = case.tensors()
    plan, P, scale = case.layout, case.layout.prefix, case.width**-0.5
    with threads(case.threads):
        chosen = native.functions.foveal_select(q, k, bias, places, case.sizes, scale).long()
    assert (chosen[..., 1:] > chosen[..., :-1]).all()
    weight = None if bias is None else bias[:, P:].exp()
    k_mean, count = foveal.blur(k[:, :, P:], foveal.block_of(plan, plan.cell, places), plan.cells, weight)
    q_mean, _ = foveal.blur(q[:, :, P:], foveal.block_of(plan, plan.tile, places), plan.tiles)
    score = (scale * q_mean @ k_mean.transpose(-2, -1)).masked_fill(count[:, None, None].isinf(), -100)
    score = score.masked_fill(foveal.own_cells(plan), 100)
    best = score.sort(dim=-1, descending=True).values[..., : plan.budget]
    close(score.gather(-1, chosen).sort(dim=-1, descending=True).values, best)


@given(case=cases(longest=7))
@example(case=DEIT)
@sweep
def test_gradients_as_defined(path: str, case: Case) -> None:
    leaves = [x for x in case.tensors() if x is not None and x.is_floating_point()]
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v, bias = [*leaves, None][:4]
    places, scale = case.tensors()[4], case.width**-0.5
    with threads(case.threads):
        out, lse, chosen = native.functions.foveal(q, k, v, bias, places, case.sizes, scale)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        expected = torch.autograd.grad(reference(case, chosen, (q, k, v, bias, places)), leaves, seed)
        ours = native.functions.foveal_backward(
            seed, q, k, v, out, lse, bias, places, case.sizes, scale, chosen, bias is not None
        )
        for gradient, wanted in zip(ours[: len(leaves)], expected, strict=True):
            close(gradient, wanted, tolerance=5e-5)


def test_every_cell_chosen_is_full_attention(path: str) -> None:
    case = dataclasses.replace(DEIT, layout=foveal.layout(14, 14, 1, keep=1.0, cell=2, tile=4, coarse=0))
    q, k, v, bias, places = case.tensors()
    out, lse, _ = native.functions.foveal(q, k, v, bias, places, case.sizes, 0.125)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, torch.logsumexp(0.125 * q @ k.transpose(-2, -1), -1), atol=2e-6, rtol=1e-6)


def test_every_cell_chosen_though_some_are_empty(path: str) -> None:
    """Found by a gap behind scratch memory: padding was listed too, over its end."""
    case = dataclasses.replace(DEIT, layout=foveal.layout(14, 14, 1, keep=1.0, cell=2, tile=4, coarse=4), reduced=0.1)
    q, k, v, bias, places = tensors = case.tensors()
    out, _, chosen = native.functions.foveal(q, k, v, bias, places, case.sizes, 0.125)
    assert torch.equal(chosen[0, 0, 0], torch.arange(49, dtype=torch.int32))
    close(out, reference(case, chosen, tensors))


def test_ties_go_to_the_lower_cell(path: str) -> None:
    case = dataclasses.replace(DEIT, layout=foveal.layout(14, 14, 0, keep=0.3, cell=2, tile=4, coarse=0))
    q, k, _, _, _ = case.tensors()
    for same in (torch.zeros_like(k), -torch.zeros_like(k), torch.ones_like(k)):
        chosen = native.functions.foveal_select(q, same, None, None, case.sizes, 1.0)
        assert torch.equal(chosen, foveal.select(q, same, case.layout, scale=1.0))


def test_takes_any_strides(path: str) -> None:
    q, k, v, _, _ = DEIT.tensors()
    wanted, _, chosen = native.functions.foveal(*(x.contiguous() for x in (q, k, v)), None, None, DEIT.sizes, 0.125)
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    sliced = [torch.cat([x, x], 3)[..., : x.shape[3]] for x in (q, k, v)]
    for views in (columns, sliced):
        out, _, again = native.functions.foveal(*views, None, None, DEIT.sizes, 0.125)
        assert torch.equal(out, wanted)
        assert torch.equal(chosen, again)
    assert wanted.transpose(1, 2).is_contiguous()  # joining the heads is a view
    same = v[:1, :1].expand_as(v)
    out, _, _ = native.functions.foveal(q, k, same, None, None, DEIT.sizes, 0.125)
    close(out, reference(DEIT, chosen, (q, k, same, None, None)))


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("order", [0, 1])
def test_what_is_not_a_number_shows_as_in_dense(path: str, where: str, value: float, order: int) -> None:
    """To first order differences from a mean are taken, and what was infinite is no number any more."""
    case = dataclasses.replace(DEIT, layout=dataclasses.replace(DEIT.layout, order=order))
    tensors = dict(zip("qkv", (x.clone() for x in DEIT.tensors()[:3]), strict=True))
    tensors[where][0, 1, 37, 5] = value
    q, k, v = tensors.values()
    out, _, chosen = native.functions.foveal(q, k, v, None, None, case.sizes, 0.125)
    dense = F.scaled_dot_product_attention(q, k, v)
    expected = reference(case, chosen, (q, k, v, None, None))
    odd = ~dense.isfinite()
    assert odd.any()
    if order:
        assert not out[odd].isfinite().any()
        odd = ~expected.isfinite()
        assert torch.equal(~out.isfinite(), odd)
    else:
        torch.testing.assert_close(out[odd], dense[odd], equal_nan=True)
    close(out[~odd], expected[~odd])


def test_huge_scores(path: str) -> None:
    q, k, v, _, _ = DEIT.tensors()
    out, _, chosen = native.functions.foveal(300 * q, k, v, None, None, DEIT.sizes, 1.0)
    expected = foveal.attend(300 * q, k, v, chosen, DEIT.layout, scale=1.0)
    torch.testing.assert_close(out, expected, atol=3e-3, rtol=0)  # scores of 10⁴ carry errors of 10⁻³


def test_keys_that_stand_for_nothing_vanish(path: str) -> None:
    q, k, v, _, _ = DEIT.tensors()
    bias = torch.zeros(q.shape[0], q.shape[2])
    bias[:, 5:150] = -torch.inf
    out, _, chosen = native.functions.foveal(q, k, v, bias, None, DEIT.sizes, 0.125)
    close(out, foveal.attend(q, k, v, chosen, DEIT.layout, scale=0.125, key_bias=bias))
    nothing = torch.full_like(bias, -torch.inf)
    out, lse, chosen = native.functions.foveal(q, k, v, nothing, None, DEIT.sizes, 0.125)
    assert (out == 0).all(), "as PyTorch's own attention does"
    arguments = (q, k, v, out, lse, nothing, None, DEIT.sizes, 0.125, chosen)
    assert all((g == 0).all() for g in native.functions.foveal_backward(torch.ones_like(out), *arguments, True))


def test_same_numbers_every_time_and_on_any_number_of_threads(path: str) -> None:
    q, k, v, _, _ = DEIT.tensors()

    def everything() -> list[Tensor]:
        out, lse, chosen = native.functions.foveal(q, k, v, None, None, DEIT.sizes, 0.125)
        arguments = (q, k, v, out, lse, None, None, DEIT.sizes, 0.125, chosen)
        return [out, lse, chosen, *native.functions.foveal_backward(out, *arguments, False)[:3]]

    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(everything())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_other_types_are_computed_in_single_precision() -> None:
    q, k, v, _, _ = DEIT.tensors()
    wanted, _, chosen = native.functions.foveal(q, k, v, None, None, DEIT.sizes, 0.125)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low = [x.to(dtype) for x in (q, k, v)]
        out, lse = native.functions.foveal_attend(*low, None, None, DEIT.sizes, 0.125, chosen)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.05)


def test_says_what_is_wrong() -> None:
    q, k, v, _, _ = DEIT.tensors()
    attend, both, sizes = native.functions.foveal_attend, native.functions.foveal, DEIT.sizes
    chosen = native.functions.foveal_select(q, k, None, None, sizes, 0.125)
    with pytest.raises(UserError, match="ascending"):
        attend(q, k, v, None, None, sizes, 0.125, chosen.flip(-1))
    with pytest.raises(UserError, match="ascending"):
        attend(q, k, v, None, None, sizes, 0.125, chosen + DEIT.layout.cells)
    with pytest.raises(UserError, match="197 tokens, q has 196"):
        both(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], None, None, sizes, 0.125)
    with pytest.raises(UserError, match="k has another shape"):
        both(q, k[..., 1:], v, None, None, sizes, 0.125)
    with pytest.raises(UserError, match="place 196"):
        both(q, k, v, None, torch.full((2, 196), 196), sizes, 0.125)
    with pytest.raises(UserError, match="order must be 0 or 1, not 2"):
        both(q, k, v, None, None, [*sizes[:7], 2], 0.125)
    with pytest.raises(UserError, match="budget of 50"):
        both(q, k, v, None, None, [*sizes[:6], 50, 1], 0.125)
