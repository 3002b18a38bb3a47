"""Tables of "You Only Need Less Attention at Each Stage in Vision Transformers" (LaViT, CVPR 2024), from its poster."""

from __future__ import annotations

from collections.abc import Iterator

from ..backbones.cost import parameters
from ..convert import open_model
from . import rules
from .table import Row, Table, register_table

SOURCE = "LaViT (Zhang et al., CVPR 2024), poster"

#: Row of Table 2 → timm's model, printed parameters (M), printed FLOPs (G), note.
_COLUMNAR = {
    "DeiT-T": ("deit_tiny_patch16_224", "5.7", "1.3", "the poster prints 13: the decimal point is lost"),
    "DeiT-S": ("deit_small_patch16_224", "22.1", "4.6", ""),
    "ViT-B": ("vit_base_patch16_224", "86.6", "17.6", ""),
    "DeiT-B": ("deit_base_patch16_224", "86.6", "17.5", "the same network as ViT-B, printed 0.1 lower"),
}


def _table_2() -> Iterator[Row]:
    for row, (name, params, flops, note) in _COLUMNAR.items():
        model = open_model(name)
        yield Row(row, "parameters", "M", params, parameters(model))
        yield Row(row, "FLOPs", "G", flops, rules.total(model), note)


register_table(
    Table(
        "lavit-2", "Table 2: backbones on ImageNet-1K, parameters and FLOPs (224 px)", SOURCE, (rules.TOTAL,), _table_2
    )
)
