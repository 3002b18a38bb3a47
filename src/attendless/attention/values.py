"""The values that pass through attentions: the token grid, the context that travels with the tokens, and costs.

Shapes: B batch · H heads · N tokens · C model width. Tokens are ordered prefix first (class and register tokens), then
the patches row by row, frame by frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: Context entries that a layer can provide for the next layer, a reducer or the caller.
ENTRIES = {
    "scores": "its scores before the softmax, [B, H, N, N], or as `attention.scores.score_shape` says",
    "class_attention": "the class token's attention to each token, [B, H, N]",
    "keys": "its keys, [B, H, N, D]",
    "residual": "scores of the stage before, resampled to this stage's tokens, which its first layer adds to its own",
}

Weighting = Literal["size", "none", "mask"]
#: The least weight of a masked key: nearly zero, but large enough for a gradient.
_MASKED = 1e-6


@dataclasses.dataclass(frozen=True)
class Grid:
    """The token grid: `prefix` tokens first, then the patches of a `height` × `width` grid, row by row; for a video or
    several views, the patches of `depth` such grids, one after the other.

    After token reduction the remaining patches are listed per image: `cells` [B, n] is the grid cell of each patch,
    `sizes` [B, n] the number of original tokens it represents, and `owners` [B, area] the patch that represents each
    cell (-1: none). Where costs are counted, `cells` has a shape but no values.

    `weighting` is how attention weights the patches as keys: by `size`; all alike (`none`); or by a `mask`, where a
    size is 1, or 0 for a patch that training masks rather than removes. A mean over the patches always weights by size.
    """

    height: int
    width: int
    prefix: int = 0
    cells: Tensor | None = None
    sizes: Tensor | None = None
    owners: Tensor | None = None
    depth: int = 1
    weighting: Weighting = "size"

    @property
    def reduced(self) -> bool:
        return self.cells is not None

    @property
    def area(self) -> int:
        """The number of cells of the whole grid, over all frames."""
        return self.depth * self.height * self.width

    @property
    def patches(self) -> int:
        return self.area if self.cells is None else self.cells.shape[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def weights(self) -> Tensor | None:
        """The weight of each patch as a key [B, n], or None if all are equal."""
        return None if self.weighting == "none" else self.sizes

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """log(weight of each key) [B, N], or None if all are equal. The logarithm of a masked key is finite, and its
        gradient that of a key with a small weight.

        Several layers, and two steps of a layer, ask one grid for it, so inference computes it once.
        """
        if self.weights is None:
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._key_bias(self.weights, dtype)
        computed: dict[torch.dtype, Tensor] = vars(self).setdefault("_computed", {})
        if dtype not in computed:
            computed[dtype] = self._key_bias(self.weights, dtype)
        return computed[dtype]

    def _key_bias(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        weights = weights.to(dtype)
        if self.weighting == "mask":
            weights = weights + (weights.clamp(min=_MASKED) - weights).detach()
        return torch.nn.functional.pad(weights.log(), (self.prefix, 0))

    def whole(self) -> Grid:
        """The same grid without token reduction."""
        return Grid(self.height, self.width, self.prefix, depth=self.depth)

    def reduced_to(self, patches: int) -> Grid:
        """A reduced grid with `patches` unknown patches, for counting costs."""
        return dataclasses.replace(self.whole(), cells=torch.empty(1, patches, dtype=torch.long, device="meta"))

    def places(self, x: Tensor) -> Tensor:
        """The cell of each patch of tokens x [B, N, C], [B, n], on whole and reduced grids."""
        if self.cells is not None:
            return self.cells
        return torch.arange(self.patches, device=x.device).expand(x.shape[0], -1)

    def condensed(self) -> Grid:
        """A whole grid of about as many patches, for latency estimates, which exist only for whole grids."""
        if self.cells is None:
            return self
        height = max(1, round(self.patches**0.5))
        return Grid(height, -(-self.patches // height), self.prefix)

    def restore(self, x: Tensor) -> Tensor:
        """Tokens x [B, N, C] of this grid → tokens of the whole grid: each cell gets the token that represents it, or
        zeros if none does."""
        if self.cells is None:
            return x
        patches = x[:, self.prefix :]
        if self.owners is None:
            owners = self.cells.new_full((x.shape[0], self.area), -1)
            owners = owners.scatter(
                1, self.cells, torch.arange(patches.shape[1], device=x.device).expand_as(self.cells)
            )
        else:
            owners = self.owners
        there = patches.gather(1, owners.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
        return torch.cat([x[:, : self.prefix], there * (owners >= 0)[..., None].to(x.dtype)], dim=1)

    def averaged(self, x: Tensor) -> Tensor:
        """Values x [B, area, C] of all cells → values of the remaining patches [B, n, C], each the mean over the cells
        that the patch represents: the inverse of `restore`."""
        if self.cells is None:
            return x
        if self.owners is None:
            return x.gather(1, self.cells[..., None].expand(-1, -1, x.shape[2]))
        left = self.patches
        index = self.owners.where(self.owners >= 0, left)  # cells without an owner go to an extra row
        total = x.new_zeros(x.shape[0], left + 1, x.shape[2]).scatter_add(1, index[..., None].expand_as(x), x)
        count = x.new_zeros(x.shape[0], left + 1).scatter_add(1, index, x.new_ones(index.shape))
        return (total / count.clamp(min=1)[..., None])[:, :left]

    def balanced(self, x: Tensor) -> Tensor:
        """Tokens x [B, N, C] scaled so that a plain mean over the patches weights each by its size."""
        if self.sizes is None:
            return x
        total = self.sizes.sum(1, keepdim=True).clamp(min=_MASKED)  # training may mask all patches of an image
        share = self.sizes.to(x.dtype) * (self.patches / total.to(x.dtype))
        return torch.cat([x[:, : self.prefix], x[:, self.prefix :] * share[..., None]], dim=1)

    def __str__(self) -> str:
        prefix = f"{self.prefix}+" if self.prefix else ""
        frames = f"{self.depth}x" if self.depth > 1 else ""
        return f"{prefix}{frames}{self.height}x{self.width}" + (f" reduced to {self.tokens}" if self.reduced else "")


@dataclasses.dataclass(frozen=True)
class Context:
    """The values that travel with the tokens from block to block. Immutable: a block returns a new context.

    Args:
        grid: The grid of the tokens.
        wants: The entries (see `ENTRIES`) that this layer must provide because the next layer or the caller reads them;
            other entries are removed.
        scores: Entry: attention scores before the softmax.
        class_attention: Entry: the attention of the class token to every token, [B, H, N].
        keys: Entry: the keys, [B, H, N, D].
        residual: Scores that a mechanism adds to those of the next layer.
        losses: Extra terms for training, each with its name.
        trail: The class tokens of the layers so far, for backbones whose head reads all of them.
    """

    grid: Grid
    wants: frozenset[str] = frozenset()
    scores: Tensor | None = None
    class_attention: Tensor | None = None
    keys: Tensor | None = None
    residual: Tensor | None = None
    losses: tuple[tuple[str, Tensor], ...] = ()
    trail: tuple[Tensor, ...] = ()

    def replace(self, **changes: Any) -> Context:
        return dataclasses.replace(self, **changes)

    def wanting(self, wants: frozenset[str]) -> Context:
        """The context with these `wants`; the same object if they do not change."""
        return self if wants == self.wants else self.replace(wants=wants)

    def only(self, entries: Collection[str]) -> Context:
        """The context without entries other than `entries`."""
        gone = {name: None for name in ENTRIES if name not in entries and getattr(self, name) is not None}
        return self.replace(**gone) if gone else self

    def with_loss(self, name: str, value: Tensor) -> Context:
        return self.replace(losses=(*self.losses, (name, value)))

    def extra(self) -> dict[str, Tensor]:
        """The extra losses, summed by name."""
        found: dict[str, Tensor] = {}
        for name, value in self.losses:
            found[name] = found[name] + value if name in found else value
        return found


def _register_pytree(cls: type, tensors: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Register tensors (and containers of them) as children, the rest as structure that compilers specialise on."""
    pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, n) for n in tensors], tuple(getattr(value, n) for n in static)),
        lambda children, fixed: cls(
            **dict(zip(tensors, children, strict=True)), **dict(zip(static, fixed, strict=True))
        ),
        serialized_type_name=f"attendless.{cls.__name__}",
    )


_register_pytree(Grid, ("cells", "sizes", "owners"), ("height", "width", "prefix", "depth", "weighting"))
_register_pytree(Context, ("grid", "scores", "class_attention", "keys", "residual", "losses", "trail"), ("wants",))


@dataclasses.dataclass(frozen=True)
class Macs:
    """Multiply-accumulates of the function computed, per image.

    `core` counts the products of queries with keys and of weights with values, key selection included; `projections`
    the linear layers around them; `mlp` the MLP; `other` the rest (patch embedding, head, a mechanism's own extra
    layers).
    """

    core: int = 0
    projections: int = 0
    mlp: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.core + self.projections + self.mlp + self.other

    def __add__(self, more: Macs) -> Macs:
        return Macs(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)))

    def __sub__(self, less: Macs) -> Macs:
        return Macs(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(less), strict=True)))

    @property
    def share(self) -> float:
        """The core's share of the total."""
        return self.core / self.total

    @property
    def cap(self) -> float | None:
        """The maximum speed-up by MACs if the core cost nothing (Amdahl's law)."""
        return cap(self.share)

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


def cap(share: float) -> float | None:
    """The maximum speed-up from a part with this share of the cost (Amdahl's law); None if the share is 1."""
    return 1 / (1 - share) if share < 1 else None
