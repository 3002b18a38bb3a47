"""Which grid of patches a model is looking at: watched where the image is cut into patches, never guessed.

As many tokens can be a grid of 32 × 32 or of 16 × 64, so their number says nothing. The one place that knows is the
patch embedding: what leaves it still has its height and width. A watch is a hook there.

Threads run through one model side by side, each with its own image: what was seen is kept per thread. Gradient
checkpointing runs layers again in the backward pass, when other images may have gone through since, and perhaps in
another thread: there a grid counts only if no other of as many patches was ever seen.
"""

from __future__ import annotations

import threading
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

#: frames, height, width
Size = tuple[int, int, int]


def number(side: int) -> int:
    """A side of a grid as a plain number, also where a compiler would leave it open: each grid gets its graph."""
    return index(side)


class Watch:
    """Sees the patch embedding's output [B, C, (frames,) height, width] go by, and remembers its size."""

    def __init__(self, own: bool = False) -> None:
        """`own`: it is an attention's own input that is watched, so that what was seen last is always what counts."""
        self._own = own
        self._here = threading.local()
        self._seen: dict[int, set[Size]] = {}
        self._compiled: Size | None = None

    def see(self, module: Any, args: Any, output: Tensor) -> None:
        """The hook, after the convolution that makes patches."""
        self.saw(output.shape[2:])

    def see_input(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook, before an attention that is given [B, height, width, C]."""
        given = args[0] if args else kwargs["hidden_states"]
        self.saw(given.shape[1:3])

    def see_shapes(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook, before an embedding that is given patches, and height and width for each image."""
        if torch.compiler.is_compiling():  # a graph does not know numbers in a tensor: no grid can be asked for
            self.saw((0, 0))
            return
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        sides = {tuple(shape) for shape in shapes.tolist()}
        # Images of several shapes are padded, and their attentions masked: no grid is asked for.
        self.saw(sides.pop() if len(sides) == 1 else (0, 0))

    def saw(self, sides: tuple[int, ...]) -> None:
        *frames, height, width = map(number, sides)
        size = (frames[0] if frames else 1, height, width)
        if torch.compiler.is_compiling():  # which follows a plain attribute, and traces one call at a time
            self._compiled = size
            return
        self._here.size = size
        self._seen.setdefault(size[0] * size[1] * size[2], set()).add(size)

    def size(self, patches: tuple[int, ...]) -> Size:
        """The size now looked at. `patches` are the numbers of patches it may have, given how many tokens there are."""
        if torch.compiler.is_compiling():
            size = self._compiled
        elif not self._own and _in_backward():
            return self._seen_before(patches)
        else:
            size = getattr(self._here, "size", None)
        if size is None:
            raise UserError("where these tokens stand is not known: no image went through the model in this thread")
        if size[0] * size[1] * size[2] not in patches:
            expected = " or ".join(str(count) for count in patches)
            raise UserError(
                f"the image was cut into {text(size)} patches, and {expected} arrive at an attention: tokens were "
                "dropped, added or packed on the way, so where they stand is not known"
            )
        return size

    def _seen_before(self, patches: tuple[int, ...]) -> Size:
        found = [size for count in patches for size in self._seen.get(count, ())]
        if len(found) == 1:
            return found[0]
        grids = " or ".join(map(text, sorted(found))) or "no grid"
        raise UserError(
            f"gradient checkpointing runs a layer again, and {grids} may be its patches: train on one shape for each "
            "number of patches, or without checkpointing"
        )

    def __reduce__(self) -> tuple[type[Watch], tuple[bool]]:
        """A copy of a model, here or in another process, watches for itself."""
        return Watch, (self._own,)


def text(size: Size) -> str:
    return "x".join(map(str, size if size[0] > 1 else size[1:]))


def _in_backward() -> bool:
    """As `torch.utils.checkpoint` asks it."""
    return torch._C._current_graph_task_id() != -1
