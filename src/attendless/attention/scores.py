"""Scores that pass from one layer to the next: which shape a layer leaves, and which shapes another can read.

A mechanism that provides or reads scores of shape [B, H, N, N] needs nothing from this file. `OwnScoreShape` is for
mechanisms with scores of another shape, `ReadsScores` for those that also read scores of other shapes than their own.

Shapes: B batch · H heads · N tokens.
"""

from __future__ import annotations

from .interface import Attention
from .values import Grid


class OwnScoreShape(Attention):
    """Mixin of a mechanism whose scores are not of shape [B, H, N, N]."""

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        """The shape of the scores that the layer leaves and reads on `grid`."""
        raise NotImplementedError(f"{type(self).__name__} does not define score_shape")


class ReadsScores(OwnScoreShape):
    """Mixin of a mechanism that reads scores of further shapes."""

    def unreadable(self, shape: tuple[int, ...], grid: Grid) -> str | None:
        """Why the layer cannot read scores of `shape` on `grid`, or None if it can."""
        return _differs(shape, self.score_shape(shape[0], grid))

    def misreads(self, before: Attention) -> str | None:
        """Why the layer cannot read the scores that `before` leaves, or None if it can."""
        return self.unreadable(score_shape(before, 1, before.grid), self.grid)


def score_shape(attention: Attention, batch: int, grid: Grid) -> tuple[int, ...]:
    """The shape of the scores that `attention` leaves or reads on `grid`."""
    if isinstance(attention, OwnScoreShape):
        return attention.score_shape(batch, grid)
    return (batch, attention.num_heads, grid.tokens, grid.tokens)


def misreads(reader: Attention, before: Attention) -> str | None:
    """Why `reader` cannot read the scores that `before` leaves, or None if it can."""
    if isinstance(reader, ReadsScores):
        return reader.misreads(before)
    return _differs(score_shape(before, 1, before.grid), score_shape(reader, 1, reader.grid))


def _differs(shape: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    if shape == expected:
        return None
    return f"it reads scores of {_sizes(expected)}, not of {_sizes(shape)}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape[1:]))
