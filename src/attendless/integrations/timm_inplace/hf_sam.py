"""SAM of Hugging Face: attentions that do not go by transformers' switch, adapted as timm's are.

Whoever has such a model has imported its classes, so they are looked up where they are, and transformers is not
imported here.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from .adapted import Adapted
from .attentions import Folded

#: Their files, the attention's class that goes by PyTorch's fused attention, and that of the encoder around it.
_CLASSES = {
    "transformers.models.sam.modeling_sam": ("SamVisionSdpaAttention", "SamVisionEncoder"),
    "transformers.models.sam_hq.modeling_sam_hq": ("SamHQVisionSdpaAttention", "SamHQVisionEncoder"),
}


def imported() -> list[tuple[type, type]]:
    """The attention and encoder classes that there are now."""
    found = []
    for home, names in _CLASSES.items():
        if home in sys.modules:
            attention, encoder = (getattr(sys.modules[home], name, None) for name in names)
            if attention is not None and encoder is not None:
                found.append((attention, encoder))
    return found


class _Sam(Folded):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, **kwargs)

    def table(self, side: int, weights: Tensor) -> Tensor:
        module: Any = self
        return module.get_rel_pos(side, side, weights)


@functools.cache
def adapted(attention: type) -> type[Adapted]:
    return type(f"Adapted{attention.__name__}", (_Sam, attention), {"original": attention})
