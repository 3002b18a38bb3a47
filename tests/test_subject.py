"""What a model attends with, and at which size it is measured: also where timm's own attention stands."""

from __future__ import annotations

import pytest
import timm
import torch

from attendless import convert
from attendless.errors import UserError
from attendless.measure.bench import bench_rows
from attendless.measure.subject import attention_of
from attendless.optimize.judge import split
from attendless.optimize.tune import tune
from attendless.sizes import input_size, parse_size

SWIN = {"depths": (2, 2), "embed_dim": 16, "num_heads": (1, 2), "img_size": 64, "window_size": 4, "num_classes": 5}


def swin() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("swin_tiny_patch4_window7_224", **SWIN).eval()


# attention_of --------------------------------------------------------------------------------------------------------


def test_timms_own_attention_goes_by_its_name() -> None:
    assert attention_of(swin()) == "timm's WindowAttention"
    assert attention_of(timm.create_model("pvt_v2_b0")) == "timm's Attention"
    assert attention_of(timm.create_model("xcit_nano_12_p16_224", depth=2)) == "timm's XCA"
    assert attention_of(timm.create_model("vit_tiny_patch16_224", depth=1)) == "full"
    assert attention_of(timm.create_model("resnet18")) == "its own"


def test_half_converted_is_not_wholly_converted() -> None:
    ours = convert(swin(), "foveal", layers="2:", below_breakeven="keep")
    assert attention_of(ours) == "2xtimm's WindowAttention/2xfoveal"
    assert attention_of(convert(swin(), "foveal", below_breakeven="keep")) == "foveal"


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["xcit_nano_12_p16_224", "pvt_v2_b0", "vit_tiny_patch16_224", "pyramid_pvt_v2_b0"])
def test_a_row_is_of_the_size_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take any size keep 224 in their embedding, whatever they are used for."""
    seen = set()
    forward = torch.nn.Conv2d.forward

    def spy(self: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 3:
            seen.add(tuple(x.shape[-2:]))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", spy)
    quick = {"budget": 0.01, "memory": False, "throughput": False, "parts": False}
    from attendless.measure.bench import Conditions

    rows = list(bench_rows(name, ["full"], [(64, 96)], Conditions(**quick)))
    assert [row.setup.size for row in rows] == [(64, 96)]
    assert seen == {(64, 96)}


def test_one_input_size() -> None:
    model = timm.create_model("xcit_nano_12_p16_224", depth=1)
    assert input_size(model) == (224, 224)
    model.pretrained_cfg = {"input_size": (3, 64, 96)}
    assert input_size(model) == (64, 96)


@pytest.mark.parametrize(("given", "wanted"), [(384, (384, 384)), ("384", (384, 384)), ("240x320", (240, 320))])
def test_one_parse_size(given: int | str, wanted: tuple[int, int]) -> None:
    assert parse_size(given) == wanted == parse_size(wanted)


@pytest.mark.parametrize("given", ["", "x", "384x", "1x2x3", "-1", "0", "0x5", "1e3", "²", (3,), (0, 1), -4])
def test_what_is_no_size(given: object) -> None:
    with pytest.raises(UserError, match=r"cannot be read: expected S or HxW"):
        parse_size(given)


def test_a_size_that_is_too_large() -> None:
    with pytest.raises(UserError, match=r"size '9999999' is too large: expected at most 65,536 px"):
        parse_size("9999999")


# tune ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swin", "pyramid"])
def test_tune_goes_through_stages(kind: str) -> None:
    torch.manual_seed(0)
    model = swin()
    if kind == "pyramid":
        small = {"embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2), "img_size": 64, "num_classes": 5}
        model = timm.create_model("pyramid_pvt_v2_b0", **small, mlp_ratios=2, attention="full").eval()
    images = torch.randn(6, 3, 64, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = tune(model, images, rates=(0.25,), max_drop=100.0, probe=2, points=2, budget=0.05)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    dense = found.candidates[0]
    assert (dense.layers, dense.agreement, dense.expected_drop) == ((), 1.0, 0.0)
    assert dense.attention == attention_of(model)
    images = split(images, 2)[1]  # those it was judged on
    for point in found.candidates[1:]:
        ours = convert(model, point.attention, layers=point.layers, below_breakeven="keep").eval()
        with torch.no_grad():
            answers = (ours(images).argmax(1) == model(images).argmax(1)).float().mean()
        assert point.agreement == pytest.approx(float(answers))
