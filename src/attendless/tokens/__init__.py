"""Token reduction: what drops or merges tokens between attention and MLP."""

from .contract import Reducer

__all__ = ["Reducer"]
