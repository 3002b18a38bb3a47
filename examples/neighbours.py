"""Neighbours: each patch attends to the patches at most `radius` steps away, and to the prefix tokens.

out = softmax(q kᵀ / √D + mask) v,   mask = 0 where |Δrow|, |Δcolumn| ≤ radius, −∞ elsewhere
"""

from dataclasses import dataclass

import torch

from attendless import Attention, Options, option, register


@register
class Neighbours(Attention):
    name = "neighbours"
    examples = ("neighbours", "neighbours:radius=1")
    executes_more = "a dense mask is used: simple, and no faster than full attention"

    @dataclass(frozen=True)
    class Options(Options):
        radius: int = option(2, "how many steps away a patch attends", low=0)

    def mask(self, grid):
        row = torch.arange(grid.height).repeat_interleave(grid.width)
        column = torch.arange(grid.width).repeat(grid.height)
        steps = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
        return torch.nn.functional.pad(steps <= self.options.radius, (grid.prefix, 0, grid.prefix, 0), value=True)

    def attend(self, q, k, v, context):
        mask = self.mask(context.grid).to(q.device)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), context

    def core_macs(self, grid):
        return 2 * int(self.mask(grid).sum()) * self.attn_dim
