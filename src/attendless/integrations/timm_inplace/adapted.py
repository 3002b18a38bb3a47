"""An attention module of another library whose fused attention is computed by an attendless attention, its *core*.

The module keeps its weights, norms, biases, rotations, gates and projections. `put` replaces its class by a subclass
with `Adapted` mixed in. The module's own forward runs, and the core computes the call of PyTorch's fused attention.
The code of the class before and after that call runs unchanged, in any version; `take_out` restores the module
bit-identically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...attention import Attention, Context, Grid, Spec
from ...errors import UserError
from ..grid_tracking import TokenGrid, number
from . import bands


class _Intercept(TorchFunctionMode):
    """Redirects calls of PyTorch's fused attention to `attend`, and lists them in `calls`."""

    def __init__(self, attend: Callable[..., Tensor], calls: list[str]) -> None:
        super().__init__()
        self.attend, self.calls = attend, calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.calls.append("redirected")
            return self.attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Adapted(nn.Module):
    """Mixed into the class of an attention. A subclass defines `grid_of`."""

    core: Attention
    #: The class that `take_out` restores.
    original: ClassVar[type[nn.Module]]
    #: Whether `full` as the core computes the same function as the module in less time or memory.
    folds: ClassVar[bool] = False
    #: Selects the fused branch of the module's forward. The value in the instance stays, behind this property.
    fused_attn = property(lambda self: True)

    def grid_of(self, x: Tensor) -> Grid:
        """Return the grid of the tokens x that the module receives."""
        raise NotImplementedError(f"{type(self).__name__} does not define grid_of")

    def placed(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """q, k [B, H, N, D] of the module → q, k for the core, with everything that positions add to the scores."""
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """q, k, v [B, H, N, D] of the module → [B, H, N, D]."""
        return self.core.attend(*self.placed(q, k, grid), v, Context(grid))[0]

    @property
    def spec(self) -> Spec:
        return self.core.spec

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        grid = self.grid_of(x)

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            **more: Any,
        ) -> Tensor:
            # The core applies dropout: it shares the module's `attn_drop`.
            self.core.check(grid)
            self.check(q, k, grid, masked=attn_mask is not None or is_causal or any(more.values()))
            wanted = q.shape[-1] ** -0.5 if scale is None else scale
            q = q if wanted == self.core.scale else q * (wanted / self.core.scale)
            if q.ndim == 4:
                return self.attend(q, k, v, grid)
            q, k, v = (t.unflatten(0, (-1, self.core.num_heads)) for t in (q, k, v))
            return self.attend(q, k, v, grid).flatten(0, 1)

        calls: list[str] = []  # not an attribute of the mode, which torch.compile cannot trace
        with _Intercept(attend, calls):
            out = super().forward(x, *args, **kwargs)
        if len(calls) != 1:
            raise UserError(
                f"{self.original.__name__} called PyTorch's fused attention {len(calls)} times, expected once: this "
                "version of its library is not supported"
            )
        return out

    def check(self, q: Tensor, k: Tensor, grid: Grid, *, masked: bool) -> None:
        if masked:
            raise UserError(
                f"attention {self.core.name!r} in place of {self.original.__name__} cannot honour a mask: run the "
                "model without one, or unpatch it"
            )
        if q.shape[-2] != grid.tokens or k.shape[-2] != grid.tokens:
            raise UserError(
                f"{self.original.__name__} attends from {q.shape[-2]} to {k.shape[-2]} tokens, its grid {grid} has "
                f"{grid.tokens}"
            )


class AdaptedTokens(Adapted):
    """For an attention that receives a row of tokens [B, N, C]."""

    where: TokenGrid

    def grid_of(self, x: Tensor) -> Grid:
        return self.where.grid(x.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        context = self.where.watch.context
        if context is None:
            return super().attend(q, k, v, grid)
        out, context = self.core.attend(q, k, v, context)
        self.where.watch.context = self.core.provide(q, k, context)
        return out


class AdaptedMap(Adapted):
    """For an attention that receives a map of tokens [B, H, W, C]."""

    def grid_of(self, x: Tensor) -> Grid:
        return Grid(number(x.shape[1]), number(x.shape[2]))


def put(module: Any, adapted: type[Adapted], core: Attention, where: TokenGrid | None = None) -> None:
    """Let `core` compute for `module`, whose class becomes `adapted`."""
    module.__class__ = adapted
    if where is not None:
        module.where = where
    if isinstance(getattr(module, "attn_drop", None), nn.Dropout):
        core.attn_drop = module.attn_drop
    module.core = core.train(module.training)


def take_out(owner: nn.Module, modules: list[Any]) -> None:
    """Restore adapted modules of `owner`; stop tracking the grid, and computing in bands, once no adapted module is
    left that needs it."""
    tracking = {module.where for module in modules if isinstance(module, AdaptedTokens)}
    for module in modules:
        if isinstance(module, Adapted):
            module.__class__ = module.original  # type: ignore[assignment]
            del module.core
            module.__dict__.pop("where", None)
    for where in tracking - {m.where for _, m in adapted_modules(owner) if isinstance(m, AdaptedTokens)}:
        where.stop()
    if not adapted_modules(owner):
        bands.take_out(owner)


def adapted_modules(model: nn.Module) -> list[tuple[str, Adapted]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Adapted)]
