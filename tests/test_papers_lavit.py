"""The LaViT poster's tables: what agrees, what does not, and that each residual's reason holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch

from attendless.backbones.plugins import PLUGINS, with_less
from attendless_cli.main import main
from attendless_lab.papers import Row, lavit, rules, table
from attendless_lab.papers.throughput import alone, pairs


@pytest.fixture(scope="module")
def extensibility() -> dict[tuple[str, str], Row]:
    return {(row.row, row.quantity): row for row in table("lavit-extensibility").build()}


def test_each_of_seven_backbones_has_its_rows(extensibility: dict[tuple[str, str], Row]) -> None:
    assert len(extensibility) == 2 * 2 * 2 * 7 + 2 * 2 * 7
    assert all(row.note for (_, quantity), row in extensibility.items() if quantity == "FLOPs" and not row.agrees)


def test_the_plain_rows_that_round_do(extensibility: dict[tuple[str, str], Row]) -> None:
    agree = {name for (name, quantity), row in extensibility.items() if quantity == "FLOPs" and row.agrees}
    rounding = {f"{name} {size}" for name in ("HVT", "PVT", "Swin") for size in ("tiny", "small")}
    assert rounding | {"ViT small"} <= agree
    assert not {"CeiT tiny", "CeiT small", "DeepViT small"} & agree


def test_closed_formulas_count_the_same(extensibility: dict[tuple[str, str], Row]) -> None:
    """DeepViT-S, CeiT and HVT by the formulas of their papers' parts."""
    d, N = 396, 197
    deepvit = 16 * (10 * N * d * d + 2 * N * N * d) + 5 * 144 * N**2 + 112**2 * (147 * 64 + 36864) + 196 * 4096 * d
    assert extensibility["DeepViT small", "FLOPs"].ours == deepvit + d * 1000
    d, tokens = 384, [196, *[97] * 3, *[48] * 3, *[23] * 3, *[11] * 2]
    hvt = 196 * 768 * d + sum(12 * n * d**2 + 2 * n * n * d for n in tokens) + d * 1000
    assert extensibility["HVT tiny", "FLOPs"].ours == hvt
    for size, d in (("tiny", 192), ("small", 384)):
        blocks = 12 * (4 * 197 * d * d + 2 * 197**2 * d + 8 * 196 * d * d + 9 * 196 * 4 * d)
        last = 2 * d * d + 12 * 2 * d * d + 8 * d * d + 2 * 12 * d
        assert extensibility[f"CeiT {size}", "FLOPs"].ours == (
            112**2 * 147 * 64 + 196 * 1024 * d + blocks + last + d * 1000
        )


def test_less_attention_saves_and_adds_what_the_formula_says(extensibility: dict[tuple[str, str], Row]) -> None:
    """Each of 8 layers saves q, k and their product, 2 N D² + N² D, and its dense maps add 2 H N³."""
    for size, D, H in (("tiny", 192, 3), ("small", 384, 6)):
        plain, less = (extensibility[f"ViT {size}{end}", "FLOPs"].ours for end in ("", " + LA"))
        assert less - plain == 8 * (2 * H * 197**3 - 2 * 197 * D * D - 197**2 * D)  # type: ignore[operator]


def test_without_the_maps_swin_tiny_meets_the_poster() -> None:
    with torch.device("meta"):
        model = timm.create_model("pyramid_swin_tiny", **with_less("pyramid_swin_tiny", "map=dense,mix=false"))
    assert f"{(rules.total(model) - lavit.maps_macs(model)) / 1e9:.1f}" == "4.0"


@pytest.mark.slow
def test_table_2_agrees_where_it_can() -> None:
    rows = {(row.row, row.quantity): row for row in table("lavit-2").build()}
    names = ("DeiT-T", "DeiT-S", "Swin-T", "Swin-S", "Swin-B", "PVT-T", "PVT-S", "PVT-M", "PVT-L", "PVTv2-b2", "ViT-B")
    for name in names:
        assert rows[name, "parameters"].agrees
        assert rows[name, "FLOPs"].agrees
    for row in rows.values():
        assert row.agrees or row.note, row
    for name in ("CvT-S", "LiT-S", "LiT-M", "PPT-S", "PPT-B"):
        assert rows[name, "FLOPs"].ours is None
        assert "not built" in rows[name, "FLOPs"].note
    stem = 112**2 * (147 * 64 + 36864) + 196 * 4096 * 396
    assert f"stem alone is {stem / 1e9:.1f} G" in rows["DeepViT-S", "FLOPs"].note


def test_the_ablation_says_what_its_models_cost() -> None:
    rows = list(table("lavit-ablation").build())
    assert len(rows) == 3 * 8
    assert rows[1].ours_text == "14.0"  # without less attention it is PVT v2's b1
    assert all(row.agrees is None for row in rows)


def test_throughput_is_measured_here_and_agrees_with_nobody() -> None:
    build = lambda: timm.create_model("columnar_micro_patch4_32")  # noqa: E731
    (row,) = alone([("micro", "3398", build)])
    assert row.ours > 0  # type: ignore[operator]
    assert row.agrees is None
    assert row.ours_text.isdigit()
    plain, less = pairs([("micro", "", build, "micro + LA", build)])
    assert "speed-up over micro" in less.note
    assert "." in plain.ours_text
    assert {name for pair in PLUGINS.values() for name in pair} <= set(timm.list_models())


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "lavit-ablation", "--json", str(tmp_path / "rows.json")]) in (0, None)
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 3 * 8
    with pytest.raises(SystemExit) as stopped:
        main(["papers", "fair-comparison", "--time"])
    assert stopped.value.code == 2
    assert "has no models to time" in capsys.readouterr().err
