"""What slow references of merging reducers share, for one image at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from attendless.tokens import Reducer, create_reducers, parse_tokens


def reducer(text: str, layer: int = 0, depth: int = 4) -> Reducer:
    """The reducer of one layer of a model with width 8 and two heads."""
    spec = parse_tokens(text)
    assert spec is not None
    return create_reducers(spec, 8, 4, depth)[layer]


def cosines(keys: Tensor) -> list[list[float]]:
    """The cosines of all pairs of n patches, for keys [H, n, D] averaged over heads."""
    mean = keys.mean(0)
    return [[float(torch.cosine_similarity(a, b, dim=0)) for b in mean] for a in mean]


def means(x: Tensor, groups: list[list[int]], prefix: int, sizes: Tensor | None = None) -> tuple[Tensor, list[float]]:
    """The tokens after merging x [N, C] into groups of patches, and their sizes."""
    counts = [1.0] * (len(x) - prefix) if sizes is None else sizes.tolist()
    rows, total = [*x[:prefix]], []
    for group in groups:
        total.append(sum(counts[i] for i in group))
        rows.append(sum(counts[i] * x[prefix + i] for i in group) / total[-1])
    return torch.stack(rows), total
