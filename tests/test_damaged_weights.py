"""Weights that hold NaN or infinity are refused by name wherever they come in."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import attendless
from attendless.convert.source import open_model, random_weights
from attendless.errors import UserError


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(tmp_path, value):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1, num_classes=3)
    sound = attendless.convert(model, "foveal:keep=0.5", below_breakeven="keep")
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[3, 5] = value
        sound.blocks[0].mlp.fc1.weight[3, 5] = value
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.fc1\.weight holds NaN or infinity \(1 of"):
        attendless.convert(model, "full")
    attendless.save(sound, tmp_path / "saved.safetensors")
    with pytest.raises(UserError, match=r"saved\.safetensors.*blocks\.0\.mlp\.fc1\.weight holds NaN"):
        attendless.load(tmp_path / "saved.safetensors")
    whole = timm.create_model("vit_tiny_patch16_224")
    with torch.no_grad():
        whole.cls_token[0, 0, 0] = value
    save_file(whole.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="cls_token holds NaN or infinity"):
        open_model("vit_tiny_patch16_224", weights=tmp_path / "w.safetensors")


def test_random_weights_are_known_before_anything_is_built(tmp_path):
    assert random_weights("vit_tiny_patch16_224")
    assert not random_weights("vit_tiny_patch16_224", weights="w.safetensors")
    assert not random_weights("vit_tiny_patch16_224", pretrained=True)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    attendless.save(model, tmp_path / "m.safetensors")
    assert not random_weights(tmp_path / "m.safetensors")
