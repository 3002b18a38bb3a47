"""Where the tokens of the forward under way stand, for attentions that are handed a row of tokens and nothing else.

A row of 1,024 patches may be 32 × 32 or 16 × 64. The one place that knows is where the image is cut into patches, so
the grid is noted there, each time, for the thread that runs the forward: two threads may send images of different
sizes through one model.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Grid
from ...errors import UserError


def number(side: int) -> int:
    """A side of a grid as a plain number, also where a compiler would leave it open: grids get a graph each."""
    return len(range(side))


class Where:
    """What `embed`, a patch embedding of timm's, was last given in this thread, as a grid with `prefix` tokens."""

    def __init__(self, embed: nn.Module, prefix: int) -> None:
        self.prefix = prefix
        self._seen: dict[int, set[Grid]] = {}
        self._now = threading.local()
        self._hook = embed.register_forward_pre_hook(self.note)

    def note(self, embed: Any, arguments: tuple[Tensor, ...]) -> None:
        height, width = embed.dynamic_feat_size(arguments[0].shape[-2:])
        self._now.grid = grid = Grid(number(height), number(width), self.prefix)
        if not torch.compiler.is_compiling():
            self._seen.setdefault(grid.tokens, set()).add(grid)

    def grid(self, tokens: int) -> Grid:
        """The grid of the `tokens` that an attention was just given."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return self._again(tokens)
        grid: Grid | None = getattr(self._now, "grid", None)
        if grid is None:
            raise UserError(
                f"nothing says where these {tokens} tokens stand: no image went through the model's patch embedding in "
                "this thread"
            )
        if grid.tokens != tokens:
            raise UserError(
                f"an attention got {tokens} tokens, but the image makes {grid.tokens} ({grid}): tokens that were "
                "dropped or added on the way cannot be placed on the grid"
            )
        return grid

    def _again(self, tokens: int) -> Grid:
        """In a backward, where a checkpointed layer is run again, maybe in another thread and after other images."""
        seen = self._seen.get(tokens, set())
        if len(seen) != 1:
            shapes = " and ".join(sorted(map(str, seen))) or "none"
            raise UserError(
                f"gradient checkpointing runs a layer of {tokens} tokens again, and the images seen with so many have "
                f"the grids {shapes}: expected one shape of image, or no checkpointing"
            )
        return next(iter(seen))

    def stop(self) -> None:
        """Note nothing any more."""
        self._hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "_seen": self._seen, "_hook": self._hook}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _now=threading.local())
