"""Sparsifiner's tables: what reconciles does so to the printed digit, and the rest says why not."""

from __future__ import annotations

import pytest

from attendless.papers import table


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_does_not_agree_says_why(number: int) -> None:
    rows = list(table(f"sparsifiner-{number}").build())
    assert len({(row.row, row.quantity) for row in rows}) == len(rows)
    assert all(row.agrees or row.note for row in rows)


def test_dense_rows_budgets_and_overall_agree() -> None:
    two, three = (list(table(f"sparsifiner-{number}").build()) for number in (2, 3))
    assert [row.agrees for row in two if row.row == "DeiT-S" and row.quantity == "MHSA"] == [True]
    assert [row.agrees for row in two if row.quantity == "kept keys"] == [True] * 11
    assert [row.agrees for row in three if row.quantity == "overall"] == [True] * 4


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
