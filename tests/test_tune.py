"""tune: damages measured layer by layer, a front from all-full to all-cheapest, a choice that keeps its promise."""

from __future__ import annotations

import pytest
import timm
import torch

from attendless import UserError
from attendless.attention import parse
from attendless.convert import convert
from attendless.measure import tune as tuning
from attendless.measure.tune import tune


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=128).eval()
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(12, 3, 128, 128)


def test_damages_are_the_divergence_of_one_changed_layer(model: torch.nn.Module, images: torch.Tensor) -> None:
    host = convert(model, "full").eval()
    found = tuning._damages(host, [parse("foveal:keep=0.1")], images[:4], lambda done: None)
    depth = len(host.blocks)
    assert host.attention == "full", "everything is put back"
    assert found.shape == (depth, 2)
    for layer in (0, depth - 1):
        parts = ["full"] * depth
        parts[layer] = "foveal:keep=0.1"
        changed = convert(model, "/".join(parts), below_breakeven="keep").eval()
        with torch.no_grad():
            expected = torch.nn.functional.kl_div(
                changed(images[:4]).log_softmax(-1),
                model(images[:4]).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
        torch.testing.assert_close(found[layer, 1], expected, atol=1e-5, rtol=1e-3)
    assert found[:, 0].abs().max() == 0


def test_the_front_runs_from_all_full_to_all_cheapest() -> None:
    damages = torch.tensor([[0.0, 0.1, 0.9], [0.0, 0.01, 0.02], [0.0, 0.4, 0.5]])
    front = tuning._front(torch.tensor([[10.0, 4.0, 3.0]] * 3), damages, points=20)
    assert front[0] == [0, 0, 0]
    assert front[-1] == [2, 2, 2]
    costs = [sum((10.0, 4.0, 3.0)[c] for c in mix) for mix in front]
    harms = [sum(float(damages[i, c]) for i, c in enumerate(mix)) for mix in front]
    assert costs == sorted(costs, reverse=True)
    assert harms == sorted(harms)
    assert len(tuning._front(torch.tensor([[10.0, 4.0, 3.0]] * 3), damages, points=3)) == 3
    assert tuning._front(torch.tensor([[3.0, 4.0, 10.0]] * 3), damages, points=20) == [
        [0, 0, 0]
    ]  # full attention is the cheapest here


def test_chooses_within_the_bound(model: torch.nn.Module, images: torch.Tensor) -> None:
    done: list[int] = []
    words = {"rates": (0.1, 0.5), "probe": 4, "points": 3, "budget": 0.2}
    tuned = tune(model, images, max_drop=100.0, progress=done.append, **words)
    assert tuned.chosen == min(tuned.front, key=lambda s: s.latency_ms)
    assert sum(done) <= tuning.steps(6, 12, rates=2, probe=4, points=3)
    convert(model, tuned.attention, below_breakeven="keep")
    strict = tune(model, images, max_drop=0.0, **words)
    assert strict.chosen.expected_drop == 0
    dense = tuned.front[0]
    assert (dense.attention, dense.agreement, dense.core_share) == ("full", 1, 1)


def test_target_ms() -> None:
    def setting(ms: float, drop: float) -> tuning.Candidate:
        return tuning.Candidate("full", (), ms, 1, 0, 1, drop, 1)

    front = [setting(10, 0), setting(6, 0.3), setting(4, 2)]
    assert tuning._choose(front, None, 7)[0] == front[1]
    chosen, reason = tuning._choose(front, None, 1)
    assert chosen == front[2]
    assert "nothing reaches 1 ms" in reason


def test_mistakes(model: torch.nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(UserError, match="not both"):
        tune(model, images, max_drop=1, target_ms=1)
    with pytest.raises(UserError, match="no keep option"):
        tune(model, images, attention="window")
