"""Foveal attention with scores of int8 numbers, against its definition (`sparse.bf16`), on every instruction set."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attendless
from attendless.errors import UserError
from attendless.sparse import bf16, foveal, native, operations
from attendless.sparse.dispatch import execution
from native_cases import Case, cases, every_path, needs_kernels, sweep, threads  # noqa: F401

pytestmark = needs_kernels


def of_int8(case: Case) -> Case:
    return dataclasses.replace(case, layout=dataclasses.replace(case.layout, int8=1))


@given(case=cases().map(of_int8), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
@sweep
def test_definition(path: str, case: Case, dtype: torch.dtype) -> None:
    *tensors, bias, places = case.tensors()
    q, k, v = (x.to(dtype) for x in tensors)
    more = (bias, places, case.sizes, 0.2)
    with threads(case.threads):
        out, _, chosen = native.functions.foveal(q, k, v, *more)
        assert torch.equal(native.functions.foveal_forward(q, k, v, *more), out)
    wanted = bf16.foveal_attend(q, k, v, chosen, case.layout, scale=0.2, key_bias=bias, places=places)
    assert out.dtype is wanted.dtype is dtype
    # A number just between two bytes may be rounded either way, which moves a score by 1/127 of a factor.
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.03 * float(v.abs().max()), rtol=0.02)
    if out.numel() >= 2000:
        assert (out - wanted).float().norm() <= 0.01 * wanted.float().norm()


def problem(side: int, shift: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], foveal.Layout]:
    draws = torch.Generator().manual_seed(side)
    q, k, v = torch.randn(3, 1, 2, side * side + 1, 64, generator=draws)
    k = k + shift * torch.randn(64, generator=draws)
    return [x.to(dtype) for x in (q, k, v)], foveal.layout(side, side, 1, keep=0.2)


@pytest.mark.parametrize("shift", [0.0, 20.0], ids=["centred", "large mean"])
def test_close_to_fp32(path: str, shift: float) -> None:
    tensors, layout = problem(24, shift)
    exact = native.functions.foveal_forward(*tensors, None, None, list(layout.sizes), 0.125)
    sizes = list(dataclasses.replace(layout, int8=1).sizes)
    rounded = native.functions.foveal_forward(*tensors, None, None, sizes, 0.125)
    error = float((rounded - exact).norm() / exact.norm())
    most = 0.1 if shift else 0.02  # bf16 itself is coarse for keys with a large mean
    assert 1e-4 < error < most, f"{error:.2%}"


def test_threads_change_nothing(path: str) -> None:
    tensors, layout = problem(16, dtype=torch.bfloat16)
    more = (None, None, list(dataclasses.replace(layout, int8=1).sizes), 0.125)
    with threads(1):
        alone = native.functions.foveal_forward(*tensors, *more)
    for count in (2, 3, 8):
        with threads(count):
            assert torch.equal(native.functions.foveal_forward(*tensors, *more), alone)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_not_a_number(path: str, number: float) -> None:
    (q, k, v), layout = problem(8)
    more = (None, None, list(dataclasses.replace(layout, int8=1).sizes), 0.125)
    q[0, 1, 5, 3] = number
    out = native.functions.foveal_forward(q, k, v, *more)
    assert out[0, 1, 5].isnan().all()
    assert out[0, 0].isfinite().all()


def test_no_gradient() -> None:
    (q, k, v), layout = problem(8)
    layout = dataclasses.replace(layout, int8=1)
    with pytest.raises(UserError, match="int8 has no gradient"):
        operations.foveal(q.requires_grad_(), k, v, layout, scale=0.1)
    q, plan = q.detach(), (None, None, list(layout.sizes), 0.1)
    out, lse, chosen = native.functions.foveal(q, k, v, *plan)
    with pytest.raises(UserError, match="no gradient"):
        native.functions.foveal_backward(out, q, k, v, out, lse, *plan, chosen, False)


def test_model() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2, num_classes=7).eval()
    x = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        exact = attendless.convert(model, "foveal:keep=0.2", below_breakeven="keep")(x)
        fast = attendless.convert(model, "foveal:keep=0.2,int8", below_breakeven="keep")
        close = fast(x)
        assert 0 < float((close - exact).norm() / exact.norm()) < 0.02
        with execution("off"):
            torch.testing.assert_close(fast(x), close, atol=0.02, rtol=0.02)
