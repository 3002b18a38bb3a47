"""Relative positions of SAM and ViTDet: a bias per row and a bias per column, both computed from the query.

    out_i = Σ_j softmax_j(scale · q_i·k_j + r_i[row of j] + c_i[column of j]) v_j
    r_i = q_i·Rʳ[row of i − row of j]        c_i = q_i·Rᶜ[column of i − column of j]

timm materialises the bias [B · heads, N, N]: 805 MB for one layer of ViT-B at 1,024 px. This module never does.

    fold   rewrites the bias exactly as wider queries and keys: q' = [q, r / scale, c / scale],
           k' = [k, one-hot row, one-hot column]. Then scale · q'·k' is the whole score, for any attention over q, k, v
    full   computes full attention. With gradients, in a graph and on a GPU: PyTorch's fused kernel on q' and k'.
           Otherwise: a few queries at a time, whose scores and biases stay in the cache. (On the CPU the fused kernel
           requires one width for q, k and v. Padding v to the width of q' takes twice the time.)

Shapes: B batch · H heads · N = rows × columns tokens · D head width · q, k, v [B, H, N, D].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: Scores computed at once: about a megabyte, which fits into the cache of a processor core.
_AT_ONCE = 2**18


def biases(q: Tensor, along_rows: Tensor, along_columns: Tensor) -> tuple[Tensor, Tensor]:
    """q and tables [rows, rows, D], [columns, columns, D] by position of query and key → r [B, H, N, rows],
    c [B, H, N, columns]."""
    on_grid = q.unflatten(2, (len(along_rows), len(along_columns)))
    r = on_grid @ along_rows.transpose(1, 2)
    c = (on_grid.transpose(2, 3) @ along_columns.transpose(1, 2)).transpose(2, 3)
    return r.flatten(2, 3), c.flatten(2, 3)


def fold(q: Tensor, k: Tensor, r: Tensor, c: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q', k' [B, H, N, D + rows + columns]."""
    rows, columns = r.shape[-1], c.shape[-1]
    row = torch.eye(rows, device=k.device, dtype=k.dtype).repeat_interleave(columns, dim=0)
    column = torch.eye(columns, device=k.device, dtype=k.dtype).repeat(rows, 1)
    places = torch.cat([row, column], dim=1).expand(*k.shape[:3], -1)
    return torch.cat([q, r / scale, c / scale], dim=-1), torch.cat([k, places], dim=-1)


def full(q: Tensor, k: Tensor, v: Tensor, r: Tensor, c: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    fused = torch.compiler.is_compiling() or q.device.type != "cpu" or dropout > 0
    if fused or (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, r, c))):
        wide_q, wide_k = fold(q, k, r, c, scale)
        wide_v = F.pad(v, (0, wide_q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, dropout_p=dropout, scale=scale)
        return out[..., : v.shape[-1]]
    return _in_chunks(q, k, v, r, c, scale)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, r: Tensor, c: Tensor, scale: float) -> Tensor:
    """Full attention for a few queries at a time; for a few heads at a time, where one head has few queries."""
    N, rows, columns = q.shape[2], r.shape[-1], c.shape[-1]
    heads, queries = max(1, _AT_ONCE // (N * N)), max(1, min(N, _AT_ONCE // N))
    whole = q.new_empty(*q.shape[:3], v.shape[-1])
    q, k, v, r, c, out = (t.flatten(0, 1) for t in (scale * q, k.transpose(2, 3).contiguous(), v, r, c, whole))
    for h in range(0, len(q), heads):
        for i in range(0, N, queries):
            few = (slice(h, h + heads), slice(i, i + queries))
            scores = q[few] @ k[few[0]]
            on_grid = scores.unflatten(2, (rows, columns))
            on_grid += c[few][:, :, None, :]
            on_grid += r[few][:, :, :, None]
            out[few] = torch.softmax(scores, dim=-1, out=scores) @ v[few[0]]
    return whole
