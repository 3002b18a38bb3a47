"""The time of single blocks in the runtime of the deployment, from which a search predicts the time of whole models.

`attention_times` times a block with each attention. `token_times` times a block with several numbers of tokens, and
`TimeModel` predicts from them the time of any token schedule without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import Context, Grid, Spec
from ..backbones import Backbone
from ..backbones.cost import Layer
from ..integrations.discovery import find_slots
from ..integrations.slot import Slot
from ..measure.clock import Call, interleave
from ..tokens import create_reducers
from .block_runtimes import EAGER_BLOCKS, BlockRuntime, FixedArguments
from .candidates import shared_copy, with_attention
from .search import Progress

#: Shares of the patches for which a block is timed without a reducer, and with one.
_SHARES, _REDUCING_SHARES = (1.0, 0.7, 0.45, 0.25), (1.0, 0.45)


def repeat_to_batch(images: Tensor, batch: int) -> Tensor:
    """A batch of `batch` images, repeating `images` where there are fewer."""
    return images[torch.arange(batch, device=images.device) % len(images)]


# By attention --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def attention_times(
    backbone: nn.Module,
    layers: Sequence[int],
    specs: Sequence[Spec],
    images: Tensor,
    budget: float,
    progress: Progress,
    where: BlockRuntime = EAGER_BLOCKS,
) -> Tensor:
    """Milliseconds [layers, 1 + specs] of a layer's block unchanged, and with each attention of `specs`.

    The interleaved benchmarks take `budget` seconds in total. Blocks with equal shapes are timed once.
    """
    slots = find_slots(backbone)
    kinds = [_shape(slots[layer]) for layer in layers]
    timed: dict[Any, list[float]] = {}
    with progress("timing blocks", len(set(kinds))) as step:
        for layer, kind in zip(layers, kinds, strict=True):
            if kind in timed:
                continue
            models = [shared_copy(backbone), *(with_attention(backbone, layer, spec) for spec in specs)]
            calls = {str(i): _block_call(model, slots[layer].name, images, where) for i, model in enumerate(models)}
            found = interleave(calls, budget=budget / len(set(kinds)))
            timed[kind] = [1e3 * found.median(name) for name in calls]
            step(1)
    return torch.tensor([timed[kind] for kind in kinds])


def _shape(slot: Slot) -> tuple[Any, ...]:
    return (str(slot.grid), str(slot.spec), *(value.shape for value in slot.weights.values()))


def _block_call(model: nn.Module, name: str, images: Tensor, where: BlockRuntime) -> Call:
    """A call of the block `name` with the inputs that it gets when the model runs on `images`."""
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    block = model.get_submodule(name)
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True)
    model(images)
    hook.remove()
    (tokens, *args), kwargs = inputs[0]
    return where.prepare(FixedArguments(block, tuple(args), kwargs), tokens)


# By the number of tokens ---------------------------------------------------------------------------------------------


class TimeModel:
    """Predicts the milliseconds of all blocks of a backbone from the times of single blocks (`token_times`).

    Attention runs on the tokens that enter a block and the MLP on the tokens that leave it. A block therefore takes the
    mean of its times for both numbers, plus the time of the reducer. A class-token-only last block takes the share of
    its time that equals its share of MACs.
    """

    def __init__(self, measured: dict[str, Any]) -> None:
        self.measured = measured
        self.fits = {
            kind: np.polyfit(found["patches"], found["ms"], min(2, len(found["ms"]) - 1))
            for kind, found in measured.items()
        }

    def __call__(self, backbone: Backbone) -> float:
        rows = block_rows(backbone)
        return sum(
            float(time(row.grid.patches, patches_after(backbone, i, row)))
            for i, (row, time) in enumerate(zip(rows, self.layers(backbone), strict=True))
        )

    def layers(self, backbone: Backbone) -> list[Callable[[Any, Any], Any]]:
        """For each block, a function from the patches that enter and leave it to its milliseconds. Arrays work too."""
        return [
            partial(self._block, _kind(row), _tail_part(backbone, i, row)) for i, row in enumerate(block_rows(backbone))
        ]

    def _block(self, kind: str, part: float, before: Any, after: Any) -> Any:
        fit, measured = self.fits[kind], self.measured[kind]
        ms = part * (np.polyval(fit, before) + np.polyval(fit, after)) / 2
        return ms + np.where(after < before, np.interp(before, measured["reducing"], measured["added"]), 0.0)


@torch.inference_mode()
def token_times(
    backbone: Backbone,
    reducer: Spec,
    images: Tensor,
    budget: float,
    progress: Progress,
    where: BlockRuntime = EAGER_BLOCKS,
) -> dict[str, Any]:
    """For each kind of block: milliseconds by number of patches, and the milliseconds that `reducer` adds."""
    rows = block_rows(backbone)
    kinds = {_kind(row): i for i, row in enumerate(rows)}
    measured = {}
    with progress("timing blocks by their tokens", len(kinds)) as step:
        for kind, i in kinds.items():
            block, grid = backbone.blocks[i], rows[i].grid
            reducing = _with_reducer(block, reducer, i, len(rows))
            plain, fewer = _patch_counts(grid, _SHARES), _patch_counts(grid, _REDUCING_SHARES)
            calls = {f"plain {n}": _token_call(block, grid, n, images, where) for n in plain}
            calls |= {f"reducing {n}": _token_call(reducing, grid, n, images, where) for n in fewer}
            found = interleave(calls, budget=budget)
            # Ratios of pairs are much less affected by other load than differences of medians.
            whole = f"plain {plain[-1]}"
            ms = {n: 1e3 * found.median(whole) / found.compare(f"plain {n}", whole).ratio for n in plain}
            slower = {n: 1 / found.compare(f"reducing {n}", f"plain {n}").ratio for n in fewer}
            measured[kind] = {
                "patches": plain,
                "ms": [ms[n] for n in plain],
                "reducing": fewer,
                "added": [max(0.0, ms[n] * (slower[n] - 1)) for n in fewer],
            }
            step(1)
    return measured


def _patch_counts(grid: Grid, shares: Sequence[float]) -> list[int]:
    return sorted({max(2, round(share * grid.patches)) for share in shares})


def _with_reducer(block: Any, reducer: Spec, layer: int, depth: int) -> Any:
    """`block` with the reducer of its layer, or that of another layer if its own has none."""
    made = create_reducers(reducer, block.attn.dim, block.attn.head_dim, depth)
    found = made.get(layer) or next(iter(made.values()), None)
    view = shared_copy(block)
    view.reducer = found if found is None else found.to(block.attn.qkv.weight).eval()
    return view


def _token_call(block: Any, grid: Grid, patches: int, images: Tensor, where: BlockRuntime) -> Call:
    tokens, context = _block_input(block, grid, patches, images)
    return where.prepare(FixedArguments(block, (context,), {}), tokens)


def _block_input(block: Any, grid: Grid, patches: int, images: Tensor) -> tuple[Tensor, Context]:
    """Random tokens for a block: `patches` patches of `grid` for each image. Their values do not affect the time."""
    if patches < grid.patches:
        cells = torch.arange(patches, device=images.device).expand(len(images), -1)
        grid = Grid(grid.height, grid.width, grid.prefix, cells=cells, sizes=images.new_ones(len(images), patches))
    noise = torch.randn(len(images), grid.tokens, block.attn.dim, generator=torch.Generator().manual_seed(0))
    return noise.to(images), Context(grid)


def block_rows(backbone: Backbone) -> list[Layer]:
    """The cost of each block, with the grid that enters it."""
    return [row for row in backbone.costs() if row.spec is not None]


def patches_after(backbone: Backbone, number: int, row: Layer) -> int:
    """The number of patches that leave a block. A class-token-only block removes none."""
    grid = row.grid if _is_tail(backbone, number) else backbone.blocks[number].grid_after(row.grid)
    return int(grid.patches)


def _is_tail(backbone: Backbone, number: int) -> bool:
    """Whether a block computes the prefix tokens only."""
    return backbone.tail is not None and number == len(backbone.blocks) - 1


def _tail_part(backbone: Backbone, number: int, row: Layer) -> float:
    """The share of its MACs that a block computes: less than one if it computes the prefix tokens only."""
    return row.macs.total / _all_macs(backbone.blocks[number], row.grid) if _is_tail(backbone, number) else 1.0


def _all_macs(block: Any, grid: Grid) -> int:
    """A block's MACs if it computes all tokens of `grid`."""
    return int(block.attn.macs(grid).total + block.mlp_macs(grid))


def _kind(row: Layer) -> str:
    """Blocks of one kind take the same time: blocks of one stage with the same attention."""
    return f"{row.name.rpartition('blocks.')[0]}{row.spec}"
