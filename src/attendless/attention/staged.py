"""Specs that describe a stage of a model rather than one layer, such as `lavit:vanilla=4`."""

from __future__ import annotations

from ..options import Spec
from .interface import Attention


class Staged(Attention):
    """Mixin of a mechanism whose spec depends on the position of the layer in its stage."""

    @classmethod
    def in_stage(cls, spec: Spec, number: int) -> str | Spec:
        """The spec of layer `number` of a stage for which `spec` was given."""
        raise NotImplementedError(f"{cls.__name__} does not define in_stage")
