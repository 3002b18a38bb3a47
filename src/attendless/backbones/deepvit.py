"""DeepViT: an isotropic backbone with a stem of two convolutions, and `reattention` in its last layers.

    blocks    x + branch(norm(skip · x)) / skip        skip = 0.5 in DeepViT-S and -L: branches are doubled

The norm of skip · x is the norm of x with an epsilon divided by skip², so blocks need not multiply their input.
"""

from __future__ import annotations

from typing import Any

from .stemmed import Stemmed


class DeepViT(Stemmed):
    """`Stemmed`, whose blocks also multiply the input of their norms by `skip`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            for norm in (block.norm1, block.norm2):
                norm.eps = norm.eps / self.skip**2
