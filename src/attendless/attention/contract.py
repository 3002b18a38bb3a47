"""The contract every attention keeps, and the values that pass through it.

Shapes: B batch · H heads · N tokens (queries) · M keys · D head width · C model width. Tokens are ordered prefix first
(class and register tokens), then the patches row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UserError
from .spec import Options as BaseOptions
from .spec import Spec


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the tokens stand: `prefix` tokens in front, then the patches of a `height` × `width` grid, row by row.

    After token reduction the patches that remain are listed per image: `cells` [B, n] says which cell of the grid each
    came from, `sizes` [B, n] how many original tokens it stands for.
    """

    height: int
    width: int
    prefix: int = 0
    cells: Tensor | None = None
    sizes: Tensor | None = None

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

    def __str__(self) -> str:
        prefix = f"{self.prefix}+" if self.prefix else ""
        return f"{prefix}{self.height}x{self.width}" + (f" reduced to {self.patches}" if self.reduced else "")


@dataclasses.dataclass(frozen=True)
class Context:
    """What travels with the tokens from block to block. Immutable: a block returns a new one.

    `wants` names what a later layer or the caller asked this layer to leave here: `"scores"` (pre-softmax,
    [B, H, N, N]), `"class_attention"` (the class token's row, [B, H, N]). `losses` are extra terms for training.
    """

    grid: Grid
    wants: frozenset[str] = frozenset()
    scores: Tensor | None = None
    class_attention: Tensor | None = None
    losses: tuple[tuple[str, Tensor], ...] = ()

    def replace(self, **changes: Any) -> Context:
        return dataclasses.replace(self, **changes)

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


_register_pytree(Grid, ("cells", "sizes"), ("height", "width", "prefix"))
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

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a function will be executed, and why. It never changes what is computed."""

    path: str
    reason: str


class Attention(nn.Module):
    """`forward(x_BNC, context) -> (x_BNC, context)` under timm's weight names: qkv, q_norm, k_norm, norm, proj.

    A mechanism subclasses this, states `name`, its `Options`, and writes `attend` and `core_macs`; that is all most
    need. Weights of its own are made in `setup`. Whatever it cannot serve it refuses, with a reason, in `refuses`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Context entries that the layer before must provide.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Specs worth trying: the contract test runs each of them, and `attendless list` shows them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: Weights of the mechanism's own that weight decay must leave alone.
    undecayed: ClassVar[frozenset[str]] = frozenset()
    #: Why the PyTorch path may execute more multiply-accumulates than `macs` counts for the function, if it does.
    executes_more: ClassVar[str] = ""

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

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        """How `attend` will be executed here, and why."""
        return Choice("torch", "plain PyTorch operations")

    def estimate(self, grid: Grid, batch: int = 1) -> tuple[float, float] | None:
        """Seconds `attend` should take on this machine and full attention in its place; None: there is no estimate."""
        return None

    # What every mechanism gets -----------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.options)

    def no_weight_decay(self) -> set[str]:
        """As timm's models say it."""
        return {name for name, _ in self.named_parameters() if name in self.undecayed}

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

    def macs(self, grid: Grid) -> Macs:
        return Macs(self.core_macs(grid), self.projection_macs(grid), other=self.extra_macs(grid))

    def extra_repr(self) -> str:
        return f"{self.spec}, heads={self.num_heads}, grid={self.grid}"
