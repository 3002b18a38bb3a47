"""BBViT's tables: what is counted, what does not agree and why."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest

from attendless_lab.papers import Row, table
from attendless_lab.papers.bbvit import PATTERNS


@pytest.fixture(scope="module")
def parameters() -> dict[str, Row]:
    return {row.row: row for row in table("bbvit-1").build()}


def test_what_agrees_and_what_does_not(parameters: dict[str, Row]) -> None:
    assert {name: row.ours_text for name, row in parameters.items() if row.agrees is False} == {
        "ViT-Tiny": "6.7",
        "BBViT-Tiny": "5.9",
        "BBViT-Moderate": "45.4",
    }
    assert all(row.note for row in parameters.values() if row.agrees is False)


def test_the_explanations_hold(parameters: dict[str, Row]) -> None:
    for size, dim, depth in (("Tiny", 512, 3), ("Moderate", 1024, 6)):
        gap = parameters[f"ViT-{size} − BBViT-{size}"].ours
        assert gap == depth * (dim**2 + dim - 3 * dim), "an output projection with its bias, less the biases of q, k, v"
    for name in ("ViT-Tiny", "BBViT-Tiny"):
        row, more = parameters[name], (2210 - 530) * 512
        assert f"{(row.ours + more) / 1e6:.2f} M" in row.note  # type: ignore[operator]
        assert f"{(row.ours + more) / 1e6:.1f}" == row.paper  # type: ignore[operator]
    once = Decimal(parameters["BBViT-Moderate"].ours).scaleb(-6).quantize(Decimal("0.01"))  # type: ignore[arg-type]
    twice = once.quantize(Decimal("0.1"), ROUND_HALF_UP)
    assert str(twice) == parameters["BBViT-Moderate"].paper


@pytest.mark.parametrize("name", ["bbvit-2", "bbvit-3"])
def test_every_row_has_a_number_or_says_why(name: str) -> None:
    rows = list(table(name).build())
    trained = [row for row in rows if row.quantity == "top-1"]
    assert {row.row for row in trained} == (set(PATTERNS) if name == "bbvit-2" else {"ViT", "BBViT"})
    assert all(row.paper and row.ours is None and "not re-run" in row.note for row in trained)
    assert all(row.ours is not None for row in rows if row.quantity != "top-1")


def test_hours_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    from attendless_lab.papers import bbvit

    monkeypatch.setattr(bbvit, "warm_up", lambda call, timer: call() or 1.6)
    rows = list(bbvit._timed(72, {"small": ("bbvit_w64_patch6_72", "full")}))
    assert [(row.unit, row.ours) for row in rows] == [("h", pytest.approx(0.1 * 9469 * 200))]
    assert rows[0].ours_text == "52.6"
