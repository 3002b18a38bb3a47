"""Calibrated merging: each layer merges as many tokens as are more alike than a threshold, on average over images."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from attendless import UserError
from attendless.backbones import Columnar, Pyramid
from attendless.tokens import calibrate, parse_tokens

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


@pytest.fixture(scope="module")
def model() -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**SHAPE, attention="full").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(20, 3, 64, 64)


def schedule(spec: str) -> tuple[int, ...]:
    return parse_tokens(spec).options.r


def pairs_above(model: Columnar, layer: int, images: Tensor, threshold: float) -> float:
    """Mean number of pairs above the threshold in a layer, by a loop over patches."""
    (step,) = (step for step in model.walk(*model.embed(images)) if step.number == layer)
    block, P = model.blocks[layer], 1
    heads, width = block.attn.num_heads, block.attn.head_dim
    keys = block.attn.qkv(block.norm1(step.x)).reshape(*step.x.shape[:2], 3, heads, width)[:, P:, 1].mean(2)
    keys = F.normalize(keys, dim=-1)
    above = 0
    for image in keys:
        for i in range(1, len(image), 2):
            above += max(float(image[i] @ image[j]) for j in range(0, len(image), 2)) > threshold
    return above / len(images)


@torch.no_grad()
def test_each_layer_merges_what_is_more_alike_than_the_threshold(model: Columnar, images: Tensor) -> None:
    spec = calibrate(model, images, threshold=0.8)
    assert model.tokens == "", "the model is left as it is"
    found = schedule(spec)
    assert len(found) == 3
    assert len(set(found)) > 1, "layers differ, or the test shows nothing"
    merged = Columnar(**SHAPE, attention="full", tokens=spec).eval()
    merged.load_state_dict(model.state_dict())
    # The first two layers, each on what the ones before left.
    assert found[0] == round(pairs_above(model, 0, images, 0.8))
    assert found[1] == round(pairs_above(merged, 1, images, 0.8))
    assert calibrate(model, images, threshold=0.8) == spec


def test_start_ceiling_and_half(model: Columnar, images: Tensor) -> None:
    assert schedule(calibrate(model, images, threshold=-2)) == (32, 16, 8), "each that goes needs a partner"
    assert schedule(calibrate(model, images, threshold=2)) == (0, 0, 0)
    assert schedule(calibrate(model, images, threshold=-2, start=1, ceiling=5)) == (0, 5, 5)


def test_window_and_protect_are_passed_on_and_counted_with(model: Columnar, images: Tensor) -> None:
    near = calibrate(model, images[:4], threshold=0.8, window=2)
    assert "window=2" in near
    assert sum(schedule(near)) < sum(schedule(calibrate(model, images[:4], threshold=0.8)))
    assert calibrate(model, images[:4], threshold=1.3, protect=0.1).endswith("protect=0.1")
    assert sum(schedule(calibrate(model, images[:4], threshold=1.3, protect=0.1))) > 0


def test_pyramids_count_by_stage() -> None:
    shape = {"img_size": 64, "embed_dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "num_classes": 5}
    model = Pyramid("full", **shape).eval()
    assert schedule(calibrate(model, torch.randn(2, 3, 64, 64), threshold=-2)) == (128, 32, 16)


def test_mistakes(model: Columnar, images: Tensor) -> None:
    with pytest.raises(UserError, match="expected a converted model"):
        calibrate(timm.create_model("test_vit"), images)
    with pytest.raises(UserError, match="got no images"):
        calibrate(model, images[:0])
    with pytest.raises(UserError, match="ceiling=-1"):
        calibrate(model, images, ceiling=-1)
    with pytest.raises(UserError, match="reads the keys of fastformer, which does not provide it"):
        calibrate(Columnar(**SHAPE, attention="fastformer"), images)
