"""Sparsifiner: a small predictor guesses, for every query and head, which keys will matter; only those are attended to.

    A = softmax(q (W_down k)ᵀ / √D)             low-rank attention to R averages of the keys
    s = [A]_{>τ} [W_up]_{>basis}                connectivity: sparse coefficients × a sparse basis
    chosen_i = the ⌈keep · N⌉ largest s_ij > 0
    out_i = softmax over the chosen keys of q_i·k_j / √D, times their values

Class and register queries see every token, as the class token's does in the paper. `softmax=full` takes the softmax
over all keys and then drops those not chosen, as the paper's fourth equation reads; its code does what stands above.
With `rest=pooled` the keys not chosen are not dropped but stand behind R averages of keys and values, over cells of the
grid: those W_down starts from.

The predictor starts from pooled cells and smooth bumps (`sparse.basis`), so it chooses sensibly before any training. It
learns in two ways: by `prediction_loss`, how far A W_up is from the full attention map, as in the paper; and whenever
its weights want a gradient, from whatever the model is trained for, through its choice (`chosen.learnable`).

`variant=released` is the predictor of the code its authors published: q and k reduced to half their channels, scores
over √heads, |W_up|, the 8 largest coefficients, and always as many keys as the budget says.

W_down and W_up belong to a token grid and are resampled to another one.

Shapes: B batch · H heads · N tokens · R rank · D head width · down, up [R, N].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..sparse import basis, chosen
from ..sparse.choose import Ways, against_full, choose, native_refuses
from ..sparse.gather import gather_attend
from . import spec
from .contract import Attention, Choice, Context, Grid
from .full import full
from .registry import register

_PREDICTOR = ("down", "up", "q_reduce", "k_reduce")


@dataclasses.dataclass(frozen=True)
class Options(spec.Options):
    keep: float = spec.option(0.25, "share of the tokens each query looks at", low=0, high=1)
    rank: int = spec.option(32, "how many averages of the keys the predictor looks at", low=1)
    rest: Literal["dropped", "pooled"] = spec.option("dropped", "what becomes of the keys not chosen")
    tau: float = spec.option(0.0, "coefficients up to this count as zero; 0.05 in the paper", low=0, high=1)
    basis: float | Literal["auto"] = spec.option("auto", "entries of W_up up to this count as zero (0.01)", low=0)
    top: int = spec.option(0, "keep this many of the largest coefficients instead of those above tau", low=0)
    softmax: Literal["masked", "full"] = spec.option("masked", "over the chosen keys, or over all of them")
    variant: Literal["paper", "released"] = spec.option("paper", "the predictor of the paper or of its code")
    loss: Literal["divergence", "mse"] = spec.option("divergence", "how far a guessed map is from a true one")
    l1: float = spec.option(0.0, "weight of Σ|W_up| in training; weight decay makes it sparse without", low=0)


def budget(keep: float, tokens: int) -> int:
    """⌈keep · tokens⌉, at least 1; a product that is whole but for rounding is not rounded up."""
    return max(1, math.ceil(keep * tokens - 1e-9))


@register
class Sparsifiner(Attention):
    name = "sparsifiner"
    Options = Options
    examples = (
        "sparsifiner:rank=8",
        "sparsifiner:keep=0.1,rank=12,rest=pooled",
        "sparsifiner:rank=9,softmax=full,tau=0",
        "sparsifiner:rank=8,variant=released,top=3",
    )
    executes_more = "plain PyTorch masks dense products, and how many coefficients exceed tau depends on the image"

    def setup(self, factory: dict[str, Any]) -> None:
        grid = self.grid
        down, up = basis.pooling(grid.height, grid.width, grid.prefix, self.options.rank)
        self.down, self.up = (nn.Parameter(weight.to(**factory)) for weight in (down, up))
        if self.released:
            self.q_reduce, self.k_reduce = (nn.Linear(self.head_dim, self.head_dim // 2, **factory) for _ in range(2))

    @property
    def released(self) -> bool:
        return bool(self.options.variant == "released")

    @property
    def top(self) -> int:
        """How many coefficients count, or 0: as many as exceed tau."""
        return int(self.options.top or (8 if self.released else 0))

    def budget(self, grid: Grid) -> int:
        """How many keys a query looks at, at most."""
        return budget(self.options.keep, grid.tokens)

    # The predictor ---------------------------------------------------------------------------------------------------

    def coefficients(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """A: how much each query cares for each average of the keys, [B, H, N, R]."""
        scale = self.scale
        if self.released:
            q, k, scale = self.q_reduce(q), self.k_reduce(k), self.num_heads**-0.5
        return torch.softmax(scale * q @ (self._down(grid) @ k).transpose(-2, -1), dim=-1)

    def connectivity(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """s [B, H, N, N] before anything small is set to zero, so that what is can come back."""
        up = self._up(grid)
        return self.coefficients(q, k, grid) @ (up.abs() if self.released else up.clamp(min=0))

    def predict(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """A W_up [B, H, N, N] without thresholds: what is trained to resemble the attention map."""
        return self.coefficients(q, k, grid) @ self._up(grid)

    def sparse_coefficients(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """[A]: small ones set to zero."""
        found = self.coefficients(q, k, grid)
        if self.top:
            least = found.topk(min(self.top, found.shape[-1]), dim=-1).values[..., -1:]
            return found.where(found >= least, 0)
        return found.where(found > self.options.tau, 0)

    def sparse_basis(self, grid: Grid) -> Tensor:
        """[W_up]: what is small, or negative, set to zero."""
        up, least = self._up(grid), self.options.basis
        least = (0.02 if self.released else 0.01) if least == "auto" else least
        up = up.abs() if self.released else up
        return up.where(up > least, 0)

    @torch.no_grad()  # a choice has no gradient of its own: see `chosen.learnable`
    def select(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Which keys each query looks at: bool [B, H, N, N]. Quadratic; the kernels make lists instead."""
        connectivity = self.sparse_coefficients(q, k, grid) @ self.sparse_basis(grid)
        above = -torch.inf if self.released else 0.0
        return chosen.largest(connectivity, self.budget(grid), prefix=grid.prefix, above=above)

    def prediction_loss(self, x: Tensor, target: Tensor, context: Context) -> Tensor:
        """How far the predicted map is from `target` [B, H, N, N] for the same tokens x [B, N, C], averaged over
        images, heads and the queries that predict. Only the predictor learns from it.

        `divergence` is Σ_j s_j − t_j log s_j, least where s = t: a key that is overlooked costs more than one that is
        taken in vain. `mse` is the paper's, Σ_j (s_j − t_j)².
        """
        with torch.no_grad():
            q, k, _ = self.project(x)
        prefix = context.grid.prefix
        target = target[:, :, prefix:]
        if self.options.loss == "mse":
            loss = (self.predict(q, k, context.grid)[:, :, prefix:] - target).square().sum(-1).mean()
        else:
            found = self.connectivity(q, k, context.grid)[:, :, prefix:]
            loss = (found - target * (found + 1e-6).log()).sum(-1).mean()
        return loss + self.options.l1 * self.up.abs().sum() if self.options.l1 else loss

    # Attending -------------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        if "class_attention" in context.wants:
            row = torch.softmax(self.scale * q[:, :, :1] @ k.transpose(-2, -1), dim=-1)
            context = context.replace(class_attention=row[:, :, 0])
        dropout = self.attn_drop.p if self.training else 0.0
        rest = None
        if self.options.rest == "pooled":
            rest = basis.rest(grid.height, grid.width, grid.prefix, self.options.rank, k)
        native = self._path(q, grid) == "native"
        chooses = torch.is_grad_enabled() and self.up.requires_grad
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, self.up))
        if native and not learns:
            return self._attend_natively(q, k, v, grid, rest), context
        if native and rest is None and not chooses:
            return self._attend_to_lists(q, k, v, grid), context
        if native:
            seen = chosen.unlisted(*self._list_natively(q, k, grid), grid.tokens, grid.prefix)
        else:
            seen = self.select(q, k, grid)
        if chooses:
            seen = chosen.learnable(seen, self.connectivity(q.detach(), k.detach(), grid), prefix=grid.prefix)
        if self.options.softmax == "full":
            weight = torch.softmax(self.scale * q @ k.transpose(-2, -1), dim=-1) * seen
            return torch.dropout(weight, dropout, dropout > 0) @ v, context
        return chosen.attend(q, k, v, seen, scale=self.scale, rest=rest, prefix=grid.prefix, dropout=dropout), context

    @torch.no_grad()
    def _attend_natively(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, rest: basis.Rest | None) -> Tensor:
        """Choose and attend in one kernel: no list of keys, let alone a map, is ever in memory as a whole."""
        tail: tuple[Tensor | None, ...] = (None, None, None)
        if rest is not None:
            tail = (self.scale * q @ (rest.average @ k).transpose(-2, -1), rest.average @ v, rest.share)
        return torch.ops.attendless.sparsifiner(
            q, k, v, None, *self._guess(q, k, grid), *tail, *self._limits(grid), self.scale
        )

    def _attend_to_lists(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Choose, then attend to what was chosen, with gradients."""
        first = full(q[:, :, : grid.prefix], k, v, scale=self.scale)
        others = gather_attend(q, k, v, *self._list_natively(q, k, grid), scale=self.scale)[:, :, grid.prefix :]
        return torch.cat([first, others], dim=2)

    @torch.no_grad()
    def _list_natively(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """The chosen keys as lists, which a backward pass needs: none for prefix queries, which see everything."""
        return torch.ops.attendless.sparsifiner_select(*self._guess(q, k, grid), *self._limits(grid))

    def _guess(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """What the kernels choose from: coefficients, which they make sparse, and the sparse basis."""
        return self.coefficients(q, k, grid), self.sparse_basis(grid)

    def _limits(self, grid: Grid) -> tuple[int, int, float, int]:
        """What the kernels choose by: budget, prefix, tau, top."""
        return self.budget(grid), grid.prefix, 0.0 if self.top else self.options.tau, self.top

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """As every attention's. With `softmax=full` a row is not a distribution: what was not chosen is missing."""
        return super().map(x, context, query)

    # Its weights on a grid -------------------------------------------------------------------------------------------

    def _down(self, grid: Grid) -> Tensor:
        return basis.resample(self.down, _shape(self.grid), _shape(grid), keep_sums=True)

    def _up(self, grid: Grid) -> Tensor:
        return basis.resample(self.up, _shape(self.grid), _shape(grid), keep_sums=False)

    def resize(self, grid: Grid) -> None:
        self.check(grid)
        with torch.no_grad():
            down, up = self._down(grid).detach(), self._up(grid).detach()
        self.down = nn.Parameter(down, requires_grad=self.down.requires_grad)
        self.up = nn.Parameter(up, requires_grad=self.up.requires_grad)
        super().resize(grid)

    def predictor(self) -> dict[str, Tensor]:
        """What the predictor learns, by name: the rest of the layer's weights are full attention's."""
        return {name: value for name, value in self.named_parameters() if name.split(".")[0] in _PREDICTOR}

    def take_predictor(self, weights: Mapping[str, Tensor], grid: Grid) -> None:
        """Load a predictor that was learned on `grid`."""
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
        old, new = _shape(grid), _shape(self.grid)
        moved = {
            **weights,
            "down": basis.resample(weights["down"], old, new, keep_sums=True),
            "up": basis.resample(weights["up"], old, new, keep_sums=False),
        }
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(moved[name])

    def refuses(self, grid: Grid) -> str | None:
        if grid.reduced:
            return "its predictor knows whole grids, and this one lacks patches"
        if grid.prefix != self.grid.prefix:
            return f"its predictor was made for {self.grid.prefix} prefix tokens"
        if not grid.prefix < self.options.rank <= grid.tokens:
            return f"rank={self.options.rank} must be above {grid.prefix}, the prefix tokens, and at most {grid.tokens}"
        return None

    # How it is computed ----------------------------------------------------------------------------------------------

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        return choose(ways(*self._sizes(grid, batch)))

    def estimate(self, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
        return against_full(ways(*self._sizes(grid, batch)), 2 * batch * grid.tokens**2 * self.attn_dim)

    def _path(self, q: Tensor, grid: Grid) -> str:
        return executor(*self._sizes(grid, 1 if torch.compiler.is_compiling() else len(q)))

    def _sizes(self, grid: Grid, batch: int) -> tuple[int, int, int, int, int, int, bool, torch.dtype, str, float]:
        """What decides how it is computed, in plain numbers."""
        weight, dropout = self.qkv.weight, self.attn_drop.p if self.training else 0.0
        common = not self.released and self.options.softmax == "masked"
        added = self.num_heads * self._most_coefficients()
        sizes = (batch, grid.tokens, self.attn_dim, self.options.rank, added, self.budget(grid))
        return (*sizes, common, weight.dtype, weight.device.type, dropout)

    # Its cost --------------------------------------------------------------------------------------------------------

    def core_macs(self, grid: Grid) -> int:
        """Averages of the keys, low-rank scores, connectivity, and the chosen keys; at most 1/τ coefficients exceed τ.

        `softmax=full` needs every score.
        """
        rank, tokens, patches = self.options.rank, grid.tokens, grid.patches
        width = self.attn_dim // 2 if self.released else self.attn_dim
        predict = rank * (tokens + patches) * width
        if self.released:
            predict += 2 * tokens * self.attn_dim * (self.head_dim // 2)
        predict += self.num_heads * patches * self._connectivity_macs(grid)
        seen = self.budget(grid)
        scores = tokens if self.options.softmax == "full" else seen
        attend = (patches * (scores + seen) + 2 * grid.prefix * tokens) * self.attn_dim
        if self.options.rest == "pooled":
            # Averages of keys and values; their scores and values.
            attend += 2 * rank * (tokens + patches) * self.attn_dim
        return predict + attend

    def _connectivity_macs(self, grid: Grid) -> int:
        """Of one query: its coefficients times the entries of the basis that are not zero."""
        with torch.no_grad():
            filled = int(self.sparse_basis(grid).count_nonzero())
        return self._most_coefficients() * filled // self.options.rank

    def _most_coefficients(self) -> int:
        """How many coefficients of a query can count; they add up to 1."""
        rank, tau = self.options.rank, self.options.tau
        return min(rank, self.top) if self.top else rank if tau == 0 else min(rank, math.ceil(1 / tau) - 1)


def _shape(grid: Grid) -> tuple[int, int]:
    return grid.height, grid.width


@lru_cache(maxsize=1024)
def ways(
    batch: int,
    tokens: int,
    dim: int,
    rank: int,
    added: int,
    kept: int,
    common: bool,
    dtype: torch.dtype,
    device: str,
    dropout: float,
) -> Ways:
    """What can compute it. `added`: how many rows of the basis the heads add up for a token; `common`: it is the
    paper's predictor, with softmax over the chosen keys."""
    why = native_refuses(dtype, device, dropout)
    if not common:
        why = why or "the kernel computes the paper's predictor, and softmax over the chosen keys"
    dense = ("torch", 2 * batch * tokens * (tokens + rank) * dim)
    if why:
        return Ways("sparsifiner", (dense,), 1, device, f"dense products with a mask: {why}")
    native = batch * tokens * (2 * (kept + rank) * dim + tokens * added)
    return Ways("sparsifiner", (("native", native), dense), 1, device)


# A compiler takes the answer for a constant of the graph, so the arguments are plain numbers and names.
@torch.compiler.assume_constant_result
def executor(*sizes: Any) -> str:
    """The path that computes it."""
    return choose(ways(*sizes)).path
