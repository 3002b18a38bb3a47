"""The kernels as PyTorch operators: tracing, gradients, autocast, and the count of operations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attendless.errors import UserError
from attendless.sparse import blocks, foveal, native, patterns
from attendless.sparse.operations import foveal as attend
from native_cases import Case, close, needs_kernels

pytestmark = [
    needs_kernels,
    # opcheck looks at the gradients of tensors that have none yet.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CASE = Case(foveal.layout(6, 5, 2, keep=0.3, cell=2, tile=4, coarse=4), 2, 3, 24, 40, True, 0.8, 0)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias, places = CASE.tensors()
    return *(x.detach().requires_grad_() for x in (q, k, v, bias)), places


def _detached(x: object) -> object:
    return x.detach() if isinstance(x, Tensor) else x


def lists() -> list[Tensor]:
    grid = patterns.grid_blocks(4, 6, 2, 2)
    return blocks.block_lists(patterns.prefix_pattern(grid) | patterns.window_pattern(grid, 1))


def test_operators_keep_pytorchs_rules() -> None:
    q, k, v, bias, places = inputs()
    chosen = torch.ops.attendless.foveal_select(q, k, bias, places, CASE.sizes, 0.2)
    arguments = (bias, places, CASE.sizes, 0.2)
    torch.library.opcheck(torch.ops.attendless.foveal_select, (q, k, *arguments))
    torch.library.opcheck(torch.ops.attendless.foveal, (q, k, v, *arguments))
    torch.library.opcheck(torch.ops.attendless.foveal_forward, tuple(map(_detached, (q, k, v, *arguments))))
    torch.library.opcheck(torch.ops.attendless.foveal_attend, (q, k, v, None, *arguments[1:], chosen))
    torch.library.opcheck(torch.ops.attendless.block_attend, (q, k, v, bias, lists(), 0.2))


def test_gradients_flow() -> None:
    q, k, v, bias, places = inputs()
    leaves = (q, k, v, bias)
    seed = torch.randn(*v.shape)
    out, _, chosen = torch.ops.attendless.foveal(q, k, v, bias, places, CASE.sizes, 0.2)
    wanted = torch.autograd.grad(
        foveal.attend(q, k, v, chosen, CASE.layout, scale=0.2, key_bias=bias, places=places), leaves, seed
    )
    again, _ = torch.ops.attendless.foveal_attend(q, k, v, bias, places, CASE.sizes, 0.2, chosen)
    for result in (out, again):
        for ours, truth in zip(torch.autograd.grad(result, leaves, seed), wanted, strict=True):
            close(ours, truth, tolerance=1e-5)


def test_inference_keeps_nothing_and_says_so() -> None:
    q, k, v, bias, places = inputs()
    out = torch.ops.attendless.foveal_forward(q, k, v, bias, places, CASE.sizes, 0.2)
    assert torch.equal(out, torch.ops.attendless.foveal(q, k, v, bias, places, CASE.sizes, 0.2)[0])
    with pytest.raises(UserError, match=r"for inference\. To train, call foveal"):
        out.sum().backward()
    for grad in (True, False):  # the attention itself knows which it may use
        with torch.set_grad_enabled(grad):
            again = attend(q, k, v, CASE.layout, scale=0.2, key_bias=bias, places=places)
        assert torch.equal(again, out)
        assert again.requires_grad == grad


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        sizes = list(dataclasses.astuple(CASE.layout))
        return torch.ops.attendless.foveal(q, k, v, None, None, sizes, 0.2)[0].transpose(1, 2).flatten(2)


def test_export_traces_through() -> None:
    x = torch.randn(1, 32, 3, 2, 16)
    program = torch.export.export(Layer(), (x,))
    assert "attendless.foveal" in str(program.graph)
    assert torch.equal(program.module()(x), Layer()(x))


def test_compile_traces_through() -> None:
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    x, y = (torch.randn(1, 32, 3, 2, 16, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    x.requires_grad_(), y.requires_grad_()
    compiled(x).square().sum().backward()
    Layer()(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_autocast_computes_in_single_precision() -> None:
    q, k, v, bias, places = inputs()
    low = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, _, chosen = torch.ops.attendless.foveal(*low, bias, places, CASE.sizes, 0.2)
    wanted, _ = native.functions.foveal_attend(*(x.float() for x in low), bias, places, CASE.sizes, 0.2, chosen)
    assert torch.equal(out, wanted)


def test_operations_are_counted() -> None:
    plan = dataclasses.replace(CASE.layout, coarse=0)  # with one level the count is exact, not a bound
    q = torch.randn(2, 3, 32, 24, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out, _, _ = torch.ops.attendless.foveal(q, q, q, None, None, list(dataclasses.astuple(plan)), 0.2)
    assert forward.get_total_flops() == 2 * 2 * foveal.macs(plan, 3 * 24, 24)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    choosing = 2 * 2 * 3 * 24 * plan.tiles * plan.cells
    assert backward.get_total_flops() == 2.5 * (forward.get_total_flops() - choosing)


def test_block_operations_are_counted() -> None:
    q = torch.randn(2, 3, 26, 24)
    query_start, _, key_start, _ = lists()
    pairs = sum(int(a) * int(b) for a, b in zip(query_start.diff(), key_start.diff(), strict=True))
    with FlopCounterMode(display=False) as counter:
        torch.ops.attendless.block_attend(q, q, q, None, lists(), 0.2)
    assert counter.get_total_flops() == 2 * 2 * 3 * pairs * (24 + 24)
