"""The figures of LaViT and Sparsifiner: values are recomputed, and images are drawn by `attendless show`.

The figure of BBViT is in `bbvit.py`; the poster of the fair comparison has no figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch

from attendless.attention import Grid, create
from attendless.attention.lavit import LaViTAttention
from attendless.convert.predictor import read_predictor

from . import lavit, rules, sparsifiner
from .table import Row, Table, register_table, table

_PATTERNS = "pairs: cost of the core relative to full attention, 28 × 28 patches, with the predictor of Sparsifiner"
_BASIS = "zeros: share of the entries of W_up up to 0.01, which the predictor sets to zero; ours: DeiT-Tiny"
_ONE_HEAD = "one head of 64 channels"
_OPEN = "the figure prints no values; ours are those of `lavit_small`"
#: The predictor in the wheel, for DeiT-Tiny; the paper's is for DeiT-S.
_PREDICTOR = "deit_tiny_patch16_224-dropped"


def _lavit_1() -> Iterator[Row]:
    """The stages of our model; the figure prints no numbers."""
    with torch.device("meta"):
        model: Any = timm.create_model("lavit_small")
    for number, (stage, grid) in enumerate(zip(model.stages, model.grids(), strict=True), start=1):
        less = sum(isinstance(block.attn, LaViTAttention) for block in stage.blocks)
        yield Row(f"stage {number}", "tokens", "tokens", "", grid.tokens)
        yield Row(f"stage {number}", "vanilla attention", "layers", "", len(stage.blocks) - less)
        yield Row(f"stage {number}", "less attention", "layers", "", less)


def _fixed_patterns() -> Iterator[Row]:
    grid = Grid(28, 28)
    dense = create("full", 64, 1, grid=grid).core_macs(grid)
    for row, attention in (
        ("Twins, local", "window:bias=false"),
        ("Twins, global", "reduced:ratio=4"),
        ("Swin", "window:bias=false"),
        ("Axial", "axial"),
        ("Sparsifiner", "sparsifiner:keep=0.1,tau=0.05"),
    ):
        made = create(attention, 64, 1, grid=grid)
        yield Row(row, "pairs", "%", "", 100 * made.core_macs(grid) / dense, attention=attention)


def _three_modules() -> Iterator[Row]:
    for side in (14, 24, 64):
        grid = Grid(side, side, 1)
        for row, attention in (
            ("MHSA", "full"),
            ("Linformer", "linformer:keys=32"),
            ("Sparsifiner", "sparsifiner:keep=0.1,tau=0.05"),
        ):
            core = create(attention, 64, 1, grid=grid).core_macs(grid)
            yield Row(row, f"core, {grid.tokens:,} tokens", "M", "", core, attention=attention)


def _tradeoff() -> Iterator[Row]:
    """The points of the figure: the rows of Tables 1 and 2."""
    for number in (1, 2):
        for row in table(f"sparsifiner-{number}").build():
            if row.quantity in ("MHSA", "top-1"):
                yield Row(f"{row.row} (Table {number})", row.quantity, row.unit, row.paper, row.ours, row.note)


def _basis() -> Iterator[Row]:
    header, weights = read_predictor(_PREDICTOR)
    ups = [weights[f"{number}.up"] for number in range(header["layers"])]
    for number, up in enumerate(ups):
        yield Row(f"layer {number}", "zeros", "%", "", 100 * float((up <= 0.01).float().mean()))
    zeros = 100 * float((torch.cat(ups) <= 0.01).float().mean())
    note = "the paper's text, for DeiT-S after training with weight decay; ours is trained for two epochs"
    yield Row("all layers", "zeros", "%", "90", zeros, note)


def _no_values() -> Iterator[Row]:
    return iter(())


_DRAWN = "the figure prints no values; the command draws it for any image and model"
_MHSA = (rules.MHSA, sparsifiner.PREDICTOR)


def _drawn(number: int) -> str:
    show = "attendless show MODEL IMAGE --weights F --attention sparsifiner:keep=0.1"
    return f"drawn: {show} --figure sparsifiner-{number} --out F.png"


register_table(Table("lavit-figure-1", "Figure 1: the architecture", lavit.SOURCE, (_OPEN,), _lavit_1))
for _number, _title, _rules, _build, _here in (
    (1, "fixed patterns and Sparsifiner's", (_PATTERNS,), _fixed_patterns, ("counted", _drawn(1))),
    (2, "MHSA, Linformer and Sparsifiner", (_ONE_HEAD, *_MHSA), _three_modules, ("counted",)),
    (3, "connectivity, sparse and full maps", (_DRAWN,), _no_values, (_drawn(3),)),
    (4, "MHSA FLOPs against top-1", _MHSA, _tradeoff, ("counted", "top-1 not reproduced: needs ImageNet")),
    (5, "low-rank and sparse maps", (_DRAWN,), _no_values, (_drawn(5),)),
    (6, "the sparse basis", (_BASIS,), _basis, ("counted", _drawn(6))),
    (7, "the coefficients of the basis", (_DRAWN,), _no_values, (_drawn(7),)),
):
    _name, _full = f"sparsifiner-figure-{_number}", f"Figure {_number}: {_title}"
    register_table(Table(_name, _full, sparsifiner.SOURCE, _rules, _build, here=_here))
