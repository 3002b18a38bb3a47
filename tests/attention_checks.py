"""What the tests of single attentions share: random weights, textbook projections, and equality with gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attendless import Attention, Context, Grid, create

Reference = Callable[[Attention, Tensor, Tensor, Tensor, Grid], Tensor]


def build(spec: str, grid: Grid, dim: int = 16, heads: int = 2, **arguments: object) -> Attention:
    """An attention in evaluation with every weight random, so that nothing hides behind a neutral start."""
    module = create(spec, dim, heads, grid=grid, **arguments).eval()
    for parameter in module.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return module


def textbook_heads(x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> list[Tensor]:
    """x [B, N, C] through the stacked q, k, v rows of a linear layer → each [B, H, N, D]."""
    return [
        torch.stack([x @ w.T + b for w, b in zip(part_w.chunk(heads), part_b.chunk(heads), strict=True)], dim=1)
        for part_w, part_b in zip(weight.chunk(3), bias.chunk(3), strict=True)
    ]


def assert_equals(module: Attention, grid: Grid, reference: Reference, atol: float = 1e-5, batch: int = 2) -> None:
    """The module's output and the gradients of everything it learns are the reference's.

    `reference(module, q, k, v, grid)` gives the heads' outputs [B, H, N, D] before the output projection.
    """
    x = torch.randn(batch, grid.tokens, module.dim, requires_grad=True)

    def textbook() -> Tensor:
        heads = textbook_heads(x, module.qkv.weight, module.qkv.bias, module.num_heads)
        out = torch.cat(reference(module, *heads, grid).unbind(1), dim=-1)
        return out @ module.proj.weight.T + module.proj.bias

    assert_same_with_gradients(module, x, module(x, Context(grid))[0], textbook(), atol)


def assert_same_with_gradients(module: torch.nn.Module, x: Tensor, ours: Tensor, theirs: Tensor, atol: float) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5)
    leaves = {"input": x, **dict(module.named_parameters())}
    weights = torch.randn_like(ours) / ours.numel() ** 0.5
    found = torch.autograd.grad((ours * weights).sum(), list(leaves.values()))
    expected = torch.autograd.grad((theirs * weights).sum(), list(leaves.values()))
    for name, a, b in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(
            a, b, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )
        assert a.abs().max() > 0, f"no gradient reaches {name}"
