"""Where the tokens of timm's models stand, for attentions that are handed a row of tokens and nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...attention import Grid
from ..grid_tracking import Watch, number


class Where:
    """What `embed`, a patch embedding of timm's, was last given, as a grid with `prefix` tokens."""

    def __init__(self, embed: nn.Module, prefix: int) -> None:
        self.prefix, self._watch = prefix, Watch()
        self._hook = embed.register_forward_pre_hook(self.note)

    def note(self, embed: Any, arguments: tuple[Tensor, ...]) -> None:
        self._watch.saw(embed.dynamic_feat_size(arguments[0].shape[-2:]))

    def grid(self, tokens: int) -> Grid:
        """The grid of the `tokens` that an attention was just given."""
        _, height, width = self._watch.size((number(tokens) - self.prefix,))
        return Grid(height, width, self.prefix)

    def stop(self) -> None:
        """Note nothing any more."""
        self._hook.remove()
