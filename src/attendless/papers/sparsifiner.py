"""Tables of "Sparsifiner: Learning Sparse Instance-Dependent Attention for Efficient ViTs" (CVPR 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from ..attention import Grid, create
from ..attention.averages import budget
from ..convert import open_model
from ..measure.macs import count
from . import rules
from .table import UNITS, Row, Table, register_table

SOURCE = "Sparsifiner (Wei et al., CVPR 2023)"
PREDICTOR = (
    "predictor: averages of the keys, low-rank scores and connectivity, by the paper's equations with 32 averages; "
    "at most 1/τ coefficients exceed τ, and the basis is counted as it starts"
)
_TRAINED = "the authors', trained on ImageNet; ours: docs/results/sparsifiner.md"
_TOKENS = "needs token reduction, which is not built yet"
_LV = "needs LV-ViT, which is not built yet"

#: Table 1, model → token keep rate, attention keep rate, printed MHSA (M), printed top-1, what is missing.
_TABLE_1 = {
    "EViT": ("0.7", "1.0", "193.1", "79.5", _TOKENS),
    "DynamicViT": ("0.7", "1.0", "193.1", "79.3", _TOKENS),
    "Sparsif-EViT": ("0.7", "0.25", "113.3", "79.5", _TOKENS),
    "Sparsifiner": ("0.7", "0.25", "113.3", "79.3", _TOKENS),
    "EViT ": ("0.5", "1.0", "149.1", "78.5", _TOKENS),
    "DynamicViT ": ("0.5", "1.0", "149.1", "77.3", _TOKENS),
    "Sparsif-EViT ": ("0.5", "0.25", "86.6", "78.7", _TOKENS),
    "Sparsifiner ": ("0.5", "0.25", "86.6", "78.4", _TOKENS),
    "LV-ViT-S": ("1.0", "1.0", "476.9", "83.3", _LV),
    "EViT-LV-S": ("0.7", "1.0", "256.0", "83.0", _LV),
    "EViT-LV-S ": ("0.5", "1.0", "198.8", "82.5", _LV),
    "DynViT-LV-S": ("0.7", "1.0", "256.0", "83.0", _LV),
    "DynViT-LV-S ": ("0.5", "1.0", "198.8", "82.0", _LV),
    "Sparsif-LV-S": ("1.0", "0.5", "339.7", "83.4", _LV),
    "Sparsif-LV-S ": ("1.0", "0.25", "221.7", "83.3", _LV),
    "Sparsif-LV-S  ": ("1.0", "0.1", "149.5", "82.8", _LV),
}
#: Table 2, DeiT-S at 224 px: attention keep rate → kept keys, printed MHSA (M), printed top-1.
_TABLE_2 = {
    "0.9": (178, "396.8", "80.02"), "0.8": (158, "360.6", "79.97"), "0.7": (138, "324.6", "79.96"),
    "0.6": (119, "290.3", "79.98"), "0.5": (99, "254.2", "79.94"), "0.4": (79, "218.0", "79.92"),
    "0.3": (60, "183.6", "79.83"), "0.2": (40, "147.5", "79.71"), "0.1": (20, "111.4", "79.42"),
    "0.05": (10, "93.3", "78.75"), "0.01": (2, "78.9", "73.03"),
}  # fmt: skip
#: Table 3, DeiT-T at 384 px: attention keep rate → printed MHSA (M), printed overall (G), printed top-1.
_TABLE_3 = {
    "0.5": ("851.0", "2.89", "75.45"),
    "0.25": ("452.9", "2.49", "75.35"),
    "0.1": ("240.5", "2.28", "74.58"),
}


def _mhsa(row: str, paper: str, ours: int, why: str) -> Row:
    """A count beside a printed one, with how far they are apart."""
    found = Row(row, "MHSA", "M", paper, ours)
    apart = (ours - float(paper) * UNITS["M"]) / UNITS["M"]
    return found if found.agrees else Row(row, "MHSA", "M", paper, ours, f"{apart:+.1f} M: {why}")


def _table_1() -> Iterator[Row]:
    yield Row("DeiT-S", "MHSA", "M", "357.7", rules.mhsa(open_model("deit_small_patch16_224")), "dense")
    yield Row("DeiT-S", "top-1", "%", "79.8", None, "the published weights'; not measured here")
    for name, (tokens, keys, mhsa, top1, missing) in _TABLE_1.items():
        row = f"{name.strip()} tokens {tokens} keys {keys}"
        yield Row(row, "MHSA", "M", mhsa, None, missing)
        yield Row(row, "top-1", "%", top1, None, missing)


def _table_2() -> Iterator[Row]:
    model = open_model("deit_small_patch16_224")
    yield Row("DeiT-S", "MHSA", "M", "357.7", rules.mhsa(model), "dense, keep rate 1.0")
    yield Row("DeiT-S", "top-1", "%", "79.82", None, "the published weights'; not measured here")
    why = "the predictor; each kept key costs the printed 12·2·384·196, the paper's constant does not follow"
    grid = Grid(14, 14, 1)
    for keep, (keys, mhsa, top1) in _TABLE_2.items():
        attention = create(f"sparsifiner:keep={keep},tau=0.05", 384, 6, grid=grid)
        row = f"Sparsifiner-S keep {keep}"
        yield Row(row, "kept keys", "keys", str(keys), budget(float(keep), grid))
        yield _mhsa(row, mhsa, 12 * attention.core_macs(grid), why)
        yield Row(row, "top-1", "%", top1, None, _TRAINED)


def _table_3() -> Iterator[Row]:
    macs = count(open_model("deit_tiny_patch16_224", size=384))
    yield Row("DeiT-T", "MHSA", "M", "1534.1", macs.core, "dense, keep rate 1.0")
    yield Row("DeiT-T", "overall", "G", "3.58", macs.core + macs.mlp, f"of {macs.total / 1e9:.2f} G in truth")
    yield Row("DeiT-T", "top-1", "%", "75.45", None, _TRAINED)
    grid = Grid(24, 24, 1)
    why = "the predictor, and no constant and budget fit the three printed rows together"
    for keep, (mhsa, overall, top1) in _TABLE_3.items():
        row = f"Sparsifiner-T keep {keep}"
        attention = create(f"sparsifiner:keep={keep},tau=0.05", 192, 3, grid=grid)
        yield _mhsa(row, mhsa, 12 * attention.core_macs(grid), why)
        printed = round(float(mhsa) * UNITS["M"])
        yield Row(row, "overall", "G", overall, printed + macs.mlp, "the MLP as we count it, and MHSA as printed")
        yield Row(row, "top-1", "%", top1, None, _TRAINED)


def _table_4() -> Iterator[Row]:
    grid = Grid(14, 14, 1)
    linformer = create("linformer:keys=68", 384, 6, grid=grid)
    yield _mhsa(
        "Linformer", "246.73", 12 * linformer.core_macs(grid), "68 averages come nearest; their number is not said"
    )
    yield Row("Linformer", "top-1", "%", "77.54", None, _TRAINED)
    sparsifiner = create(f"sparsifiner:keep={82 / 197:.4f},tau=0.05", 384, 6, grid=grid)
    why = "82 kept keys by Table 2's own law, which no whole number of keys meets"
    yield _mhsa("Sparsifiner-S", "224.04", 12 * sparsifiner.core_macs(grid), why)
    yield Row("Sparsifiner-S", "top-1", "%", "79.79", None, _TRAINED)


for _number, _title, _rules, _build in (
    (1, "token pruning, DeiT-S and LV-ViT-S (224 px)", (rules.MHSA,), _table_1),
    (2, "attention budget, DeiT-S (224 px)", (rules.MHSA, PREDICTOR), _table_2),
    (3, "high resolution, DeiT-T (384 px)", (rules.MHSA, rules.OVERALL, PREDICTOR), _table_3),
    (4, "low-rank attention against low-rank connectivity (224 px)", (rules.MHSA, PREDICTOR), _table_4),
):
    register_table(Table(f"sparsifiner-{_number}", f"Table {_number}: {_title}", SOURCE, _rules, _build))
