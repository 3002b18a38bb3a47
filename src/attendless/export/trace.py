"""A model as a graph: `torch.export` traces it once, at one image size, for one batch or any."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UserError
from ..sizes import size_text
from ..sparse import execution

#: The backend of the operations in the graph: PyTorch's own operators, or our kernels as `torch.ops.attendless.*`.
STANDARD, KERNELS = "torch", "native"


def traced(
    module: nn.Module, channels: int, size: tuple[int, int], batch: int | None, policy: str, *, fused: bool = False
) -> torch.export.ExportedProgram:
    """The graph of a module that takes images [batch, channels, *size]; batch None: any number.

    Unless PyTorch itself is to run it (`fused`), memory lies in it as plain attention leaves it, not as PyTorch's fused
    kernel does.
    """
    images = torch.zeros(2 if batch is None else batch, channels, *size)
    dynamic = ({0: torch.export.Dim("batch", min=1, max=65535)},) if batch is None else None
    return traced_call(module, images, policy, dynamic=dynamic, fused=fused, where=f"at {size_text(size)} px")


def traced_call(
    module: nn.Module,
    example: Tensor,
    policy: str,
    *,
    dynamic: tuple[dict[int, Any], ...] | None = None,
    fused: bool = False,
    where: str = "",
) -> torch.export.ExportedProgram:
    """The graph of a module that takes one tensor, as for `example`; `dynamic` lists its dimensions that may vary."""
    plain = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with execution(policy), torch.no_grad(), plain, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about its own parts
        try:
            return torch.export.export(module, (example,), dynamic_shapes=dynamic, strict=False)
        except UserError:
            raise
        except Exception as error:
            told = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise UserError(f"torch.export cannot trace this model{f' {where}' if where else ''}: {told}") from error
