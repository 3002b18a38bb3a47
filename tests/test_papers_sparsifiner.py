"""Sparsifiner's tables: what reconciles does so to the printed digit, and the rest says why not."""

from __future__ import annotations

import pytest

from attendless_lab.papers import table


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_does_not_agree_says_why(number: int) -> None:
    rows = list(table(f"sparsifiner-{number}").build())
    assert len({(row.row, row.quantity) for row in rows}) == len(rows)
    assert all(row.agrees or row.note or not row.paper for row in rows)


def test_dense_rows_budgets_and_overall_agree() -> None:
    two, three = (list(table(f"sparsifiner-{number}").build()) for number in (2, 3))
    assert [row.agrees for row in two if row.row == "DeiT-S" and row.quantity == "MHSA"] == [True]
    assert [row.agrees for row in two if row.quantity == "kept keys"] == [True] * 11
    assert [row.agrees for row in three if row.quantity == "overall"] == [True] * 4


def test_token_pruning_is_counted_layer_by_layer() -> None:
    """DeiT-S with 197 tokens in the first four layers, 140, 100 and 72 after fusing at 0.7; LV-ViT-S likewise; and
    DynamicViT, which drops before its blocks."""
    rows = {row.row: row for row in table("sparsifiner-1").build() if row.quantity == "MHSA"}
    assert len(rows) == 17
    assert all(row.ours is not None for row in rows.values())
    assert {name for name, row in rows.items() if row.agrees} == {"DeiT-S", "LV-ViT-S tokens 1.0 keys 1.0"}
    expected = {
        "EViT tokens 0.7 keys 1.0": (197,) * 4 + (140,) * 3 + (100,) * 3 + (72,) * 2,
        "EViT tokens 0.5 keys 1.0": (197,) * 4 + (100,) * 3 + (52,) * 3 + (28,) * 2,
        "DynamicViT tokens 0.7 keys 1.0": (197,) * 3 + (138,) * 3 + (97,) * 3 + (68,) * 3,
        "EViT-LV-S tokens 0.7 keys 1.0": (197,) * 5 + (140,) * 4 + (100,) * 4 + (72,) * 3,
        "LV-ViT-S tokens 1.0 keys 1.0": (197,) * 16,
    }
    readings = {
        "EViT tokens 0.7 keys 1.0": "193.2",
        "EViT tokens 0.5 keys 1.0": "148.6",
        "EViT-LV-S tokens 0.7 keys 1.0": "248.9",
        "Sparsifiner tokens 0.7 keys 0.25": "114.5",
        "Sparsif-EViT tokens 0.5 keys 0.25": "89.0",
    }
    for name, tokens in expected.items():
        assert rows[name].ours == sum(2 * 384 * n * n for n in tokens)
    nearest = {row.row: row for row in table("sparsifiner-1").build() if row.quantity == "nearest reading"}
    assert {name: row.ours_text for name, row in nearest.items() if name in readings} == readings


def test_each_kept_key_costs_what_the_paper_charges() -> None:
    rows = list(table("sparsifiner-2").build())
    counts = {row.row: {} for row in rows}
    for row in rows:
        counts[row.row][row.quantity] = row.ours
    sparse = [found for found in counts.values() if "kept keys" in found]
    first = sparse[0]
    for other in sparse[1:]:
        keys = first["kept keys"] - other["kept keys"]
        assert first["MHSA"] - other["MHSA"] == keys * 12 * 2 * 384 * 196
