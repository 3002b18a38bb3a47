"""Record the patch grid of the image that a model processes, at the module that cuts the image into patches.

A token count does not determine the grid: 1,024 patches may be 32 × 32 or 16 × 64. The patch embedding is the one
module whose output or input still has height and width, so a hook there records them.

Several threads may run one model at the same time, so the last grid is stored per thread. Gradient checkpointing runs a
layer again during the backward pass, possibly in another thread and after other images. There, a grid is used only if
it is the only recorded one with that number of patches.
"""

from __future__ import annotations

import threading
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Context, Grid
from ..errors import UserError

#: frames, height, width
GridSize = tuple[int, int, int]


def number(side: int) -> int:
    """Convert a side of a grid to a plain integer. `torch.compile` then specialises the graph on this grid."""
    return index(side)


class Watch:
    """Records the grid of the last image in each thread. Its methods `see*` are the hooks."""

    def __init__(self, own: bool = False) -> None:
        """`own`: the hook is on the attention itself, so the last recorded grid is always the right one."""
        self._own = own
        self._here = threading.local()
        self._seen: dict[int, set[GridSize]] = {}
        self._compiled: GridSize | None = None
        self._compiled_context: Context | None = None

    def see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Forward hook of the patch convolution: output [B, C, (frames,) height, width]."""
        self.record(output.shape[2:])

    def see_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of an attention that receives [B, height, width, C]."""
        given = args[0] if args else kwargs["hidden_states"]
        self.record(given.shape[1:3])

    def see_shapes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of an embedding that receives patches and the height and width of each image."""
        if torch.compiler.is_compiling():  # a graph cannot read the values of a tensor
            self.record((0, 0))
            return
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        sides = {tuple(shape) for shape in shapes.tolist()}
        # A batch of several shapes is padded and masked, and the grid is not used with a mask.
        self.record(sides.pop() if len(sides) == 1 else (0, 0))

    def record(self, sides: tuple[int, ...]) -> None:
        *frames, height, width = map(number, sides)
        size = (frames[0] if frames else 1, height, width)
        self.context = None
        if torch.compiler.is_compiling():  # the compiler can trace a plain attribute, and traces one call at a time
            self._compiled = size
            return
        self._here.size = size
        self._seen.setdefault(size[0] * size[1] * size[2], set()).add(size)

    @property
    def context(self) -> Context | None:
        """The context of the current image's tokens after token reduction; None if all tokens are present."""
        if torch.compiler.is_compiling():
            return self._compiled_context
        return getattr(self._here, "context", None)

    @context.setter
    def context(self, context: Context | None) -> None:
        if torch.compiler.is_compiling():
            self._compiled_context = context
        else:
            self._here.context = context

    def size(self, patches: tuple[int, ...]) -> GridSize:
        """Return the current grid. `patches`: the possible numbers of patches, given the number of tokens."""
        if torch.compiler.is_compiling():
            size = self._compiled
        elif not self._own and in_backward():
            return self._only_recorded(patches)
        else:
            size = getattr(self._here, "size", None)
        if size is None:
            raise UserError("the patch grid is unknown: no image went through the model in this thread")
        if size[0] * size[1] * size[2] not in patches:
            expected = " or ".join(str(count) for count in patches)
            raise UserError(
                f"the image was cut into {text(size)} patches, and {expected} arrive at an attention: tokens were "
                "dropped, added or packed in between, so their positions are unknown"
            )
        return size

    def _only_recorded(self, patches: tuple[int, ...]) -> GridSize:
        found = [size for count in patches for size in self._seen.get(count, ())]
        if len(found) == 1:
            return found[0]
        grids = " or ".join(map(text, sorted(found))) or "no grid"
        raise UserError(
            f"gradient checkpointing runs a layer again, and {grids} may be its patches: train on one shape for each "
            "number of patches, or without checkpointing"
        )

    def __reduce__(self) -> tuple[type[Watch], tuple[bool]]:
        """A copy of a model, in this process or another, starts with an empty record."""
        return Watch, (self._own,)


class TokenGrid:
    """The grid of token rows [B, prefix + patches, C] behind `embed`, a patch embedding of timm's."""

    def __init__(self, embed: nn.Module, prefix: int) -> None:
        self.prefix, self.watch = prefix, Watch()
        self._hook = embed.register_forward_pre_hook(self.see)

    def see(self, embed: Any, arguments: tuple[Tensor, ...]) -> None:
        self.watch.record(embed.dynamic_feat_size(arguments[0].shape[-2:]))

    def grid(self, tokens: int) -> Grid:
        """Return the grid of the `tokens` that an attention receives."""
        context = self.watch.context
        return self.whole(tokens) if context is None else context.grid

    def whole(self, tokens: int) -> Grid:
        """Return the grid of all `tokens` of the image."""
        _, height, width = self.watch.size((number(tokens) - self.prefix,))
        return Grid(height, width, self.prefix)

    def stop(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def text(size: GridSize) -> str:
    return "x".join(map(str, size if size[0] > 1 else size[1:]))


def in_backward() -> bool:
    """The test that `torch.utils.checkpoint` uses."""
    return torch._C._current_graph_task_id() != -1
