"""Where single blocks are timed: in eager PyTorch, or exported to the runtime and precision of the deployment.

The share of attention, MLP and token merging in a block's time differs between runtimes. A schedule that is solved with
the times of eager PyTorch is therefore not the fastest one in OpenVINO.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..export.exporting import floats_of, policy_of
from ..export.int8 import TensorBatches, quantise
from ..export.trace import traced_call
from ..measure.clock import Call
from .variants import Target


@dataclasses.dataclass(frozen=True)
class BlockRuntime:
    """`prepare` turns a module and its input into the call that is timed; `name` tells it apart in a log."""

    name: str
    prepare: Callable[[nn.Module, Tensor], Call]


class FixedArguments(nn.Module):
    """A block as a function of its tokens alone: all other arguments are fixed, and it returns one tensor."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.args, self.kwargs = block, args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(x, *self.args, **self.kwargs)
        return found[0] if isinstance(found, tuple) else found


#: Blocks as PyTorch runs them.
EAGER_BLOCKS = BlockRuntime("", lambda module, x: partial(module, x))


def blocks_in(target: Target) -> BlockRuntime:
    """Blocks in a target. In PyTorch's precisions other than fp32 and compiled, the times of eager fp32 stand in."""
    return BlockRuntime(str(target), partial(_exported, target)) if target.format else EAGER_BLOCKS


def _exported(target: Target, module: nn.Module, x: Tensor) -> Call:
    """Export a block for one shape of tokens and open it."""
    with tempfile.TemporaryDirectory(prefix="attendless-") as folder:
        file = Path(folder) / f"block{target.module.SUFFIX}"
        target.module.write(traced_call(module.eval(), x, policy_of(target.format, target.kernels)), file)
        if target.precision == "int8":
            few = torch.randn(4 * len(x), *x.shape[1:], generator=torch.Generator().manual_seed(0))
            quantise(target.format, file, TensorBatches(few, len(x)), quiet=True)
        run = target.module.open_raw(file, floats=floats_of(target.format, target.precision))
    return partial(run, x.clone())
