"""The figures of LaViT and Sparsifiner: numbers are recomputed, and images are drawn by `attendless show`.

The figure of BBViT is in `bbvit.py`; the poster of the fair comparison has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import timm
import torch

from attendless.attention import Grid, create
from attendless.attention.lavit import LaViTAttention
from attendless.convert.predictor import read_predictor

from . import lavit, rules, sparsifiner
from .table import Row, Table, register_table, table

_PATTERNS = "pairs: the share of all pairs of tokens that attend, by the core's multiply-accumulates"
_BASIS = "zeros: entries of W_up up to 0.01, which the predictor sets to zero, of all"
#: The predictor that comes with attendless: DeiT-Tiny's, where the paper's is DeiT-S's.
_PREDICTOR = "deit_tiny_patch16_224-dropped"


def _lavit_1() -> Iterator[Row]:
    """The stages of the architecture as ours has them; the figure leaves their numbers open."""
    with torch.device("meta"):
        model: Any = timm.create_model("lavit_small")
    note = "ours; the figure gives no number"
    for number, (stage, grid) in enumerate(zip(model.stages, model.grids(), strict=True), start=1):
        less = sum(isinstance(block.attn, LaViTAttention) for block in stage.blocks)
        yield Row(f"stage {number}", "tokens", "tokens", "", grid.tokens, note)
        yield Row(f"stage {number}", "vanilla attention", "layers", "", len(stage.blocks) - less, note)
        yield Row(f"stage {number}", "less attention", "layers", "", less, note)


def _fixed_patterns() -> Iterator[Row]:
    grid = Grid(28, 28)
    dense = create("full", 64, 1, grid=grid).core_macs(grid)
    for row, attention in (
        ("Twins, local", "window:bias=false"),
        ("Twins, global", "reduced:ratio=4"),
        ("Swin", "window:bias=false"),
        ("Axial", "axial"),
        ("Sparsifiner, its predictor counted", "sparsifiner:keep=0.1,tau=0.05"),
    ):
        made = create(attention, 64, 1, grid=grid)
        yield Row(row, "pairs", "%", "", 100 * made.core_macs(grid) / dense, f"{attention}, 28 × 28 patches")


def _three_modules() -> Iterator[Row]:
    for side in (14, 24, 64):
        grid = Grid(side, side, 1)
        for row, attention in (
            ("MHSA", "full"),
            ("Linformer", "linformer:keys=32"),
            ("Sparsifiner", "sparsifiner:keep=0.1,tau=0.05"),
        ):
            core = create(attention, 64, 1, grid=grid).core_macs(grid)
            yield Row(f"{row}, {grid.tokens} tokens", "core", "M", "", core, f"one head of 64 channels, {attention}")


def _tradeoff() -> Iterator[Row]:
    """The points of the figure: those of Tables 1 and 2."""
    for number in (1, 2):
        for row in table(f"sparsifiner-{number}").build():
            if row.quantity in ("MHSA", "top-1"):
                yield Row(f"{row.row} (Table {number})", row.quantity, row.unit, row.paper, row.ours, row.note)


def _basis() -> Iterator[Row]:
    header, weights = read_predictor(_PREDICTOR)
    ups = [weights[f"{number}.up"] for number in range(header["layers"])]
    for number, up in enumerate(ups):
        yield Row(f"layer {number}", "zeros", "%", "", 100 * float((up <= 0.01).float().mean()), "DeiT-Tiny's, ours")
    zeros = 100 * float((torch.cat(ups) <= 0.01).float().mean())
    note = "the text's number for DeiT-S after training with weight decay; ours: DeiT-Tiny's predictor, two epochs"
    yield Row("all layers", "zeros", "%", "90", zeros, note)


def _pictures(note: str) -> Iterator[Row]:
    yield Row("the figure", "maps", "", "", None, note)


_MAPS = partial(_pictures, "a picture of pictures: no number is printed; drawn for any image and model")
_COEFFICIENTS = partial(_pictures, "coefficients depend on the image; drawn for any image and model")
_MHSA = (rules.MHSA, sparsifiner.PREDICTOR)


def _drawn(number: int) -> str:
    show = "attendless show MODEL IMAGE --weights F --attention sparsifiner:keep=0.1"
    return f"drawn: {show} --figure sparsifiner-{number} --out F.png"


register_table(Table("lavit-figure-1", "Figure 1: the architecture", lavit.SOURCE, (), _lavit_1))
for _number, _title, _rules, _build, _here in (
    (1, "fixed patterns and Sparsifiner's", (_PATTERNS,), _fixed_patterns, ("counted", _drawn(1))),
    (2, "MHSA, Linformer and Sparsifiner", _MHSA, _three_modules, ("counted",)),
    (3, "connectivity, sparse and full maps", (), _MAPS, (_drawn(3),)),
    (4, "MHSA FLOPs against top-1", _MHSA, _tradeoff, ("counted", "top-1 needs ImageNet")),
    (5, "low-rank and sparse maps", (), _MAPS, (_drawn(5),)),
    (6, "the sparse basis", (_BASIS,), _basis, ("counted", _drawn(6))),
    (7, "the basis' coefficients", (), _COEFFICIENTS, (_drawn(7),)),
):
    _name, _full = f"sparsifiner-figure-{_number}", f"Figure {_number}: {_title}"
    register_table(Table(_name, _full, sparsifiner.SOURCE, _rules, _build, here=_here))
