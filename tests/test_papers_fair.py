"""The fair comparison's table, counted on the built models."""

from __future__ import annotations

import pytest

from attendless_lab.papers import Row, table


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(table("fair-comparison").build())


def test_all_legible_numbers_are_there(rows: list[Row]) -> None:
    assert len(rows) == len({(row.row, row.quantity) for row in rows}) == 34 + 18
    assert all((row.ours is None) == (row.quantity == "top-1") for row in rows)


def test_what_agrees_and_what_does_not(rows: list[Row]) -> None:
    off = {(row.row, row.quantity): row.ours_text for row in rows if row.agrees is False}
    assert off == {
        ("SA-7", "FLOPs"): "1.916",
        ("Swin-7", "FLOPs"): "1.501",
        ("AA-4", "parameters"): "28.28",
        ("AA-7", "parameters"): "28.29",
    }
    assert all(row.note for row in rows if not row.agrees), "no number of ours, or another: the note says why"


def test_the_explanations_hold(rows: list[Row]) -> None:
    by_name = {(row.row, row.quantity): row for row in rows}
    for name in ("SA-7", "Swin-7"):
        row = by_name[name, "FLOPs"]
        assert f"{int(row.ours / 1e6) / 1e3:.3f}" == row.paper  # type: ignore[operator]
    vectors = sum(2 * depth * dim for depth, dim in zip((2, 2, 6, 2), (96, 192, 384, 768), strict=True))
    for name in ("AA-4", "AA-7"):
        row = by_name[name, "parameters"]
        assert f"{(row.ours - vectors) / 1e6:.2f}" == row.paper  # type: ignore[operator]


def test_the_damaged_digits_fit_the_printed_ratios(rows: list[Row]) -> None:
    flops = {row.row: float(row.paper) for row in rows if row.quantity == "FLOPs"}
    for name, ratio in (("XCA+LPI-4", "0.51"), ("Columnar-14", "0.69"), ("Columnar-16", "0.52")):
        fitting = [first for first in range(10) if f"{(first + flops[name] % 1) / flops['SA-4']:.2f}" == ratio]
        assert fitting == [int(flops[name])]
        assert ratio in next(row.note for row in rows if (row.row, row.quantity) == (name, "FLOPs"))


def pyramid_by_hand(patch: int) -> tuple[int, int]:
    """Parameters and fvcore operations of the comparison's pyramid under full attention, by closed formula."""
    side, dim = 224 // patch, 96
    tokens = side**2
    params = 3 * patch**2 * dim + dim + 2 * dim + 64 * dim + dim
    macs = tokens * dim * (3 * patch**2 + 64 + 5)
    for stage, depth in enumerate((2, 2, 6, 2)):
        if stage:
            params += 8 * dim + 8 * dim**2
            macs += 5 * tokens * dim + (tokens // 4) * 8 * dim**2
            side, dim = side // 2, dim * 2
            tokens = side**2
        params += depth * (12 * dim**2 + 13 * dim)
        macs += depth * (12 * tokens * dim**2 + 2 * tokens**2 * dim + 10 * tokens * dim)
    return params + 2 * dim + 1000 * dim + 1000, macs + 5 * tokens * dim + 1000 * dim


@pytest.mark.parametrize(("name", "patch"), [("SA-4", 4), ("SA-7", 7)])
def test_counts_equal_the_closed_formula(rows: list[Row], name: str, patch: int) -> None:
    ours = tuple(next(r.ours for r in rows if (r.row, r.quantity) == (name, q)) for q in ("parameters", "FLOPs"))
    assert ours == pyramid_by_hand(patch)
