"""Sparsifiner's predictor: a low-rank estimate of the attention map, which selects the keys of each query.

    A = softmax(q (W_down k)ᵀ / √D)             low-rank attention to R averages of the keys
    s = A W_up                                  connectivity: the estimated relevance of each key for each query

The weights start from pooled cells and smooth bumps (`sparse.basis`), so that the selection is reasonable before any
training. They are trained in two ways: by `map_loss`, the difference between A W_up and the full attention map, as in
the paper; and, if they require a gradient, by the loss of the model, through the selection (`topk.learnable`).

`variant=released` is the predictor of the authors' published code: q and k reduced to half their channels, scores
divided by √heads, |W_up|, the 8 largest coefficients, and always as many keys as the budget allows.

W_down and W_up belong to a token grid and are resampled to another one; where tokens were dropped or merged, each
image has its own (`attention.averages`).

Shapes: B batch · H heads · N tokens · R rank · D head width · down, up [R, N].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import options
from ..errors import UserError
from ..sparse import basis
from . import averages
from .selection import HasPredictor
from .values import Context, Grid

_PREDICTOR = ("down", "up", "q_reduce", "k_reduce")


@dataclasses.dataclass(frozen=True)
class Options(options.Options):
    keep: float = options.option(0.25, "share of the tokens that each query attends to", low=0, high=1)
    rank: int = options.option(32, "number of averages of the keys that the predictor uses", low=1)
    rest: Literal["dropped", "pooled"] = options.option("dropped", "treatment of the keys that are not chosen")
    tau: float = options.option(0.0, "coefficients up to this count as zero; 0.05 in the paper", low=0, high=1)
    basis: float | Literal["auto"] = options.option("auto", "entries of W_up up to this count as zero (0.01)", low=0)
    top: int = options.option(0, "keep this many of the largest coefficients instead of those above tau", low=0)
    softmax: Literal["masked", "full"] = options.option("masked", "over the chosen keys, or over all of them")
    variant: Literal["paper", "released"] = options.option("paper", "the predictor of the paper or of its code")
    loss: Literal["divergence", "mse"] = options.option(
        "divergence", "difference between a predicted map and the true one"
    )
    l1: float = options.option(0.0, "weight of Σ|W_up| in training; weight decay makes it sparse without", low=0)


class PredictingAttention(HasPredictor):
    """An attention whose keys a predictor selects: its weights, prediction, loss and resampling."""

    Options = Options
    selection = ("coefficients", "sparse_basis", "connectivity")

    def setup(self, factory: dict[str, Any]) -> None:
        grid = self.grid
        down, up = basis.pooling(grid.height, grid.width, grid.prefix, self.options.rank)
        self.down, self.up = (nn.Parameter(weight.to(**factory)) for weight in (down, up))
        if self.released:
            self.q_reduce, self.k_reduce = (nn.Linear(self.head_dim, self.head_dim // 2, **factory) for _ in range(2))

    @property
    def released(self) -> bool:
        return bool(self.options.variant == "released")

    # Prediction ------------------------------------------------------------------------------------------------------

    def coefficients(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """A: the attention of each query to each average of the keys, [B, H, N, R]."""
        scale = self.scale
        if self.released:
            q, k, scale = self.q_reduce(q), self.k_reduce(k), self.num_heads**-0.5
        down = averages.averaging(self._down(grid), grid)
        return torch.softmax(scale * q @ (down @ k).transpose(-2, -1), dim=-1)

    def connectivity(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """s [B, H, N, N] before small entries are set to zero, so that such entries can grow again in training."""
        up = self._up(grid)
        up = averages.on_tokens(up.abs() if self.released else up.clamp(min=0), grid)
        return self.coefficients(q, k, grid) @ up

    def predict(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """A W_up [B, H, N, N] without thresholds, which training fits to the attention map."""
        return self.coefficients(q, k, grid) @ averages.on_tokens(self._up(grid), grid)

    def sparse_basis(self, grid: Grid) -> Tensor:
        """[W_up] with small and negative entries set to zero: [R, N], or [B, 1, R, n] on a reduced grid."""
        up, least = self._up(grid), self.options.basis
        least = (0.02 if self.released else 0.01) if least == "auto" else least
        up = up.abs() if self.released else up
        return averages.on_tokens(up.where(up > least, 0), grid)

    def map_loss(self, x: Tensor, target: Tensor, context: Context) -> Tensor:
        """The difference between the predicted map and `target` [B, H, N, N] for the same tokens x [B, N, C], averaged
        over images, heads and patch queries. Only the predictor gets a gradient.

        `divergence` is Σ_j s_j − t_j log s_j, smallest where s = t: a missed key costs more than a superfluous one.
        `mse` is the paper's, Σ_j (s_j − t_j)².
        """
        with torch.no_grad():
            q, k, _ = self.project(x)
        prefix, density = context.grid.prefix, basis.density(context.grid.whole().patches)
        target = target[:, :, prefix:]
        if self.options.loss == "mse":
            loss = (density * self.predict(q, k, context.grid)[:, :, prefix:] - target).square().sum(-1).mean()
        else:
            found = density * self.connectivity(q, k, context.grid)[:, :, prefix:]
            loss = (found - target * (found + 1e-6).log()).sum(-1).mean()
        return loss + self.options.l1 * self.up.abs().sum() if self.options.l1 else loss

    # Weights on a grid -----------------------------------------------------------------------------------------------

    def _down(self, grid: Grid) -> Tensor:
        return basis.resample(self.down, _sides(self.grid), _sides(grid), keep_sums=True)

    def _up(self, grid: Grid) -> Tensor:
        return basis.resample(self.up, _sides(self.grid), _sides(grid), keep_sums=False)

    def resize(self, grid: Grid) -> None:
        self.check(grid)
        with torch.no_grad():
            down, up = self._down(grid).detach(), self._up(grid).detach()
        self.down = nn.Parameter(down, requires_grad=self.down.requires_grad)
        self.up = nn.Parameter(up, requires_grad=self.up.requires_grad)
        super().resize(grid)

    def predictor(self) -> dict[str, nn.Parameter]:
        """The predictor's weights by name; the other weights of the layer are full attention's."""
        return {name: value for name, value in self.named_parameters() if name.split(".")[0] in _PREDICTOR}

    def take_predictor(self, weights: Mapping[str, Tensor], grid: Grid) -> None:
        """Load predictor weights that were trained on `grid`."""
        own = self.predictor()
        if (
            weights.keys() != own.keys()
            or grid.prefix != self.grid.prefix
            or weights["down"].shape[0] != len(self.down)
        ):
            raise UserError(
                f"this predictor has rank {len(weights.get('down', ()))}, {grid.prefix} prefix tokens and the weights "
                f"{', '.join(weights)}; {self.spec} here has rank {len(self.down)}, {self.grid.prefix} and "
                f"{', '.join(own)}"
            )
        old, new = _sides(grid), _sides(self.grid)
        moved = {
            **weights,
            "down": basis.resample(weights["down"], old, new, keep_sums=True),
            "up": basis.resample(weights["up"], old, new, keep_sums=False),
        }
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(moved[name])


def _sides(grid: Grid) -> tuple[int, int]:
    return grid.height, grid.width
