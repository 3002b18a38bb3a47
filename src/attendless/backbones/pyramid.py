"""The hierarchical backbone: stages of fewer and wider tokens, each with its own attentions.

One class serves every family: PVT, Swin, Twins and the model of the fair comparison differ in the values of `Style`.
The API is timm's; tokens are [B, N, C], prefix first, as in the isotropic backbone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from timm.layers import to_2tuple, to_ntuple, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..attention import (
    Context,
    Grid,
    Macs,
    Spec,
    expand_stages,
    join_stages,
)
from ..errors import UserError
from .base import Backbone, Place, check_order
from .block import Block
from .cost import Layer, parameters, weight_macs
from .stage import Stage, Style
from .stem import Merge, shrink, to_map
from .weights import start_attentions, start_convolutions


class Pyramid(Backbone, nn.Module):
    """A hierarchical backbone: stages of fewer and wider tokens.

    It accepts images of any size. Weights that depend on a grid, such as learned positions, are resampled in each call,
    or once by `set_input_size`.

    Args:
        attention: One spec for all stages, one per stage (`window/window/full/full`), or one per layer.
        img_size: Input size: one side, or (height, width).
        patch_size: Side of a patch, in pixels.
        in_chans: Channels of the images.
        num_classes: Number of classes; 0 for no classifier.
        global_pool: What the classifier reads: `token` (the class token), `avg` or empty (all tokens); default: the
            class token if there is one, otherwise the mean.
        embed_dims: Width of each stage.
        depths: Number of layers of each stage.
        num_heads: Number of heads of each stage.
        mlp_ratios: Hidden width of the MLP over the width of the stage; one for all stages, or one per stage.
        drop_rate: Dropout rate before the classifier.
        drop_path_rate: Stochastic depth of the last layer; it grows evenly from 0.
        scratch: Whether attentions start with the weights of their authors, for training from scratch; False for
            weights to be loaded that were trained with another attention, which the attentions then alter as little
            as they can.
        style: The fields of `Style`, in which the families differ.
    """

    stages: Any

    def __init__(
        self,
        attention: str | Sequence[Sequence[Spec]] = "full",
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str | None = None,
        embed_dims: Sequence[int] = (96, 192, 384, 768),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratios: float | Sequence[float] = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        scratch: bool = True,
        **style: Any,
    ) -> None:
        super().__init__()
        if not len(depths) == len(embed_dims) == len(num_heads) or min(depths) < 1:
            raise UserError(
                f"depths={tuple(depths)}, embed_dims={tuple(embed_dims)} and num_heads={tuple(num_heads)} must "
                "have the same length, and every stage at least one layer"
            )
        self.style = look = Style(**style)
        specs = expand_stages(attention, depths) if isinstance(attention, str) else attention
        if [len(stage) for stage in specs] != list(depths):
            raise UserError(
                f"attentions for {[len(stage) for stage in specs]} layers were given, expected {list(depths)}"
            )
        ratios = to_ntuple(len(depths))(mlp_ratios)
        # Stochastic depth grows evenly over the layers, whatever stage they are in.
        layers = iter(range(sum(depths)))
        drop_paths = [[drop_path_rate * next(layers) / max(1, sum(depths) - 1) for _ in range(n)] for n in depths]
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_prefix_tokens = int(look.class_token)
        self.global_pool = self._pool(global_pool)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": patch_size * 2**i, "module": f"stages.{i}"}
            for i, dim in enumerate(embed_dims)
        ]
        self.patch_embed = look.embed(in_chans, embed_dims[0], patch_size)
        self.patch_embed.img_size = to_2tuple(img_size)
        self.stages = nn.ModuleList()
        before = shrink(Grid(*self.patch_embed.img_size), patch_size)
        for i, dim in enumerate(embed_dims):
            stage = Stage(
                specs[i],
                before,
                (embed_dims[i - 1] if i else None, dim),
                num_heads=num_heads[i],
                mlp_ratio=ratios[i],
                drop_paths=drop_paths[i],
                style=look,
                class_token=look.class_token and i == len(depths) - 1,
                last=self.blocks[-1].attn if i else None,
            )
            before = stage.grid(before)
            self.stages.append(stage)
        self.check_order()
        self.norm = nn.Identity() if look.stage_norms else look.norm(self.num_features)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.init_weights(scratch)

    def init_weights(self, scratch: bool = True) -> None:
        """Initialise linear layers from N(0, 0.02²), truncated at 2, with zero biases, as all these families do. With
        `scratch`, also the weights that attentions add, and the convolutions of styles that initialise them."""
        shared = [layer for b in self.blocks for layer in (b.attn.qkv, b.attn.proj, b.mlp.fc1, b.mlp.fc2)]
        merging = [m.reduction for m in self.modules() if isinstance(m, Merge)]
        for layer in (*shared, *merging, self.head):
            if isinstance(layer, nn.Linear):
                trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        start_attentions(self.blocks, scratch=scratch)
        if scratch and self.style.draws_convolutions:
            start_convolutions(self)

    # Parts and costs ---------------------------------------------------------------------------------------------

    def check_order(self) -> None:
        """Raise unless every attention and reducer receives what it reads in its stage."""
        for i, stage in enumerate(self.stages):
            places = [(f"stages.{i}.blocks.{j}", block) for j, block in enumerate(stage.blocks)]
            check_order(
                [Place(name, block.attn, block.reducer) for name, block in places], entered=stage.carry is not None
            )
            if stage.carry is None:
                continue
            stage.carry.check(self.stages[i - 1].blocks[-1].attn, stage.blocks[0].attn)
            if any(block.reducer is not None for block in self.stages[i - 1].blocks):
                raise UserError(f"stage {i} reads the scores of all tokens of the stage before: use no reducer there")
        for stage, grid in zip(self.stages, self.grids(), strict=True):
            for block in stage.blocks:
                grid = block.check(grid)

    @property
    def attention(self) -> str:
        """The spec of every stage, in the shortest text."""
        return join_stages([stage.specs for stage in self.stages])

    @property
    def blocks(self) -> list[Block]:
        """Every block, from the first stage's to the last's."""
        return [block for stage in self.stages for block in stage.blocks]

    def grids(self, size: tuple[int, int] | None = None) -> list[Grid]:
        """The token grid of every stage for an image of `size` (height, width), or of the model's own size."""
        grid = shrink(Grid(*(size or self.patch_embed.img_size)), self.patch_embed.stride)
        grids = []
        for stage in self.stages:
            grid = stage.grid(grid)
            grids.append(grid)
        return grids

    def costs(self, size: tuple[int, int] | None = None, batch: int = 1) -> list[Layer]:
        """Parameters and multiply-accumulates of the embedding, every stage's entrance and blocks, and the head, for
        one image; the backend of every attention for `batch` images."""
        grids, wants = self.grids(size), iter(self.wants())
        embedding = Macs(other=self.patch_embed.macs(grids[0]))
        rows = [Layer("embedding", grids[0], embedding, parameters(self.patch_embed))]
        for i, (stage, grid) in enumerate(zip(self.stages, grids, strict=True)):
            rows += stage.costs(f"stages.{i}", grid, [next(wants) for _ in stage.blocks], batch)
        head = Macs(other=weight_macs(self.head, 1))
        return [*rows, Layer("head", grids[-1], head, parameters(self.norm) + parameters(self.head))]

    def run_layer(self, number: int, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        for stage in self.stages:
            if number < len(stage.blocks):
                return cast(Stage, stage).run_layer(number, x, context)
            number -= len(stage.blocks)
        raise IndexError(f"there is no layer {number} after the last")

    def wants(self) -> list[frozenset[str]]:
        """Grids differ between stages, so no entries are passed on, except scores if the next stage has a `carry`."""
        found: list[frozenset[str]] = []
        for stage, after in zip(self.stages, [*self.stages[1:], None], strict=True):
            carried = after is not None and after.carry is not None
            found += [*(b.attn.reads for b in stage.blocks[1:]), frozenset({"scores"} if carried else ())]
        return found

    # timm's API --------------------------------------------------------------------------------------------------

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        grid = shrink(Grid(images.shape[-2], images.shape[-1]), self.patch_embed.stride)
        return self.patch_embed(images), Context(grid)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images → the last stage's tokens [B, N, C], prefix first."""
        return self.forward_context(x)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        x, context = self.forward_context(x)
        return self.answer(x, context.grid)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """As timm's: the maps [B, C, height, width] after chosen stages. `norm` reaches the last stage's only."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt={output_fmt!r}: a hierarchical model returns maps, expected NCHW")
        take, last = feature_take_indices(len(self.stages), indices)
        ends = {end - 1: i for i, end in enumerate(accumulate(len(stage.blocks) for stage in self.stages))}
        stop = next(end + 1 for end, i in ends.items() if i == last) if stop_early else None
        maps = []
        for step in self.walk(*self.embed(x), stop=stop):
            x, grid, stage = step.x, step.context.grid, ends.get(step.number - 1)
            if stage in take:
                # The final norm is as wide as the last stage, so it fits no other.
                final = norm and stage == len(self.stages) - 1
                maps.append(to_map(grid.restore(self.norm(x) if final else x), grid).contiguous())
        return maps if intermediates_only else (x if stop_early else self.norm(x), maps)

    def stage_maps(self, images: Tensor) -> tuple[list[Tensor], Context]:
        """The map [B, C, height, width] after every stage, with reduced tokens restored, and the last context."""
        ends = set(accumulate(len(stage.blocks) for stage in self.stages))
        maps = []
        for number, x, context in self.walk(*self.embed(images)):
            if number in ends:
                maps.append(to_map(context.grid.restore(x), context.grid).contiguous())
        return maps, context

    def drop_class_token(self) -> None:
        """Remove the class token and its position, as PVT does with dense heads."""
        last = self.stages[-1]
        if not self.num_prefix_tokens or last.positions is None:
            return
        last.positions.drop_class_token()
        self.style = dataclasses.replace(self.style, class_token=False)
        self.num_prefix_tokens, self.global_pool = 0, "avg"
        for block in last.blocks:
            block.attn.resize(self.grids()[-1])

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As timm's: drop the stages, norm and head that the chosen maps do not need."""
        take, last = feature_take_indices(len(self.stages), indices)
        complete = last == len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if prune_norm or not complete:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, patch_size: int | None = None) -> None:
        """Resample weights that depend on the token grid for images of `img_size`."""
        if patch_size not in (None, self.patch_embed.stride):
            raise UserError(
                f"patch_size={patch_size}: the patch size of a hierarchical model is fixed at {self.patch_embed.stride}"
            )
        if img_size is not None:
            self.patch_embed.img_size = to_2tuple(img_size)
        for stage, grid in zip(self.stages, self.grids(), strict=True):
            stage.resize(grid)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else self._pool(global_pool)
        like = next(self.parameters())
        head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.head = head.to(device=like.device, dtype=like.dtype).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @property
    def grad_checkpointing(self) -> bool:
        return any(stage.grad_checkpointing for stage in self.stages)

    def no_weight_decay(self) -> set[str]:
        """Positions, class token, and the weights that attentions name."""
        told = [(n, m) for n, m in self.named_modules() if m is not self and hasattr(m, "no_weight_decay")]
        return {f"{name}.{weight}" for name, module in told for weight in module.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^patch_embed|^stages\.0\.positions",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.(?:downsample|positions|conv_positions)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^stages\.(\d+)\.norm", (99998,)),
                (r"^norm", (99999,)),
            ],
        }

    def _pool(self, name: str | None) -> str:
        """Which tokens the head reads: `name`; by default the class token if there is one, otherwise the mean."""
        known = ("token", "avg", "") if self.num_prefix_tokens else ("avg", "")
        if name is not None and name not in known:
            raise UserError(
                f"global_pool={name!r} does not fit this model: expected one of {', '.join(map(repr, known))}"
            )
        return known[0] if name is None else name
