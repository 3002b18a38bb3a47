"""What stands in for PyTorch's fused attention where it is slow to learn from."""

import pytest
import torch

from attendless.sparse import fused

KINDS = ("nothing", "added", "bool")


def reference(q, k, v, mask, scale):
    """Query by query, in 64 bits."""
    rows = []
    for i in range(q.shape[-2]):
        score = scale * (k * q[..., i : i + 1, :]).sum(-1)
        if mask is not None:
            row = mask.expand(*q.shape[:-1], k.shape[-2])[..., i, :]
            score = torch.where(row, score, -torch.inf) if mask.dtype is torch.bool else score + row
        rows.append((score.softmax(-1)[..., None] * v).sum(-2))
    return torch.stack(rows, dim=-2)


def masked(kind, queries, keys):
    if kind == "nothing":
        return None
    if kind == "added":
        return torch.randn(queries, keys).double()
    seen = torch.rand(queries, keys) < 0.5
    seen[:, 0] = True
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_near_the_definition_as_the_fused_kernel(kind, monkeypatch):
    """Output and gradients in bf16, from the same rounded inputs; of scores alone the products round once more."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16).bfloat16() for n in (21, 34, 34))
    mask = masked(kind, 21, 34)
    given = torch.randn(2, 3, 21, 16).bfloat16()

    def away(how, dtype, exact=None):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        here = mask if mask is None or mask.dtype is torch.bool else mask.to(dtype)
        out = how(*inputs, here, scale=0.25)
        found = [out, *torch.autograd.grad(out, inputs, given.to(dtype))]
        if exact is None:
            return [x.detach() for x in found]
        return [float((a.detach() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    exact = away(lambda q, k, v, m, scale: reference(q, k, v, m, scale), torch.float64)
    products = away(fused.attend, torch.bfloat16, exact)
    monkeypatch.setattr(fused, "slow_backward", lambda q, k, v: False)
    kernel = away(fused.attend, torch.bfloat16, exact)
    assert all(a < 2.5 * b + 1e-3 for a, b in zip(products, kernel, strict=True)), (products, kernel)
    assert products != kernel  # the two ways really differ


@pytest.mark.parametrize(
    ("change", "slow"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"learns": False}, False),
        ({"tokens": 9000}, False),
    ],
    ids=["half precision", "32 bits", "nothing to learn", "too many weights to keep"],
)
def test_only_where_it_is_slow(change, slow):
    asked = {"dtype": torch.bfloat16, "learns": True, "tokens": 64} | change
    q = torch.zeros(1, 1, asked["tokens"], 8, dtype=asked["dtype"]).requires_grad_(asked["learns"])
    assert fused.slow_backward(q, q, q) is slow
    with torch.no_grad():
        assert not fused.slow_backward(q, q, q)
