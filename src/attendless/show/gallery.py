"""The figures that can be drawn of a scene, by name."""

from __future__ import annotations

from .looking import draw_maps, draw_rollout, draw_saturation, draw_sparse
from .mechanisms import (
    draw_basis,
    draw_bigbird,
    draw_coefficients,
    draw_foveal,
    draw_low_rank,
    draw_patterns,
    draw_tokens,
)
from .scene import Draw

FIGURES: dict[str, Draw] = {
    "maps": draw_maps,
    "rollout": draw_rollout,
    "tokens": draw_tokens,
    "foveal": draw_foveal,
    "sparsifiner-1": draw_patterns,
    "sparsifiner-3": draw_sparse,
    "sparsifiner-5": draw_low_rank,
    "sparsifiner-6": draw_basis,
    "sparsifiner-7": draw_coefficients,
    "bbvit-1": draw_bigbird,
    "lavit-saturation": draw_saturation,
}
