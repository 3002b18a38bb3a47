"""The interface of every attention: what a mechanism defines, and what it inherits.

Shapes: B batch · H heads · N tokens (queries) · M keys · D head width · C model width. Tokens are ordered prefix first
(class and register tokens), then the patches row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..options import Options as BaseOptions
from ..options import Spec
from ..sparse import dispatch
from ..sparse.backend import Case, Choice
from .cost import Cost
from .prefix_rows import PrefixRows
from .provided import class_attention
from .values import Context, Grid


class Attention(Cost, PrefixRows):
    """An attention layer: `forward(x_BNC, context) -> (x_BNC, context)`, with timm's weight names.

    A mechanism is a subclass that sets `name` and `Options` and defines `attend` and `core_macs`; most need no more.
    Weights of its own are created in `setup`. `refuses` returns the reason why a grid cannot be served. Mechanisms
    that read scores of unusual shapes, or that train a predictor, also inherit from a mixin in `attention.scores` or
    `attention.selection`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Specs worth trying: the interface tests run each of them, and `attendless list` prints them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: Context entries (see `ENTRIES`) that the layer before must provide.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Context entries that the layer can provide if the next layer or a reducer reads them. `forward` adds `keys`, and
    #: `class_attention` as a row of full attention, which is right where prefix queries attend to every token.
    provides: ClassVar[frozenset[str]] = frozenset({"keys"})
    #: Context entries that the layer uses if they are present.
    takes: ClassVar[frozenset[str]] = frozenset()
    #: How many of q, k and v the layer projects: 3, 2 (k and v) or 1 (v).
    projected: ClassVar[int] = 3
    #: Whether the mechanism accepts tokens of several frames.
    frames: ClassVar[bool] = False
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
        projections: bool = True,
        turn: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layer for `grid`; the arguments from `qkv_bias` to `norm_layer` are those of timm's `Attention`.

        Args:
            dim: Model width C.
            num_heads: Number of heads H.
            grid: The token grid the layer is created for; `resize` adapts it to another one.
            options: The mechanism's options; its defaults if None.
            head_dim: Head width D; C / H if None.
            qkv_bias: Whether the projections of q, k and v have a bias.
            qk_norm: Whether q and k are normalised per head.
            scale_norm: Whether the output is normalised before the output projection.
            proj_bias: Whether the output projection has a bias.
            attn_drop: Dropout rate of the attention weights.
            proj_drop: Dropout rate after the output projection.
            norm_layer: The class of these norms.
            projections: False creates the core alone, for callers that have q, k and v and call only `attend`.
            turn: The largest angle, in radians, by which rotary position embeddings rotate keys from one patch to the
                next; 0 without rotary embeddings.
            device: Device of the weights.
            dtype: Type of the weights.
        """
        super().__init__()
        if not projections and not self.has_core():
            raise UserError(f"attention {self.name!r} does not go without projections of its own")
        if head_dim is None and dim % num_heads:
            raise UserError(f"width {dim} does not divide into {num_heads} heads")
        self.dim, self.num_heads = dim, num_heads
        self.head_dim = head_dim or dim // num_heads
        self.attn_dim = self.num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.grid, self.turn = grid, turn
        self.options: Any = options if options is not None else self.Options()
        self.check(grid)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attn_drop = nn.Dropout(attn_drop)
        if projections:
            self.qkv = nn.Linear(dim, self.projected * self.attn_dim, bias=qkv_bias, **factory)
            self.q_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
            self.k_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
            self.norm = norm_layer(self.attn_dim).to(**factory) if scale_norm else nn.Identity()
            self.proj = nn.Linear(self.attn_dim, dim, bias=proj_bias, **factory)
            self.proj_drop = nn.Dropout(proj_drop)
        self.setup(factory)
        #: Device and type of the queries for a layer without weights.
        self.placed = torch.empty(0, **factory)

    # What a mechanism defines; only `attend` and `core_macs` (`attention.cost`) are required --------------------------

    def setup(self, factory: dict[str, Any]) -> None:
        """Create the mechanism's own weights; `factory` holds device and dtype."""

    def init_weights(self) -> None:
        """Initialise weights for training from scratch; `setup` chooses values that suit a pretrained model."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        """q, k [B, H, N, D] and v [B, H, N, any] → out [B, H, N, any], and the context for the next layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define attend")

    def refuses(self, grid: Grid) -> str | None:
        """Why the layer cannot serve `grid`, or None if it can. The default refuses reduced grids."""
        return "it does not take reduced token sets" if grid.reduced else None

    def refine(self, x: Tensor, context: Context) -> Tensor:
        """Further processing of the tokens after the residual connection, such as XCiT's convolution."""
        return x

    def resize(self, grid: Grid) -> None:
        """Resample weights that depend on the token grid, in place."""
        self.check(grid)
        self.grid = grid

    def no_weight_decay(self) -> set[str]:
        """Names of the mechanism's own weights that take no weight decay, as in timm's models."""
        return set()

    def case(self, grid: Grid, batch: int = 1) -> Case | None:
        """The call of one of the `sparse.operations` that `attend` makes, or None; see `case_of`."""
        return None

    def choice(self, grid: Grid, batch: int = 1) -> Choice:
        """The backend that will execute `attend`, and the reason."""
        case = self.case(grid, batch)
        return Choice("torch", "plain PyTorch operations") if case is None else dispatch.choose(case)

    def map(self, x: Tensor, context: Context, query: int | slice = slice(None)) -> Tensor:
        """The attention map of the layer, [B, H, queries, N], whichever backend computes it.

        A mechanism that is linear in its values returns the map when the values are an identity matrix, so the map is
        computed by `attend`, one head width of columns at a time. Mechanisms that are not linear in the values
        override this method and document what they return.
        """
        q, k, v = self.project(x)
        N, rows = x.shape[1], slice(query, query + 1) if isinstance(query, int) else query
        columns = []
        for start in range(0, N, v.shape[-1]):
            width = min(v.shape[-1], N - start)
            eye = v.new_zeros(N, v.shape[-1])
            eye[start : start + width, :width] = torch.eye(width, device=v.device, dtype=v.dtype)
            out, _ = self.attend(q, k, eye.expand_as(v), context)
            columns.append(out[:, :, rows, :width].clone())  # a view would retain the other rows
        return torch.cat(columns, dim=-1)

    def sees(self, x: Tensor, context: Context, query: int) -> Tensor:
        """The tokens that `query` attends to one by one rather than as part of an average: bool [B, H, N].

        The default returns the tokens with a positive weight in the map. Mechanisms that also attend to averages
        override it.
        """
        return self.map(x, context, query)[:, :, 0] > 0

    # What every mechanism inherits ------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """The mechanism's name and options."""
        return Spec(self.name, self.options)

    @classmethod
    def has_core(cls) -> bool:
        """Whether `attend` is the whole mechanism, so that it works on q, k and v that a model projects itself."""
        parts = ("forward", "project", "merge", "refine")
        return all(getattr(cls, part) is getattr(Attention, part) for part in parts)

    @property
    def dropout(self) -> float:
        """The current dropout rate of attention weights."""
        return self.attn_drop.p if self.training else 0.0

    def case_of(self, op: str, plan: Any, batch: int = 1) -> Case:
        """The case of a call of operation `op` by this layer."""
        weight = next(self.parameters(), self.placed)
        return Case(op, plan, batch, self.num_heads, self.head_dim, weight.dtype, weight.device.type, self.dropout)

    def check(self, grid: Grid) -> None:
        """Raise `UserError` if the layer cannot serve `grid`."""
        reason = self.refuses(grid) if grid.depth == 1 or self.frames else "it takes one frame at a time"
        if reason:
            raise UserError(f"attention {self.name!r} cannot serve grid {grid}: {reason}")

    def accept(self, x: Tensor, grid: Grid) -> None:
        """Raise `UserError` unless x [B, N, C] are tokens of `grid` and the layer can serve it."""
        if x.ndim != 3 or x.shape[1] != grid.tokens or x.shape[2] != self.dim:
            raise UserError(
                f"attention {self.name!r} got tokens of shape {tuple(x.shape)}; expected "
                f"[batch, {grid.tokens}, {self.dim}] for grid {grid}"
            )
        self.check(grid)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, C] → q, k, v [B, H, N, D], q and k normalised by `q_norm` and `k_norm`."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def merge(self, out: Tensor) -> Tensor:
        """out [B, H, N, D] → [B, N, C] through the output projection."""
        B, _, N, _ = out.shape
        out = out.transpose(1, 2).reshape(B, N, self.attn_dim)
        return cast(Tensor, self.proj_drop(self.proj(self.norm(out))))

    def forward(self, x: Tensor, context: Context, *, prefix_rows: bool = False) -> tuple[Tensor, Context]:
        """Attend. With `prefix_rows`, which requires `prefix_is_full`, the output has the prefix tokens alone."""
        self.accept(x, context.grid)
        if prefix_rows:
            return self.attend_prefix(x, context.grid), context
        q, k, v = self.project(x)
        out, context = self.attend(q, k, v, context)
        return self.merge(out), self.provide(q, k, context)

    def provide(self, q: Tensor, k: Tensor, context: Context) -> Context:
        """The context with the entries in `wants` that are computed from q and k [B, H, N, D]."""
        wants = context.wants & self.provides
        if "class_attention" in wants:
            context = context.replace(class_attention=class_attention(q, k, context.grid, scale=self.scale))
        return context.replace(keys=k) if "keys" in wants else context

    def extra_repr(self) -> str:
        return f"{self.spec}, heads={self.num_heads}, grid={self.grid}"
