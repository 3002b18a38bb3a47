"""As users run it: the policy `auto`, with costs measured on this machine, from convert to forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch

from attendless import convert, load, save
from attendless.convert import convert_with_report
from attendless.sparse import calibration, execution


@pytest.fixture(autouse=True)
def _measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Really measured, but small and once: what is found is not judged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_SIDES", (5, 6))
    monkeypatch.setattr(calibration, "_SECONDS", 0)
    calibration.forget()
    with execution("auto"):
        yield
    calibration.forget()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 128, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    return timm.create_model("vit_tiny_patch16_224", **small).eval()


@pytest.mark.parametrize("attention", ["foveal:keep=0.1", "bigbird:block=2,seed=1", "sparsifiner:keep=0.1,rank=9"])
def test_costs_are_measured_when_first_needed_and_decide(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_waited", lambda: 0.0)  # on a busy machine they would not be kept
    assert not list(tmp_path.rglob("costs-*.json"))
    ours, report = convert_with_report(model(), attention)
    assert [file.suffix for file in (tmp_path / "cache" / "attendless").iterdir()] == [".json"]
    assert all("estimated on this machine" in layer.reason for layer in report.layers)
    for layer in report.layers:
        assert layer.decision == ("left full" if layer.attention == "full" else "converted")
    again = convert(model(), attention)
    assert again.attention == ours.attention, "what was measured is kept"


@pytest.mark.parametrize("attention", ["foveal:keep=0.1", "bigbird:block=2,seed=1", "sparsifiner:keep=0.1,rank=9"])
def test_the_function_is_that_of_any_other_policy(attention: str, tmp_path: Path) -> None:
    images = torch.randn(2, 3, 128, 128)
    ours = convert(model(), attention, below_breakeven="keep").eval()
    save(ours, tmp_path / "ours.safetensors")
    calibration.measured()
    with torch.no_grad():
        found = ours(images)
        for policy in ("off", "torch"):
            with execution(policy):
                torch.testing.assert_close(load(tmp_path / "ours.safetensors")(images), found, atol=1e-4, rtol=1e-4)
