"""Tables of "You Only Need Less Attention at Each Stage in Vision Transformers" (LaViT, CVPR 2024), from its poster."""

from __future__ import annotations

from collections.abc import Iterator

from ..backbones.cost import parameters
from ..convert import open_model
from . import rules
from .table import Row, Table, register_table

SOURCE = "LaViT (Zhang et al., CVPR 2024), poster"

_LOST = "the poster prints {}: the decimal point is lost"

#: Row of Table 2 → the model counted, printed parameters (M), printed FLOPs (G).
_BACKBONES = {
    "DeiT-T": ("deit_tiny_patch16_224", "5.7", "1.3"),
    "DeiT-S": ("deit_small_patch16_224", "22.1", "4.6"),
    "ViT-B": ("vit_base_patch16_224", "86.6", "17.6"),
    "DeiT-B": ("deit_base_patch16_224", "86.6", "17.5"),
    "PVT-T": ("pyramid_pvt_tiny", "13.2", "1.9"),
    "PVT-S": ("pyramid_pvt_small", "24.5", "3.8"),
    "PVT-M": ("pyramid_pvt_medium", "44.2", "6.7"),
    "PVT-L": ("pyramid_pvt_large", "61.4", "9.8"),
    "PVTv2-b1": ("pyramid_pvt_v2_b1", "13.1", "2.1"),
    "PVTv2-b2": ("pyramid_pvt_v2_b2", "25.4", "4.0"),
    "Swin-T": ("pyramid_swin_tiny", "28.3", "4.5"),
    "Swin-S": ("pyramid_swin_small", "49.6", "8.7"),
    "Swin-B": ("pyramid_swin_base", "87.8", "15.4"),
}
_NOTES = {
    ("DeiT-T", "FLOPs"): _LOST.format(13),
    ("PVT-T", "FLOPs"): _LOST.format(19),
    ("DeiT-B", "FLOPs"): "the same network as ViT-B, printed 0.1 lower",
    ("PVTv2-b1", "parameters"): "PVT v2's authors publish 14.0 M, as we count",
}


def _table_2() -> Iterator[Row]:
    for row, (name, params, flops) in _BACKBONES.items():
        model = open_model(name)
        for quantity, unit, paper, ours in (
            ("parameters", "M", params, parameters(model)),
            ("FLOPs", "G", flops, rules.total(model)),
        ):
            yield Row(row, quantity, unit, paper, ours, _NOTES.get((row, quantity), ""))


register_table(
    Table(
        "lavit-2", "Table 2: backbones on ImageNet-1K, parameters and FLOPs (224 px)", SOURCE, (rules.TOTAL,), _table_2
    )
)
