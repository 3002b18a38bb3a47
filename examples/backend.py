"""A backend of your own: `gather` (each query attends to its own list of keys) as a dense product in plain PyTorch.

A key that is listed m times gets log m added to its score; a key that is not listed gets −∞.
"""

import torch

from attendless import Backend, Case, register_backend


@register_backend
class Mine(Backend):
    op, name, about = "gather", "mine", "a dense product that counts how often a key is listed"

    def refuses(self, case: Case) -> str:
        return "it would compute more than 4,096 × 4,096 scores per head" if case.plan.tokens > 4096 else ""

    def macs(self, case: Case) -> int:
        return 2 * case.batch * case.plan.tokens**2 * case.dim  # executed, not only those of the listed keys

    def run(self, case, q, k, v, indices, counts, *, scale, key_bias):
        listed = torch.ones_like(indices, dtype=torch.bool)
        if counts is not None:
            listed = torch.arange(indices.shape[-1], device=q.device) < counts[..., None]
        index = indices.long().where(listed, 0)  # entries beyond the count are undefined
        times = q.new_zeros(*q.shape[:3], k.shape[2]).scatter_add(3, index, listed.to(q.dtype))
        scores = scale * q @ k.transpose(-2, -1) + times.log()
        if key_bias is not None:
            scores = scores + key_bias[:, None, None].to(scores.dtype)
        seen = (scores > -torch.inf).any(-1, keepdim=True)  # a query without keys gets zeros
        return torch.softmax(scores.where(seen, 0), dim=-1).where(seen, 0) @ v
