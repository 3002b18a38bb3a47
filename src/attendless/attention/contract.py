"""The contract every attention keeps, and the values that pass through it.

Shapes: B batch · H heads · N tokens (queries) · M keys · D head width · C model width. Tokens are ordered prefix first
(class and register tokens), then the patches row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UserError
from ..options import Options as BaseOptions
from ..options import Spec
from ..sparse import dispatch
from ..sparse.executor import Case, Choice

#: What a layer can leave for the next one, or for the caller, and what it is.
ENTRIES = {
    "scores": "its scores before the softmax, [B, H, N, N]",
    "class_attention": "how much of its attention the class token gives each token, [B, H, N]",
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the tokens stand: `prefix` tokens in front, then the patches of a `height` × `width` grid, row by row.

    After token reduction the patches that remain are listed per image: `cells` [B, n] says which cell of the grid each
    came from, `sizes` [B, n] how many original tokens it stands for, and `owners` [B, height · width] which of them
    stands for each cell (-1: nobody does any more). Where costs are counted, `cells` has a shape and no values.
    """

    height: int
    width: int
    prefix: int = 0
    cells: Tensor | None = None
    sizes: Tensor | None = None
    owners: Tensor | None = None

    @property
    def reduced(self) -> bool:
        return self.cells is not None

    @property
    def patches(self) -> int:
        return self.height * self.width if self.cells is None else self.cells.shape[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """log(tokens each key stands for) [B, N], or None while every token stands for itself."""
        if self.sizes is None:
            return None
        return torch.nn.functional.pad(self.sizes.to(dtype).log(), (self.prefix, 0))

    def whole(self) -> Grid:
        """The grid before any token was dropped or merged."""
        return Grid(self.height, self.width, self.prefix)

    def reduced_to(self, patches: int) -> Grid:
        """A grid with so many patches left, for counting costs: which ones is not known."""
        return dataclasses.replace(self.whole(), cells=torch.empty(1, patches, dtype=torch.long, device="meta"))

    def restore(self, x: Tensor) -> Tensor:
        """Tokens x [B, N, C] of this grid back on the whole one: each cell gets the token that stands for it, or zeros
        where nobody does."""
        if self.cells is None:
            return x
        patches = x[:, self.prefix :]
        cells = self.height * self.width
        if self.owners is None:
            owners = self.cells.new_full((len(x), cells), -1)
            owners = owners.scatter(
                1, self.cells, torch.arange(patches.shape[1], device=x.device).expand_as(self.cells)
            )
        else:
            owners = self.owners
        there = patches.gather(1, owners.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
        return torch.cat([x[:, : self.prefix], there * (owners >= 0)[..., None].to(x.dtype)], dim=1)

    def __str__(self) -> str:
        prefix = f"{self.prefix}+" if self.prefix else ""
        return f"{prefix}{self.height}x{self.width}" + (f" reduced to {self.patches}" if self.reduced else "")


@dataclasses.dataclass(frozen=True)
class Context:
    """What travels with the tokens from block to block. Immutable: a block returns a new one.

    `wants` names what this layer is asked to leave here (see `ENTRIES`), because the next layer or the caller reads it;
    nothing else that layers leave each other stays. `losses` are extra terms for training.
    """

    grid: Grid
    wants: frozenset[str] = frozenset()
    scores: Tensor | None = None
    class_attention: Tensor | None = None
    losses: tuple[tuple[str, Tensor], ...] = ()

    def replace(self, **changes: Any) -> Context:
        return dataclasses.replace(self, **changes)

    def only(self, entries: Collection[str]) -> Context:
        """Without what layers leave each other, but for these entries."""
        gone = {name: None for name in ENTRIES if name not in entries and getattr(self, name) is not None}
        return self.replace(**gone) if gone else self

    def with_loss(self, name: str, value: Tensor) -> Context:
        return self.replace(losses=(*self.losses, (name, value)))


def _register_pytree(cls: type, tensors: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Tensors (and what holds them) are children; everything else is structure, so compile specialises on it."""
    pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, n) for n in tensors], tuple(getattr(value, n) for n in static)),
        lambda children, fixed: cls(
            **dict(zip(tensors, children, strict=True)), **dict(zip(static, fixed, strict=True))
        ),
        serialized_type_name=f"attendless.{cls.__name__}",
    )


_register_pytree(Grid, ("cells", "sizes", "owners"), ("height", "width", "prefix"))
_register_pytree(Context, ("grid", "scores", "class_attention", "losses"), ("wants",))


@dataclasses.dataclass(frozen=True)
class Macs:
    """Multiply-accumulates of the function computed, per image.

    `core` is the product of queries with keys and of weights with values, including the choice of keys; `projections`
    the linear maps around it; `other` whatever else (patch embedding, head, a mechanism's own extra layers).
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
        """The core's part of the whole."""
        return self.core / self.total

    @property
    def cap(self) -> float | None:
        """How many times quicker the whole could be, by its MACs, if the core cost nothing (Amdahl's law)."""
        return cap(self.share)

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


def cap(share: float) -> float | None:
    """The most a whole can gain from a part that takes this share of it; None if the part is everything."""
    return 1 / (1 - share) if share < 1 else None


class Attention(nn.Module):
    """`forward(x_BNC, context) -> (x_BNC, context)` under timm's weight names: qkv, q_norm, k_norm, norm, proj.

    A mechanism subclasses this, states `name`, its `Options`, and writes `attend` and `core_macs`; that is all most
    need. Weights of its own are made in `setup`. Whatever it cannot serve it refuses, with a reason, in `refuses`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Context entries (see `ENTRIES`) that the layer before must leave.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Context entries that this one can leave, if the next layer reads them. Where prefix queries see every token, the
    #: class token's attention is a row of full attention, and `forward` leaves it: stating it here is enough.
    provides: ClassVar[frozenset[str]] = frozenset()
    #: Specs worth trying: the contract test runs each of them, and `attendless list` shows them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: Weights of the mechanism's own that weight decay must leave alone.
    undecayed: ClassVar[frozenset[str]] = frozenset()
    #: Why the PyTorch executor may execute more multiply-accumulates than `macs` counts for the function, if it does.
    executes_more: ClassVar[str] = ""
    #: Methods in which keys are chosen, so that the layer view can time them apart.
    selection: ClassVar[tuple[str, ...]] = ()
    #: Whether each row of the `map` sums to one.
    rows_sum_to_one: bool = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        grid: Grid,
        options: BaseOptions | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise UserError(f"width {dim} does not divide into {num_heads} heads")
        self.dim, self.num_heads = dim, num_heads
        self.head_dim = head_dim or dim // num_heads
        self.attn_dim = self.num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.grid = grid
        self.options: Any = options if options is not None else self.Options()
        self.check(grid)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias, **factory)
        self.q_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(self.attn_dim).to(**factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(self.attn_dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.setup(factory)

    # What a mechanism writes -------------------------------------------------------------------------------------

    def setup(self, factory: dict[str, Any]) -> None:
        """Make weights of the mechanism's own; `factory` holds device and dtype."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        """q, k [B, H, N, D] and v [B, H, N, any] → out [B, H, N, any], and the context for the next layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define attend")

    def core_macs(self, grid: Grid) -> int:
        """Multiply-accumulates of `attend` for one image on `grid`, selection included."""
        raise NotImplementedError(f"{type(self).__name__} does not define core_macs")

    def extra_macs(self, grid: Grid) -> int:
        """Multiply-accumulates of layers of the mechanism's own outside the core, such as a convolution."""
        return 0

    def refuses(self, grid: Grid) -> str | None:
        """Why this attention cannot serve `grid`, or None if it can. Reduced grids are refused unless overridden."""
        return "it does not take reduced token sets" if grid.reduced else None

    def refine(self, x: Tensor, context: Context) -> Tensor:
        """What the mechanism still does to the tokens once the host has added its output to them; most do nothing."""
        return x

    def resize(self, grid: Grid) -> None:
        """Resample weights that are tied to the token grid, once, in place. Most mechanisms have none."""
        self.check(grid)
        self.grid = grid

    def case(self, grid: Grid, batch: int = 1) -> Case | None:
        """The call that `attend` makes of one of the `sparse.operations`, if that is what it does; see `case_of`."""
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        """Who will execute `attend` here, and why."""
        case = self.case(grid, batch)
        return Choice("torch", "plain PyTorch operations") if case is None else dispatch.choose(case)

    def estimate(self, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
        """Seconds `attend` should take on this machine and full attention in its place; None: there is no estimate."""
        case = self.case(grid, batch)
        return None if case is None else dispatch.against_full(case)

    def predictor(self) -> dict[str, nn.Parameter]:
        """What the mechanism learns about which keys matter, by name, apart from full attention's weights."""
        return {}

    def take_predictor(self, weights: Mapping[str, Tensor], grid: Grid) -> None:
        """Load a predictor that was learned on `grid`."""
        raise UserError(f"attention {self.name!r} predicts nothing")

    def map_loss(self, x: Tensor, target: Tensor, context: Context) -> Tensor:
        """How far the layer's map for tokens x [B, N, C] is from `target` [B, H, N, N]: Σ over keys of the squared
        difference, averaged. A mechanism with a predictor says here how that learns."""
        found = self.map(x, context)
        if found.shape != target.shape:
            raise UserError(f"the maps loss compares like with like: {tuple(found.shape)} and {tuple(target.shape)}")
        return (found - target).square().sum(-1).mean()

    # What every mechanism gets -----------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.options)

    def no_weight_decay(self) -> set[str]:
        """As timm's models say it."""
        return {name for name, _ in self.named_parameters() if name in self.undecayed}

    @property
    def dropout(self) -> float:
        """The share of attention weights dropped now."""
        return self.attn_drop.p if self.training else 0.0

    def case_of(self, op: str, plan: Any, batch: int = 1) -> Case:
        """The case of a call of `op` by this layer."""
        weight = self.qkv.weight
        return Case(op, plan, batch, self.num_heads, self.head_dim, weight.dtype, weight.device.type, self.dropout)

    def check(self, grid: Grid) -> None:
        reason = self.refuses(grid)
        if reason:
            raise UserError(f"attention {self.name!r} cannot serve grid {grid}: {reason}")

    def accept(self, x: Tensor, grid: Grid) -> None:
        """Raise unless x [B, N, C] are tokens of `grid` that this attention can serve."""
        if x.ndim != 3 or x.shape[1] != grid.tokens or x.shape[2] != self.dim:
            raise UserError(
                f"attention {self.name!r} got tokens of shape {tuple(x.shape)}; expected "
                f"[batch, {grid.tokens}, {self.dim}] for grid {grid}"
            )
        self.check(grid)

    def class_row(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """How much of its attention the class token, which sees every token, gives each: [B, H, N]."""
        row, bias = self.scale * q[:, :, :1] @ k.transpose(-2, -1), grid.key_bias(q.dtype)
        return torch.softmax(row if bias is None else row + bias[:, None, None], dim=-1)[:, :, 0]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, C] → q, k, v [B, H, N, D], normalised as the model asks."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def merge(self, out: Tensor) -> Tensor:
        """out [B, H, N, D] → [B, N, C] through the output projection."""
        B, _, N, _ = out.shape
        return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).reshape(B, N, self.attn_dim))))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        self.accept(x, context.grid)
        q, k, v = self.project(x)
        out, context = self.attend(q, k, v, context)
        if "class_attention" in context.wants & self.provides:
            context = context.replace(class_attention=self.class_row(q, k, context.grid))
        return self.merge(out), context

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """The attention map this layer amounts to, [B, H, queries, N], whichever kernel computes it.

        Every mechanism that is linear in its values returns the map itself when the values are an identity matrix, so
        the map is read off through `attend`, a head's width of columns at a time. Mechanisms that are not linear in
        the values override this and say what they show instead.
        """
        q, k, v = self.project(x)
        N, rows = x.shape[1], slice(query, query + 1) if isinstance(query, int) else query
        columns = []
        for start in range(0, N, v.shape[-1]):
            width = min(v.shape[-1], N - start)
            eye = v.new_zeros(N, v.shape[-1])
            eye[start : start + width, :width] = torch.eye(width, device=v.device, dtype=v.dtype)
            out, _ = self.attend(q, k, eye.expand_as(v), context)
            columns.append(out[:, :, rows, :width])
        return torch.cat(columns, dim=-1)

    def projection_macs(self, grid: Grid) -> int:
        return grid.tokens * self.dim * 3 * self.attn_dim + grid.tokens * self.attn_dim * self.dim

    def leaving_macs(self, grid: Grid, wants: Collection[str]) -> int:
        """Multiply-accumulates of what is left in the context beside the output."""
        return grid.tokens * self.attn_dim if "class_attention" in wants else 0

    def macs(self, grid: Grid, wants: Collection[str] = ()) -> Macs:
        """What the layer costs for one image; `wants` names what it leaves for the next."""
        core = self.core_macs(grid) + self.leaving_macs(grid, wants)
        return Macs(core, self.projection_macs(grid), other=self.extra_macs(grid))

    def extra_repr(self) -> str:
        return f"{self.spec}, heads={self.num_heads}, grid={self.grid}"
