"""The contract every attention keeps.

Shapes: B batch · H heads · N tokens (queries) · M keys · D head width · C model width. Tokens are ordered prefix first
(class and register tokens), then the patches row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..options import Options as BaseOptions
from ..options import Spec
from ..sparse import dispatch
from ..sparse.backend import Case, Choice
from .prefix_rows import PrefixRows
from .values import Context, Grid, Macs


class Attention(PrefixRows):
    """`forward(x_BNC, context) -> (x_BNC, context)` under timm's weight names: qkv, q_norm, k_norm, norm, proj.

    A mechanism subclasses this, states `name`, its `Options`, and writes `attend` and `core_macs`; that is all most
    need. Weights of its own are made in `setup`. Whatever it cannot serve it refuses, with a reason, in `refuses`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    #: Context entries (see `ENTRIES`) that the layer before must leave.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Context entries that this one can leave, if the next layer or a reducer reads them. Where prefix queries see
    #: every token, the class token's attention is a row of full attention: stating it here, or `keys`, is enough, and
    #: `forward` leaves it.
    provides: ClassVar[frozenset[str]] = frozenset({"keys"})
    #: Context entries that it uses if they are there.
    takes: ClassVar[frozenset[str]] = frozenset()
    #: How many of q, k and v it projects; one that does not project all of them has v, or k and v.
    projected: ClassVar[int] = 3
    #: Specs worth trying: the contract test runs each of them, and `attendless list` shows them.
    examples: ClassVar[tuple[str, ...]] = ()
    #: Weights of the mechanism's own that weight decay must leave alone.
    undecayed: ClassVar[frozenset[str]] = frozenset()
    #: Why the PyTorch backend may execute more multiply-accumulates than `macs` counts for the function, if it does.
    executes_more: ClassVar[str] = ""
    #: Methods in which keys are chosen, so that the layer view can time them apart.
    selection: ClassVar[tuple[str, ...]] = ()
    #: Whether tokens of several frames can be served.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Without `projections` this is the core alone: whoever has q, k and v calls `attend`, and nothing else."""
        super().__init__()
        if not projections and not self.has_core():
            raise UserError(f"attention {self.name!r} does not go without projections of its own")
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
        self.attn_drop = nn.Dropout(attn_drop)
        if projections:
            self.qkv = nn.Linear(dim, self.projected * self.attn_dim, bias=qkv_bias, **factory)
            self.q_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
            self.k_norm = norm_layer(self.head_dim).to(**factory) if qk_norm else nn.Identity()
            self.norm = norm_layer(self.attn_dim).to(**factory) if scale_norm else nn.Identity()
            self.proj = nn.Linear(self.attn_dim, dim, bias=proj_bias, **factory)
            self.proj_drop = nn.Dropout(proj_drop)
        self.setup(factory)
        #: Where the queries come from and their type, while no weight says so.
        self.placed = torch.empty(0, **factory)

    # What a mechanism writes -------------------------------------------------------------------------------------

    def setup(self, factory: dict[str, Any]) -> None:
        """Make weights of the mechanism's own; `factory` holds device and dtype."""

    def init_weights(self) -> None:
        """Start as its authors do, for training from scratch; `setup` leaves what disturbs a pretrained model least."""

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

    def score_shape(self, batch: int, grid: Grid) -> tuple[int, ...]:
        """The shape of the scores it leaves, if it does, and of those it reads, if it does."""
        return (batch, self.num_heads, grid.tokens, grid.tokens)

    def unreadable(self, shape: tuple[int, ...], grid: Grid) -> str | None:
        """Why it cannot read scores of that shape on `grid`, or None if it can."""
        expected = self.score_shape(shape[0], grid)
        return None if shape == expected else f"it reads scores of {_sizes(expected)}, not of {_sizes(shape)}"

    def misreads(self, before: Attention) -> str | None:
        """Why it cannot read the scores that `before` leaves, or None if it can."""
        return self.unreadable(before.score_shape(1, before.grid), self.grid)

    @classmethod
    def in_stage(cls, spec: Spec, number: int) -> str | Spec:
        """What a spec means for that layer of a stage. Most mean the same for all."""
        return spec

    def refine(self, x: Tensor, context: Context) -> Tensor:
        """What the mechanism still does to the tokens once the backbone has added its output to them; most do nothing."""
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
        case = self.case(grid.condensed(), batch)
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

    def fitted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another attention's weights, with those rows of `qkv` that this one projects."""
        rows = self.projected * self.attn_dim
        return {name: w[-rows:] if name.startswith("qkv.") and len(w) > rows else w for name, w in weights.items()}

    @classmethod
    def has_core(cls) -> bool:
        """Whether `attend` is all there is to the mechanism, given q, k and v."""
        parts = ("forward", "project", "merge", "refine")
        return all(getattr(cls, part) is getattr(Attention, part) for part in parts)

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
        weight = next(self.parameters(), self.placed)
        return Case(op, plan, batch, self.num_heads, self.head_dim, weight.dtype, weight.device.type, self.dropout)

    def check(self, grid: Grid) -> None:
        reason = self.refuses(grid) if grid.depth == 1 or self.frames else "it takes one frame at a time"
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
        """How much of its attention the class token, which sees every token, gives each: [B, H, N].

        Where there is none, the mean of all queries stands in for it.
        """
        first = q[:, :, :1] if grid.prefix else q.mean(2, keepdim=True)
        row, bias = self.scale * first @ k.transpose(-2, -1), grid.key_bias(q.dtype)
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

    def forward(self, x: Tensor, context: Context, *, prefix_rows: bool = False) -> tuple[Tensor, Context]:
        """Attend. With `prefix_rows`, which requires `prefix_is_full`, the output has the prefix tokens alone."""
        self.accept(x, context.grid)
        if prefix_rows:
            return self.attend_prefix(x, context.grid), context
        q, k, v = self.project(x)
        out, context = self.attend(q, k, v, context)
        if "class_attention" in context.wants & self.provides:
            context = context.replace(class_attention=self.class_row(q, k, context.grid))
        if "keys" in context.wants & self.provides:
            context = context.replace(keys=k)
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
            columns.append(out[:, :, rows, :width].clone())  # a view would keep the rows nobody asked for
        return torch.cat(columns, dim=-1)

    def sees(self, x: Tensor, context: Context, query: int) -> Tensor:
        """Which tokens one query sees as they are, rather than blurred, pooled or not at all: bool [B, H, N]. Here,
        those that its map gives anything; a mechanism that also sees some less sharply says which it does not."""
        return self.map(x, context, query)[:, :, 0] > 0

    def projection_macs(self, grid: Grid) -> int:
        return grid.tokens * self.dim * self.projected * self.attn_dim + grid.tokens * self.attn_dim * self.dim

    def leaving_macs(self, grid: Grid, wants: Collection[str]) -> int:
        """Multiply-accumulates of what is left in the context beside the output."""
        return grid.tokens * self.attn_dim if "class_attention" in wants else 0

    def macs(self, grid: Grid, wants: Collection[str] = ()) -> Macs:
        """What the layer costs for one image; `wants` names what it leaves for the next."""
        core = self.core_macs(grid) + self.leaving_macs(grid, wants)
        # A backbone may have taken the output projection away.
        absent = grid.tokens * self.attn_dim * self.dim if isinstance(getattr(self, "proj", None), nn.Identity) else 0
        return Macs(core, self.projection_macs(grid) - absent, other=self.extra_macs(grid))

    def extra_repr(self) -> str:
        return f"{self.spec}, heads={self.num_heads}, grid={self.grid}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape[1:]))
