"""LaViT's less attention: scores are not computed from queries and keys but derived from those of the layer before.

    A = Ψ(Θ(A₋)ᵀ)ᵀ        A₋ the scores of the layer before, Θ over its keys, Ψ over its queries
    out = softmax(A) v

The layer has no queries and no keys, so it does not project them: `qkv` keeps its name and holds only the rows of v. Θ
and Ψ are identity + Δ (`tokenmap.py`). They start at the identity, where the layer attends like the one before, and are
resampled for other resolutions.

The poster's Θ and Ψ are dense, which costs 2 H N³: at 197 tokens more than the queries and keys that the layer saves
(`map=dense`). The default is cheaper: Δ has a low rank and is shared by all heads, and heads are mixed with each other
(`mix`), because a head need not resemble the head of the same number one layer earlier. `offset` maps are convolutions
over the grid, `none` leaves Θ and Ψ the identity.

Where there are fewer keys than tokens (`ratio=2`: spatial reduction, as in `reduced`) or keys lie in windows
(`window=7`: as in `window`), scores have the shape [N, M], or [T, T] in each window with Θ and Ψ over the tokens of a
window. Such a layer also reads the scores of a full layer: it averages the keys of each block, or takes the pairs
inside each window. Windows of another shift hold other pairs, so a layer follows only windows of its own shift.

`vanilla=4` describes a model rather than a layer: the first four layers of each stage keep full attention (or windows).
`dp` is the weight of the diagonality-preserving loss (`diagonality.py`); where there are fewer keys, queries are
averaged to the same number first. `reattend` mixes heads after the softmax, as DeepViT does; the next layer receives
the scores before that.

Shapes: B batch · H heads · N tokens · M keys · W windows of T tokens · D head width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import options
from ..errors import UserError
from ..sparse.backend import Choice
from .diagonality import diagonality
from .interface import Attention
from .reattention import Reattend
from .reduced import Reduced
from .registry import register, register_alias
from .scores import ReadsScores
from .staged import Staged
from .tokenmap import create_map, resample
from .values import Context, Grid
from .window import Side, Window, partition, unpartition, visible


@dataclasses.dataclass(frozen=True)
class LaViTOptions(options.Options):
    vanilla: int = options.option(
        0, "for a model: number of layers at the start of each stage that keep full attention", low=0
    )
    map: Literal["low_rank", "dense", "offset", "none"] = options.option("low_rank", "form of Θ and Ψ")
    rank: int = options.option(8, "rank of low_rank maps", low=1)
    radius: int = options.option(2, "reach of an offset map, in patches", low=0)
    shared: bool = options.option(True, "one Θ and Ψ for all heads")
    mix: bool = options.option(True, "mix heads with each other")
    bias: bool = options.option(False, "add a learned bias to each key and each query")
    ratio: int = options.option(1, "patches along a side that form one key, as in reduced", low=1)
    window: int = options.option(0, "instead: patches along a side of a window", low=0)
    shift: int = options.option(0, "patches the windows are shifted by", low=0)
    reattend: bool = options.option(False, "also mix heads after the softmax, as in reattention")
    dp: float = options.option(0.0, "weight of the diagonality-preserving loss", low=0)
    dp_sign: Literal["corrected", "poster"] = options.option(
        "corrected", "sign of its second sum: as intended, or as the poster prints it"
    )
    dp_on: Literal["softmax", "scores"] = options.option("softmax", "what the loss is computed on")

    #: `reduced` has this option; less attention does not pool.
    pool = 0

    def __post_init__(self) -> None:
        if self.window and self.ratio > 1:
            raise UserError("options window and ratio exclude each other: keys are in windows, or fewer")
        if self.shift >= max(1, self.window):
            raise UserError(f"option shift={self.shift} is out of range: expected less than window={self.window}")


@register
class LaViTAttention(Staged, ReadsScores, Reduced):
    name = "lavit"
    Options = LaViTOptions  # type: ignore[assignment]
    projected = 1
    reads = frozenset({"scores"})
    provides = frozenset({"scores"})
    takes = frozenset()
    examples: ClassVar[tuple[str, ...]] = (
        "lavit", "lavit:map=dense,mix=false", "lavit:map=dense,shared=false,bias", "lavit:map=offset,radius=1",
        "lavit:map=none", "lavit:ratio=2", "lavit:reattend",
    )  # fmt: skip

    def setup(self, factory: dict[str, Any]) -> None:
        o = self.options
        if o.vanilla:
            raise UserError(f"{self.spec}: vanilla is for the layers of a model, and this is one layer")
        super().setup(factory)
        maps = 1 if o.shared else self.num_heads
        queries, keys = self.grids_of(self.grid)
        self.theta, self.psi = (create_map(o.map, side, maps, o.rank, o.radius, factory) for side in (keys, queries))
        self.mixing: nn.Parameter | None
        self.register_parameter("mixing", nn.Parameter(torch.eye(self.num_heads, **factory)) if o.mix else None)
        self.theta_bias: nn.Parameter | None
        self.psi_bias: nn.Parameter | None
        for name, side in (("theta_bias", keys), ("psi_bias", queries)):
            bias = nn.Parameter(torch.zeros(maps, 1, side.tokens, **factory)) if o.bias else None
            self.register_parameter(name, bias)
        if o.reattend:
            self.reattn = Reattend(self.num_heads, factory)
            self.rows_sum_to_one = False

    def init_weights(self) -> None:
        super().init_weights()
        if self.options.reattend:
            self.reattn.init_weights()

    def no_weight_decay(self) -> set[str]:
        return {"mixing"} if self.options.mix else set()

    @classmethod
    def in_stage(cls, spec: Any, number: int) -> Any:
        o = spec.options
        if number >= o.vanilla:
            return spec.replace(vanilla=0)
        return f"window:size={o.window},shift={o.shift}" if o.window else "full"

    # The shape of the scores -----------------------------------------------------------------------------------------

    def sides(self, grid: Grid) -> tuple[Side, Side]:
        size, shift = self.options.window, self.options.shift
        return Side.cut(grid.height, size, shift), Side.cut(grid.width, size, shift)

    def grids_of(self, grid: Grid) -> tuple[Grid, Grid]:
        """The grids of one map's queries and of its keys."""
        if self.options.window:
            rows, columns = self.sides(grid)
            return (window := Grid(rows.size, columns.size)), window
        ratio = self.options.ratio
        return grid, Grid(max(1, grid.height // ratio), max(1, grid.width // ratio), grid.prefix)

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        queries, keys = self.grids_of(grid)
        inner = (queries.tokens, keys.tokens)
        if not self.options.window:
            return (batch, self.num_heads, *inner)
        rows, columns = self.sides(grid)
        return (batch, self.num_heads, rows.count * columns.count, *inner)

    def unreadable(self, shape: tuple[int, ...], grid: Grid) -> str | None:
        whole = (*shape[:1], self.num_heads, grid.tokens, grid.tokens)
        return None if shape == whole else super().unreadable(shape, grid)

    def misreads(self, before: Attention) -> str | None:
        if self.options.window and isinstance(before, Window | LaViTAttention):
            windows = len(before.score_shape(1, self.grid)) == 5
            if windows and before.sides(self.grid) != self.sides(self.grid):
                return "windows of another size or shift hold other pairs of patches"
        return super().misreads(before)

    def arranged(self, scores: Tensor, grid: Grid) -> Tensor:
        """The scores of the layer before → scores of the shape of this layer."""
        shape = self.score_shape(scores.shape[0], grid)
        if scores.shape == shape:
            return scores
        if reason := self.unreadable(tuple(scores.shape), grid):
            raise UserError(f"attention {self.spec} on grid {grid}: {reason}")
        if not self.options.window:
            return self._pooled(scores, grid)
        place = torch.arange(grid.tokens, device=scores.device, dtype=torch.float64)
        inside = partition(place[None, None, :, None], *self.sides(grid))[0, 0, :, :, 0].long()
        return scores[:, :, inside[:, :, None], inside[:, None, :]]

    def _pooled(self, scores: Tensor, grid: Grid) -> Tensor:
        """Scores of all keys → of blocks of keys: the mean plus the logarithm of the number of keys, so that a block
        weighs as much as its keys together."""
        P, ratio = grid.prefix, self.options.ratio
        image = scores[..., P:].flatten(0, 2).unflatten(1, (grid.height, grid.width))
        total = nn.functional.avg_pool2d(self._shrink(image), ratio).flatten(1)
        share = nn.functional.avg_pool2d(self._shrink(torch.ones_like(image[:1])), ratio).flatten(1)
        means = (total / share + (ratio**2 * share).log()).unflatten(0, scores.shape[:3])
        return torch.cat([scores[..., :P], means], dim=-1)

    # Computation -----------------------------------------------------------------------------------------------------

    def transformed(self, scores: Tensor, grid: Grid) -> Tensor:
        """Ψ(Θ(A)ᵀ)ᵀ of the mixed heads."""
        queries, keys = self.grids_of(grid)
        if self.mixing is not None:
            scores = (self.mixing @ scores.flatten(2)).view_as(scores)
        made_for = self.grids_of(self.grid)
        scores = _add(self.theta(scores, keys), self.theta_bias, made_for[1], keys)
        return _add(self.psi.columns(scores, queries).mT, self.psi_bias, made_for[0], queries).mT

    def weights_of(self, scores: Tensor, grid: Grid) -> Tensor:
        """softmax(A) over the visible keys; heads mixed with `reattend`."""
        if self.options.window:
            allowed = visible(*self.sides(grid), scores.device)
            scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        return self.reattn(weights) if self.options.reattend else weights

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, M, C] → v [B, H, M, D], returned three times because q and k are not used."""
        v = self.qkv(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return v, v, v

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:  # type: ignore[override]
        self.accept(x, context.grid)
        out, context = self.attend(*self.project(self.reduce(x, context.grid)), context)
        return self.merge(out), context

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid, found = context.grid, context.scores
        if found is None:
            raise UserError(f"attention {self.spec} reads the scores of the layer before, and there are none")
        scores = self.transformed(self.arranged(found, grid), grid)
        weights = torch.dropout(self.weights_of(scores, grid), self.dropout, self.training)
        out = self.pick(weights, v, grid)
        if self.options.dp and self.training:
            loss = diagonality(self._square(scores, grid), self.options.dp_sign, self.options.dp_on)
            context = context.with_loss("diagonality", self.options.dp * loss)
        return out, context.replace(scores=scores)

    def pick(self, weights: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Weights times values, window by window if there are windows."""
        if not self.options.window:
            return weights @ v
        sides = self.sides(grid)
        return unpartition(weights @ partition(v, *sides), *sides)

    def _square(self, scores: Tensor, grid: Grid) -> Tensor:
        """Scores with as many queries as keys: each query is the mean over the patches of its key."""
        return scores if self.options.ratio == 1 else self.spread(grid).to(scores) @ scores

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """softmax(A), with the weight of a key spread evenly over its patches, and windows put in their places."""
        grid = context.grid
        eye = torch.eye(grid.tokens, device=x.device, dtype=x.dtype) if self.options.window else self.spread(grid).to(x)
        rows = slice(query, query + 1) if isinstance(query, int) else query
        values = eye.expand(len(x), self.num_heads, -1, -1)
        return self.attend(values, values, values, context)[0][:, :, rows]

    # Cost ------------------------------------------------------------------------------------------------------------

    def transform_macs(self, grid: Grid) -> int:
        """MACs of Θ, Ψ and the mixing of heads."""
        (queries, keys), H = self.grids_of(grid), self.num_heads
        *_, N, M = shape = self.score_shape(1, grid)
        windows = shape[2] if len(shape) == 5 else 1
        mixing = H * H * N * M if self.options.mix else 0
        return windows * (self.theta.macs(N, H, keys) + self.psi.macs(M, H, queries) + mixing)

    def core_macs(self, grid: Grid) -> int:
        *_, N, M = shape = self.score_shape(1, grid)
        pairs = (shape[2] if len(shape) == 5 else 1) * N * M
        reattending = pairs * self.num_heads**2 if self.options.reattend else 0
        return self.transform_macs(grid) + pairs * self.attn_dim + reattending

    def projection_macs(self, grid: Grid) -> int:
        return (self.keys(grid) + grid.tokens) * self.dim * self.attn_dim

    def refuses(self, grid: Grid) -> str | None:
        if grid.reduced:
            return "its Θ and Ψ are over whole grids, and this one lacks patches"
        if self.options.window and grid.prefix:
            return "prefix tokens stand in no window"
        if self.options.map in ("dense", "low_rank") and grid.prefix != self.grid.prefix:
            return f"its Θ and Ψ were made for {self.grid.prefix} prefix tokens"
        return None

    def resize(self, grid: Grid) -> None:
        self.check(grid)
        queries, keys = self.grids_of(grid)
        self.theta.resize(keys)
        self.psi.resize(queries)
        for name, old, new in zip(
            ("theta_bias", "psi_bias"), self.grids_of(self.grid)[::-1], (keys, queries), strict=True
        ):
            bias = getattr(self, name)
            if bias is not None:
                setattr(self, name, nn.Parameter(_on(bias, old, new).detach().clone(), bias.requires_grad))
        self.grid = grid

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        *_, N, M = self.score_shape(1, grid)
        return Choice("torch", f"plain PyTorch: scores of {N}x{M} made from those of the layer before")


register_alias("less", "lavit")


def _on(bias: Tensor, old: Grid, new: Grid) -> Tensor:
    """A bias for each token of grid `old` → for each token of grid `new`."""
    same = (old.height, old.width) == (new.height, new.width)
    return bias if same else resample(bias, old, new)


def _add(scores: Tensor, bias: Tensor | None, old: Grid, new: Grid) -> Tensor:
    """scores [B, H, …, R, n] + bias [1 or H, 1, n]."""
    if bias is None:
        return scores
    bias = _on(bias, old, new)
    return scores + (bias[:, None] if scores.ndim == 5 else bias)
