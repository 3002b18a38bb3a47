"""Echo: LaViT's less attention in its simplest form. A layer weights its values by the scores of the layer before.

out = softmax(s) v,   s = q kᵀ / √D as the layer before left it
"""

import torch

from attendless import Attention, register


@register
class Echo(Attention):
    name = "echo"
    reads = provides = frozenset({"scores"})

    def attend(self, q, k, v, context):
        weights = torch.softmax(context.scores, dim=-1)
        out = torch.dropout(weights, self.dropout, self.training) @ v
        return out, context.replace(scores=context.scores)  # unchanged, so one echo may follow another

    def core_macs(self, grid):
        return grid.tokens**2 * self.attn_dim  # half of full attention's: q kᵀ was computed one layer earlier
