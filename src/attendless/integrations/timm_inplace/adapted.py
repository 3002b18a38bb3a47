"""An attention of somebody else's whose heads are multiplied by a core of ours.

The module stays what it is: its weights under their names, its norms, biases, rotations, gates and projections. Only
its class is exchanged for one that inherits from it (`Adapted` mixed in): the module's own forward runs, and where that
calls PyTorch's fused attention, the core computes instead. So whatever a class does before and after, in whatever
version, is done; and giving the class back restores the module bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...attention import Attention, Context, Grid, Spec
from ...errors import UserError
from ..grid_tracking import number
from .where import Where


class _Handing(TorchFunctionMode):
    """Inside, calls of PyTorch's fused attention go to `attend`; they are listed in `calls`."""

    def __init__(self, attend: Callable[..., Tensor], calls: list[str]) -> None:
        super().__init__()
        self.attend, self.calls = attend, calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.calls.append("handed over")
            return self.attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Adapted(nn.Module):
    """Mixed into the class of an attention. A subclass says where the tokens stand (`stands`)."""

    core: Attention
    #: The class that is given back.
    original: ClassVar[type[nn.Module]]
    #: Whether full attention by our core is more than the module's own: the same, sooner or in less memory.
    folds: ClassVar[bool] = False
    #: Its own forward must go by PyTorch's fused attention. (Instances keep theirs: this one stands before it.)
    fused_attn = property(lambda self: True)

    def stands(self, x: Tensor) -> Grid:
        """The grid on which the tokens x stand that the module is given."""
        raise NotImplementedError(f"{type(self).__name__} does not define stands")

    def placed(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """q, k [B, H, N, D] as the module made them → as a core takes them: with all that positions add to scores."""
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """q, k, v [B, H, N, D] as the module made them → [B, H, N, D]."""
        return self.core.attend(*self.placed(q, k, grid), v, Context(grid))[0]

    @property
    def spec(self) -> Spec:
        return self.core.spec

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        grid = self.stands(x)

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
            # Dropout is the core's too: it shares the module's `attn_drop`.
            self.core.check(grid)
            self.check(q, k, grid, masked=attn_mask is not None or is_causal or any(more.values()))
            wanted = q.shape[-1] ** -0.5 if scale is None else scale
            q = q if wanted == self.core.scale else q * (wanted / self.core.scale)
            if q.ndim == 4:
                return self.attend(q, k, v, grid)
            q, k, v = (t.unflatten(0, (-1, self.core.num_heads)) for t in (q, k, v))
            return self.attend(q, k, v, grid).flatten(0, 1)

        calls: list[str] = []
        with _Handing(attend, calls):
            out = super().forward(x, *args, **kwargs)
        if len(calls) != 1:
            raise UserError(
                f"{self.original.__name__} called PyTorch's fused attention {len(calls)} times, expected once: this "
                "version of its library is not known here"
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
    """Of an attention that is given tokens in a row [B, N, C]."""

    where: Where

    def stands(self, x: Tensor) -> Grid:
        return self.where.grid(x.shape[1])


class AdaptedMap(Adapted):
    """Of an attention that is given a map of tokens [B, H, W, C]."""

    def stands(self, x: Tensor) -> Grid:
        return Grid(number(x.shape[1]), number(x.shape[2]))


def put(module: Any, adapted: type[Adapted], core: Attention, where: Where | None = None) -> None:
    """Let `core` compute for `module`, whose class becomes `adapted`."""
    module.__class__ = adapted
    if where is not None:
        module.where = where
    if isinstance(getattr(module, "attn_drop", None), nn.Dropout):
        core.attn_drop = module.attn_drop
    module.core = core.train(module.training)


def take_out(module: Any) -> None:
    """Give an adapted module back to itself."""
    module.__class__ = module.original
    del module.core
    module.__dict__.pop("where", None)


def adapted_modules(model: nn.Module) -> list[tuple[str, Adapted]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Adapted)]
