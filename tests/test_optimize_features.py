"""optimize, models without a classifier: schedules are searched by the distance of features, not by predictions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import steady_clock
from attendless import UserError
from attendless.backbones import Columnar
from attendless.export import open_runner
from attendless.optimize import rates
from attendless.optimize import schedules as searching
from attendless.optimize.judge import relative_error
from attendless.optimize.optimize import optimize
from attendless.optimize.schedules import Schedule, Trials
from attendless.optimize.scoring import cosine


@pytest.fixture(scope="module")
def extractor() -> Columnar:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = Columnar(**shape, num_classes=0, attention="full").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def test_token_schedules_are_judged_by_features(extractor: Columnar, monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock.install(monkeypatch.setattr)
    seen: list[tuple[Trials, Schedule]] = []
    judged = searching.Trials.judged

    def watched(self: Trials, schedule: Schedule) -> Schedule:
        seen.append((self, judged(self, schedule)))
        return seen[-1][1]

    monkeypatch.setattr(searching.Trials, "judged", watched)
    images = torch.randn(18, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = optimize(extractor, images, max_drop=5.0, runtimes=["eager"], attention="none", budget="20s", threads=1)
    assert found.scored_by == "drop of 100 · cosine similarity"
    assert "mean score" in str(found)
    assert "agreement" not in str(found)
    trials, one = seen[-1]
    with torch.inference_mode():
        before: Tensor = extractor(trials.search.images)
        after = trials.view(one.tokens)(trials.search.images)
    assert one.divergence == pytest.approx(relative_error(before, after), rel=1e-3)
    assert one.drop == pytest.approx(100 * float((1 - cosine(after, before)).mean()), rel=1e-3)


def test_the_size_of_a_model_that_states_none_is_that_of_the_images() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    found = optimize(net, torch.randn(9, 3, 24, 40), runtimes=["eager"], quick=True, budget="1s", threads=1)
    assert found.setting.size == (24, 40)


def test_maps_are_compared_by_their_cosine() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 5, 1))
    labels = [0] * 9
    found = optimize(net, torch.randn(9, 3, 24, 24), labels, runtimes=["eager"], quick=True, budget="1s", threads=1)
    assert found.scored_by == "drop of 100 · cosine similarity"


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 1, 4, 4), nn.Flatten(), nn.Linear(36, 1)), "one number for an image"),
        (nn.Conv2d(4, 8, 4, 4), r"cannot be run on images \[3, 24, 24\]"),
        (timm.create_model("test_vit"), "images of 24 px were given, the model takes 160 px"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_the_search(net: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimize(net, torch.randn(9, 3, 24, 24), runtimes=["eager"], quick=True, budget="1s")


def test_presets_are_not_tried_where_tokens_cannot_be_reduced() -> None:
    shape: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **shape, num_classes=5)
    found = optimize(swin, torch.randn(9, 3, 64, 64), runtimes=["eager"], quick=True, budget="1s", threads=1)
    assert not [note for note in found.notes if "rank" in note]


class Detector(nn.Module):
    """A model that contains a supported one, as detectors do; no checkpoint of ours describes it."""

    num_classes = 0

    def __init__(self) -> None:
        super().__init__()
        shape: dict[str, Any] = {"img_size": 64, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
        self.trunk = timm.create_model("vit_tiny_patch16_224", **shape, num_classes=0)
        self.neck = nn.Linear(32, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.neck(self.trunk.forward_features(images))


def test_attention_is_searched_inside_of_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(backbone: nn.Module, layers: list[int], specs: list[Any], *given: object) -> Tensor:
        return torch.tensor([[1.0] + [0.5] * len(specs)] * len(layers))

    steady_clock.install(monkeypatch.setattr)
    monkeypatch.setitem(steady_clock.SHARES, "foveal", 0.5)
    monkeypatch.setattr(rates, "attention_times", times)
    torch.manual_seed(0)
    images = torch.randn(12, 3, 64, 64)
    found = optimize(Detector().eval(), images, max_drop=50.0, runtimes=["eager"], budget="10s", threads=1)
    tried = [one.variant for one in found.outcomes if one.variant.change.layers]
    assert tried, "the trunk's attentions"
    assert {one.target.precision for one in tried} == {"fp32"}, "a traced graph computes in fp32 alone"
    assert any("token reduction was not searched" in note for note in found.notes)
    changed = next(one for one in found.outcomes if one.variant.change.layers)
    other = dataclasses.replace(found, chosen=changed, prepared=found.workshop.prepare(changed.variant))
    assert other.save(tmp_path / "fast").name == "model.pt2"
    torch.testing.assert_close(open_runner(tmp_path / "fast")(images[:1]), other(images[:1]), atol=1e-4, rtol=1e-3)
