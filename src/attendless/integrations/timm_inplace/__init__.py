"""Attentions of other libraries' models, adapted in place."""

from .adapted import (
    Adapted,
    AdaptedTokens,
    adapted_modules,
    put,
    take_out,
)
from .attentions import ADAPTED, REFUSED
from .where import Where

__all__ = ["ADAPTED", "REFUSED", "Adapted", "AdaptedTokens", "Where", "adapted_modules", "put", "take_out"]
