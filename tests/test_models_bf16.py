"""`model.bfloat16()` with every attention and reducer: it computes, in bf16, what the model in fp32 does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attendless.attention.registry import attentions
from attendless.tokens.registry import reducers
from test_export import images, tiny

#: Options without which an attention or a reducer does nothing on so small a grid.
_SPECS = {
    "lavit": "full/2xlavit",
    "foveal": "foveal:keep=0.3,cell=2,tile=2",
    "sparsifiner": "sparsifiner:keep=0.3,rank=8",
}
_TOKENS = {"tome": "tome:r=2", "evit": "evit:at=1", "dynamicvit": "dynamicvit:at=1"}


def compared(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return copy.deepcopy(model).bfloat16()(images(4).bfloat16()), model(images(4))


def close(low: Tensor, wide: Tensor, most: float = 0.08) -> None:
    assert low.dtype is torch.bfloat16
    assert low.isfinite().all()
    assert float((low.float() - wide).norm() / wide.norm()) < most, "three layers of numbers with 8 bits"


@pytest.mark.parametrize("name", attentions())
def test_attention(name: str) -> None:
    """Sparsifiner chooses keys by guesses in bf16: with random weights, other keys change the answers."""
    close(*compared(tiny(_SPECS.get(name, name))), most=0.6 if name == "sparsifiner" else 0.08)


@pytest.mark.parametrize("name", reducers())
def test_reducer(name: str) -> None:
    """Another choice of tokens may change an answer: of four images three count."""
    low, wide = compared(tiny("full", tokens=_TOKENS.get(name, name)))
    assert low.dtype is torch.bfloat16
    assert low.isfinite().all()
    apart = (low.float() - wide).norm(dim=-1) / wide.norm(dim=-1)
    assert float(apart.sort().values[2]) < 0.5
