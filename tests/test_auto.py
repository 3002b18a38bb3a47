"""The policy `auto`, which is the users' default, with costs measured on this machine: from `convert` to `forward`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch

from attendless import convert, load, save
from attendless.convert import breakeven, convert_with_report
from attendless.sparse import calibration, dispatch, execution, native
from attendless.sparse.backend import every_backend
from attendless.sparse.calibration import Line

SPECS = ["foveal:keep=0.1", "bigbird:block=2,seed=1", "sparsifiner:keep=0.1,rank=9"]


@pytest.fixture(autouse=True)
def _measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Costs are really measured, but on small grids and for a short time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_SIDES", (5, 6))
    monkeypatch.setattr(calibration, "_SECONDS", 0)
    monkeypatch.setattr(calibration, "_waited", lambda: 0.0)  # lines of a busy machine would not be stored
    calibration.forget()
    with execution("auto"):
        yield
    calibration.forget()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 128, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    return timm.create_model("vit_tiny_patch16_224", **small).eval()


@pytest.mark.parametrize("attention", SPECS)
def test_costs_are_measured_when_first_needed_and_stored(attention: str, tmp_path: Path) -> None:
    ours, report = convert_with_report(model(), attention)
    (file,) = (tmp_path / "cache" / "attendless").iterdir()
    assert file.match("costs-*.json")
    for layer in report.layers:
        own, full = (float(text.split(" ms")[0].split()[-1]) for text in layer.reason.split("full attention"))
        assert "estimated on this machine" in layer.reason
        assert own == full or (layer.attention == "full") == (own > full), "the smaller of two rounded figures decides"
    stored = file.read_text()
    calibration.forget()  # as in the next process
    assert convert(model(), attention).attention == ours.attention
    assert file.read_text() == stored, "costs are not measured again"


@pytest.mark.parametrize("attention", SPECS)
@pytest.mark.parametrize("full_costs", [0.0, 1.0])
def test_costs_decide_what_is_converted(attention: str, full_costs: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention at no cost leaves every layer full; at a second per call, every layer is converted."""
    monkeypatch.setattr(breakeven, "LARGEST", 256)  # the report's search for a size that pays ends there
    calibration.measured()
    calibration.learn(
        torch.float32, {name: Line(full_costs, 0) for name in calibration.known(torch.float32) if "full" in name}
    )
    _, report = convert_with_report(model(), attention)
    expected = ("converted", attention.partition(":")[0]) if full_costs else ("left full", "full")
    assert {(layer.decision, layer.attention.partition(":")[0]) for layer in report.layers} == {expected}


@pytest.mark.parametrize("attention", SPECS)
def test_costs_pick_the_backend_and_not_the_function(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randn(2, 3, 128, 128)
    save(convert(model(), attention, below_breakeven="keep"), tmp_path / "ours.safetensors")
    calibration.measured()
    run, outputs = dispatch.run, {}
    for fast in ("torch", "native") if native.available else ("torch",):
        used = set()
        names = {one.name: [] for one in every_backend()}
        for name in calibration.known(torch.float32):
            names[name.split()[1]].append(name)
        lines = {name: Line(0 if backend == fast else 1, 0) for backend, each in names.items() for name in each}
        calibration.learn(torch.float32, lines)
        monkeypatch.setattr(
            dispatch,
            "run",
            lambda case, *x, used=used, **y: (used.add(dispatch.choose(case).backend), run(case, *x, **y))[1],
        )
        with torch.no_grad():
            outputs[fast] = load(tmp_path / "ours.safetensors")(images)
        assert fast in used
    for found in outputs.values():
        torch.testing.assert_close(found, outputs["torch"], atol=1e-4, rtol=1e-4)
