"""The isotropic backbone: timm's VisionTransformer with the same weight names, whose blocks pass the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from timm.layers import AttentionPoolLatent
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..attention import (
    Context,
    Grid,
    Macs,
    Spec,
    expand,
    join,
)
from ..errors import UserError
from ..sparse.full import macs as full_macs
from .base import Backbone, Place, check_order
from .block import Block, rebuild_block, run_block
from .class_token_tail import ClassTokenTail, mixes_tokens, observed
from .cost import Layer, parameters, weight_macs
from .probe import replaced
from .weights import start_attentions

# The mixin uses attributes of timm's class. A subclass inherits from that class, or from its distilled variant.
if TYPE_CHECKING:
    _Base = VisionTransformer
else:
    _Base = object


class ColumnarBackbone(Backbone, _Base):
    """The attendless part of an isotropic backbone: it exchanges the blocks of timm's class.

    The last block is a `ClassTokenTail`, which `forward` may run for the class token alone.
    """

    blocks: Any

    def __init__(
        self,
        *args: Any,
        attention: str | Sequence[Spec] = "full",
        tokens: str | Spec = "",
        scratch: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.patch_drop, nn.Identity):
            raise UserError("patch dropout is not supported: it hides which patches remain. Use patch_drop_rate=0")
        depth = len(self.blocks)
        specs = expand(attention, depth) if isinstance(attention, str) else list(attention)
        if len(specs) != depth:
            raise UserError(f"{len(specs)} attentions were given for {depth} layers")
        grid = self.grid()
        kinds = [ClassTokenTail if number == depth - 1 else Block for number in range(depth)]
        self.blocks = nn.Sequential(
            *(rebuild_block(b, s, grid, k) for b, s, k in zip(self.blocks, specs, kinds, strict=True))
        )
        self.set_tokens(tokens)
        start_attentions(self.blocks, scratch=scratch and kwargs.get("weight_init") != "skip")

    def check_order(self) -> None:
        """Raise unless every attention and reducer receives what it reads."""
        check_order([Place(f"blocks.{i}", block.attn, block.reducer) for i, block in enumerate(self.blocks)])
        grid = self.grid()
        for block in self.blocks:
            grid = block.check(grid)
        self._check_pool()

    @property
    def attention(self) -> str:
        """The spec of every layer, in the shortest text."""
        return join([block.attn.spec for block in self.blocks])

    def grid(self, size: tuple[int, int] | None = None) -> Grid:
        """The token grid of an image of `size` (height, width); of the model's own size if none is given."""
        height, width = self.patch_embed.dynamic_feat_size(size) if size else self.patch_embed.grid_size
        return Grid(height, width, self.num_prefix_tokens)

    def _check_pool(self) -> None:
        """Raise if the classifier pools patches in a way that does not support dropped patches."""
        dropped = [block.reducer for block in self.blocks if block.reducer is not None and block.reducer.drops]
        if dropped and self.global_pool not in ("token", "avg", ""):
            raise UserError(
                f"reducer {dropped[0].spec} drops patches, but the model's pool {self.global_pool!r} needs every patch"
            )

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for block in self.blocks:
            block.attn.resize(self.grid())

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """Images → tokens with their positions added, and the context they start with."""
        grid = self.grid((images.shape[-2], images.shape[-1]))
        return self.norm_pre(self._pos_embed(self.patch_embed(images))), Context(grid)

    def run_layer(self, number: int, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        return run_block(self.blocks[number], x, context, checkpointing=self.grad_checkpointing and self.training)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _refuse_masks(attn_mask, is_causal)
        return self.forward_context(x)[0]

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _refuse_masks(attn_mask, is_causal)
        tail = self.tail
        if tail is None or self.training or observed(tail, self.norm):
            x, context = self.forward_context(x)
            return self.answer(x, context.grid)
        x, context = self.run_layers(*self.embed(x), stop=len(self.blocks) - 1)
        x, context = tail(x, context, prefix_rows=True)
        return cast(Tensor, self.forward_head(self.norm(x)))

    def needs_patches(self) -> str:
        if self.global_pool != "token" or self.num_prefix_tokens == 0:
            return f"global_pool={self.global_pool!r} reads patches"
        for name, known in _OUTPUT.items():
            if replaced(self, name) or getattr(type(self), name) not in known:
                return f"{name} was overridden and may read patches"
        if not isinstance(self.blocks[-1], ClassTokenTail):
            return f"a last block of class {type(self.blocks[-1]).__name__} may mix tokens after attention"
        norms = {"norm": self.norm, "fc_norm": self.fc_norm, "norm2 of the last block": self.blocks[-1].norm2}
        mixing = [f"{name} ({type(norm).__name__})" for name, norm in norms.items() if mixes_tokens(norm)]
        return f"{' and '.join(mixing)} may mix tokens" if mixing else ""

    def answer(self, x: Tensor, grid: Grid) -> Tensor:
        """Where the classifier pools patches, a merged one is weighted by the number of patches it represents."""
        if self.global_pool != "token" and grid.sizes is not None:
            x = grid.balanced(x) if self.global_pool == "avg" else grid.restore(x)
        return cast(Tensor, self.forward_head(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """As timm's: the tokens after chosen blocks, as feature maps (`NCHW`) or token lists (`NLC`)."""
        _refuse_masks(attn_mask, is_causal)
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt={output_fmt!r}: expected NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        taken = []
        for step in self.walk(*self.embed(x), stop=last + 1 if stop_early else None):
            x, grid = step.x, step.context.grid
            if step.number - 1 in take:  # a step holds the input of its layer: the output of the layer before
                taken.append(grid.restore(self.norm(x) if norm else x))
        prefixes = [y[:, : grid.prefix] for y in taken] if grid.prefix else None
        maps = [y[:, grid.prefix :] for y in taken]
        if output_fmt == "NCHW":
            maps = [y.transpose(1, 2).unflatten(2, (grid.height, grid.width)).contiguous() for y in maps]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": maps}
            if prefixes is not None and return_prefix_tokens:
                result["image_intermediates_prefix"] = prefixes
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        found: list[Any] = list(zip(maps, prefixes, strict=True)) if return_prefix_tokens and prefixes else maps
        return found if intermediates_only else (self.norm(x), found)

    def no_weight_decay(self) -> set[str]:
        """timm's names, and those of the attentions' own weights."""
        layers = enumerate(self.blocks)
        own = {f"blocks.{i}.attn.{name}" for i, block in layers for name in block.attn.no_weight_decay()}
        return set(super().no_weight_decay()) | own

    def embedding_macs(self, grid: Grid) -> int:
        """MACs of the patch embedding for one image on `grid`."""
        return weight_macs(self.patch_embed, grid.patches)

    def head_macs(self, grid: Grid) -> int:
        """MACs of everything after the last layer."""
        return _head_macs(self, grid)

    def costs(self, size: tuple[int, int] | None = None, batch: int = 1) -> list[Layer]:
        """Parameters and multiply-accumulates of the embedding, every block and the head, for one image; the backend
        of every attention for `batch` images."""
        grid, tail = self.grid(size), self.tail
        embedding = sum(parameters(m) for m in (self.patch_embed, self.norm_pre))
        embedding += sum(
            t.numel() for t in (self.pos_embed, self.cls_token, self.reg_token, _dist(self)) if t is not None
        )
        rows = [Layer("embedding", grid, Macs(other=self.embedding_macs(grid)), embedding)]
        for i, (block, wants) in enumerate(zip(self.blocks, self.wants(), strict=True)):
            if block is tail:
                rows.append(tail.prefix_cost(f"blocks.{i}", grid, batch))
                grid = grid.reduced_to(0)
            else:
                rows.append(block.cost(f"blocks.{i}", grid, wants, batch))
                grid = block.grid_after(grid)
        counted = sum(row.params for row in rows)
        rows.append(Layer("head", grid, Macs(other=self.head_macs(grid)), parameters(self) - counted))
        return rows


class Columnar(ColumnarBackbone, VisionTransformer):
    """timm's `VisionTransformer`, with the same keys, whose blocks have attendless attentions and may reduce tokens.

    Args:
        args: Positional arguments of timm's `VisionTransformer`.
        attention: One spec for every layer, or one per layer, such as `2xfull/10xfoveal:keep=0.1`.
        tokens: Spec of a token reducer, such as `tome:r=8`; empty for none.
        scratch: Whether attentions start with the weights of their authors, for training from scratch; False for
            weights to be loaded that were trained with another attention, which the attentions then alter as little
            as they can.
        kwargs: Further arguments of timm's `VisionTransformer`.
    """


class ColumnarDistilled(ColumnarBackbone, VisionTransformerDistilled):
    """DeiT's distilled variant, with its second prefix token and second head."""


#: Methods between the last block and the logits, and their implementations that read prefix tokens alone.
_OUTPUT = {
    "run_layer": (ColumnarBackbone.run_layer,),
    "answer": (ColumnarBackbone.answer,),
    "forward_head": (VisionTransformer.forward_head, VisionTransformerDistilled.forward_head),
    "pool": (VisionTransformer.pool,),
}


def replaced_outputs(model: nn.Module) -> list[str]:
    """The methods between the last block and the logits that were replaced on the instance."""
    return [name for name in _OUTPUT if replaced(model, name)]


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise UserError("attn_mask and is_causal are not supported: the attention decides which keys a query sees")


def _dist(model: nn.Module) -> Tensor | None:
    return getattr(model, "dist_token", None)


def _head_macs(model: Any, grid: Grid) -> int:
    macs = weight_macs(model.head, 1)
    macs += weight_macs(model.head_dist, 1) if hasattr(model, "head_dist") else 0
    macs += weight_macs(model.aux_head, grid.patches) if hasattr(model, "aux_head") else 0
    pool: nn.Module | None = model.attn_pool
    if pool is None:
        return macs
    keys = grid.tokens if model.pool_include_prefix else grid.patches
    if not isinstance(pool, AttentionPoolLatent):  # self-attention without weights of its own
        return macs + full_macs(keys, model.embed_dim)
    latents = int(pool.latent_len)
    macs += weight_macs(pool.q, latents) + weight_macs(pool.kv, keys) + 2 * latents * keys * int(model.embed_dim)
    return macs + weight_macs(pool.proj, latents) + (weight_macs(pool.mlp, latents) if pool.mlp else 0)
