"""Tables of "Sparsifiner: Learning Sparse Instance-Dependent Attention for Efficient ViTs" (CVPR 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from ..convert import open_model
from . import rules
from .table import Row, Table, register_table

SOURCE = "Sparsifiner (Wei et al., CVPR 2023)"


def _table_2() -> Iterator[Row]:
    model = open_model("deit_small_patch16_224")
    yield Row("DeiT-S", "MHSA", "M", "357.7", rules.mhsa(model), "dense, keep rate 1.0")


register_table(
    Table(
        "sparsifiner-2",
        "Table 2: attention budget, MHSA FLOPs (224 px)",
        SOURCE,
        (rules.MHSA,),
        _table_2,
    )
)
