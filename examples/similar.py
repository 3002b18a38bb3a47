"""Similar: each token attends to the share `keep` of the keys with the largest scores, each head to its own.

out_i = softmax over j ∈ top(q_i kᵀ) of q_i·k_j / √D, times v_j
"""

from dataclasses import dataclass

from attendless import Attention, Options, option, register
from attendless.sparse import operations


@register
class Similar(Attention):
    name = "similar"
    examples = ("similar", "similar:keep=0.5")

    @dataclass(frozen=True)
    class Options(Options):
        keep: float = option(0.25, "share of the keys that a token attends to", low=0.0, high=1.0)

    def keys(self, grid):
        return max(1, round(self.options.keep * grid.tokens))

    def attend(self, q, k, v, context):
        chosen = (q @ k.mT).topk(self.keys(context.grid), dim=-1).indices.int()  # [B, H, N, keys]
        return operations.gather(q, k, v, chosen, scale=self.scale), context

    def case(self, grid, batch=1):
        return self.case_of("gather", operations.Lists(grid.tokens, self.keys(grid)), batch)

    def core_macs(self, grid):
        choosing, attending = grid.tokens**2, 2 * grid.tokens * self.keys(grid)
        return (choosing + attending) * self.attn_dim
