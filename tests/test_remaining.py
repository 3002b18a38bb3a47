"""Full attention over the tokens that reducers left: whoever computes it, the same function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attendless import Context, Grid, create, execution
from attendless.backbones import Columnar
from attendless.sparse import operations
from native_cases import close, needs_kernels

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · q kᵀ + b) v, one query at a time."""
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(len(q)) for h in range(q.shape[1]) for i in range(q.shape[2])):
        weights = torch.tensor([scale * float(q[b, h, i] @ k[b, h, j]) + float(bias[b, j]) for j in range(k.shape[2])])
        out[b, h, i] = weights.double().softmax(0) @ v[b, h]
    return out


@needs_kernels
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 140), st.integers(1, 33), st.booleans(), st.integers(0, 99))
def test_the_kernel_is_the_definition(batch: int, heads: int, tokens: int, width: int, biased: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(batch, tokens, 3, heads, width, generator=draw).permute(2, 0, 3, 1, 4).unbind(0)
    bias = torch.rand(batch, tokens, generator=draw).mul(5).log() if biased else None
    results = {}
    for name in ("native", "sdpa"):
        with execution(name):
            results[name] = operations.remaining(q, k, v, scale=0.3, key_bias=bias)
    close(results["native"], results["sdpa"])
    if tokens <= 12:
        zeros = torch.zeros(batch, tokens)
        expected = loops(q.double(), k.double(), v.double(), zeros if bias is None else bias.double(), 0.3)
        close(results["native"], expected.float())


@needs_kernels
def test_who_computes_it_is_said_and_may_be_asked_for() -> None:
    layer = create("full", 32, 2, grid=Grid(8, 8, 1)).eval()
    assert layer.choice(Grid(8, 8, 1)).backend == "sdpa", "whole grids stay bit-identical to timm in fp32"
    with execution("native"):
        assert layer.bfloat16().choice(Grid(8, 8, 1)).backend == "native", "rounding differs in bf16 anyway"
    layer.float()
    with execution("native"):
        assert layer.choice(Grid(8, 8, 1).reduced_to(40)).backend == "native"
    with execution("sdpa"):
        assert layer.choice(Grid(8, 8, 1).reduced_to(40)).backend == "sdpa"


@needs_kernels
def test_learning_goes_through_pytorch() -> None:
    layer = create("full", 32, 2, grid=Grid(8, 8, 1))
    cells = torch.arange(40).expand(2, -1)
    grid = Grid(8, 8, 1, cells=cells, sizes=torch.rand(2, 40) + 1)
    x = torch.randn(2, 41, 32)
    found = []
    for name in ("native", "sdpa"):
        layer.zero_grad()
        with execution(name):
            layer(x, Context(grid))[0].square().sum().backward()
        found.append(layer.qkv.weight.grad.clone())
    assert torch.equal(*found)


def test_other_runtimes_get_standard_operators() -> None:
    model = Columnar(**SHAPE, attention="full", tokens="tome:r=8").eval()
    program = torch.export.export(model, (torch.randn(2, 3, 64, 64),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("block_attend" in name for name in names)
    assert any("scaled_dot_product_attention" in name for name in names)


@needs_kernels
@pytest.mark.parametrize("tokens", ["tome:r=8", "evit:keep=0.5,at=1", "evit:keep=0.5,at=1,fuse=false"])
def test_a_model_answers_alike_either_way(tokens: str) -> None:
    torch.manual_seed(0)
    model = Columnar(**SHAPE, attention="full", tokens=tokens).eval()
    x = torch.randn(3, 3, 64, 64)
    answers = []
    for name in ("native", "sdpa"):
        with execution(name), torch.inference_mode():
            answers.append(model(x))
    close(*answers)
