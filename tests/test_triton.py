"""Foveal attention's Triton kernel equals the definition, in Triton's interpreter; and it compiles for a GPU.

Triton decides on import whether it interprets, so the comparisons run in a process of their own: this file again.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from attendless import execution
from attendless.sparse import foveal, operations
from attendless.sparse.backend import Case, backend

pytest.importorskip("triton")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the child process")
here = pytest.mark.skipif(INTERPRETING, reason="runs in the parent process")


@here
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    child = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout[-3000:]
    assert child.stdout.split()[0].count(".") >= 12, child.stdout  # it ran them


@here
def test_on_a_cpu_it_refuses_and_others_compute() -> None:
    layout = foveal.layout(4, 4, 1, keep=0.3, cell=2, tile=2)
    case = Case("foveal", layout, 1, 1, 16)
    assert "interpreter" in backend("foveal", "triton").refuses(case)
    q, k, v = torch.randn(3, 1, 1, 17, 16).unbind(0)
    with execution("triton"):
        out = operations.foveal(q, k, v, layout, scale=0.25)
    torch.testing.assert_close(out, definition(q, k, v, layout))


@here
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_compiles_for_a_gpu_that_is_not_there(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or some versions warn
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attendless.sparse.backends import triton as ours

    kernel = ours._kernel()
    numbers = {"tile_start", "by_tile", "cell_start", "by_cell", "chosen"}
    sizes = {"ONE_ORDER": True, "BIASED": True, "LEVELS": 2, "QUERIES": 16, "CELL": 4, "KEYS": 64}
    sizes |= {"WIDTH": 64, "VALUES": 64}
    types = dict.fromkeys(("q", "k", "v", "result", "k_mean", "v_mean", "slopes"), f"*{dtype}")
    types |= dict.fromkeys(numbers, "*i32") | {"log_count": "*fp32", "key_bias": "*fp32", "blurred": "*i8"}
    types |= {"scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
    found = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32))
    assert found.metadata.shared < 100_000  # bytes: what every recent GPU has for a program
    if dtype == "bf16":
        assert "mma.sync" in found.asm["ptx"]  # on tensor cores


# In the interpreter ---------------------------------------------------------------------------------------------------


def definition(q, k, v, layout, **where):
    chosen = foveal.select(q, k, layout, scale=0.25, **where)
    return foveal.attend(q, k, v, chosen, layout, scale=0.25, **where)


@interpreted
@pytest.mark.parametrize("seed", range(10))
def test_it_equals_the_definition(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)

    def one_of(*values):
        return values[int(torch.randint(len(values), (1,), generator=draws))]

    height, width, prefix = one_of(3, 5, 8), one_of(4, 7), one_of(0, 1, 5)
    cell, tile = one_of(1, 2, 3), one_of(2, 3, 4)
    layout = foveal.layout(
        height, width, prefix, keep=one_of(0.05, 0.3, 1.0), cell=cell, tile=tile, coarse=one_of(0, 2) * cell,
        order=one_of(0, 1),
    )  # fmt: skip
    B, H, D = one_of(1, 2), one_of(1, 2), one_of(8, 20)
    patches, where = layout.patches, {}
    if one_of(True, False):  # some tokens dropped, others stand for several
        patches = max(1, layout.patches * 2 // 3)
        places = torch.stack([torch.randperm(layout.patches, generator=draws)[:patches] for _ in range(B)])
        bias = torch.randint(1, 4, (B, prefix + patches), generator=draws).float().log()
        where = {"places": places.sort(dim=1).values, "key_bias": bias}
    tokens = prefix + patches
    q, k = torch.randn(2, B, tokens, H, D, generator=draws).transpose(2, 3).unbind(0)
    v = torch.randn(B, H, tokens, one_of(D, D + 3), generator=draws)
    with execution("triton"):
        out = operations.foveal(q, k, v, layout, scale=0.25, **where)
    torch.testing.assert_close(out, definition(q, k, v, layout, **where), atol=1e-5, rtol=1e-5)


@interpreted
def test_each_query_alone_in_fp16() -> None:
    """Not bf16: the interpreter takes its bits for whole numbers in products."""
    layout = foveal.layout(3, 4, 1, keep=0.3, cell=2, tile=1)
    q, k, v = torch.randn(3, 1, 1, 13, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    with execution("triton"):
        out = operations.foveal(*(x.half() for x in (q, k, v)), layout, scale=0.25)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.float(), definition(q, k, v, layout), atol=5e-3, rtol=5e-3)


@interpreted
def test_with_gradients_the_definition_computes() -> None:
    layout = foveal.layout(4, 4, 1, keep=0.3, cell=2, tile=2)
    q, k, v = torch.randn(3, 1, 1, 17, 16, requires_grad=True).unbind(0)
    with execution("triton"):
        (ours,) = torch.autograd.grad(operations.foveal(q, k, v, layout, scale=0.25).square().sum(), v)
    (truth,) = torch.autograd.grad(definition(q, k, v, layout).square().sum(), v)
    torch.testing.assert_close(ours, truth)
