"""Blocks of SAM 2's Hiera in bands: the same outputs, and whole blocks wherever something sees all tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import Mlp
from timm.models.hieradet_sam2 import MultiScaleBlock
from torch import nn

import attendless
from attendless.integrations.timm_inplace import bands

HIERA = {"stages": (1, 2, 3, 1), "global_att_blocks": (4,), "num_classes": 5, "embed_dim": 32}


@pytest.fixture
def hiera(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bands, "_HIDDEN", 1)
    monkeypatch.setattr(bands, "_TOKENS", 1)
    model = timm.create_model("sam2_hiera_tiny", **HIERA)
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def classes(model: Any) -> list[str]:
    return [type(m).__name__ for m in model.modules() if isinstance(m, MultiScaleBlock | Mlp)]


@pytest.mark.parametrize("size", [(128, 128), (160, 96)])  # windows that fit, and windows that are padded
def test_full_is_exact_in_bands(hiera: Any, size: tuple[int, int]) -> None:
    ours = copy.deepcopy(hiera)
    attendless.patch(ours, "full", size=128)
    assert classes(ours).count("BandedBlock") == 6
    assert classes(ours).count("BandedMlp") == 1
    with torch.inference_mode():
        x = torch.randn(2, 3, *size)
        for a, b in zip(ours.forward_intermediates(x)[1], hiera.forward_intermediates(x)[1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_windowed_blocks_compute_a_band_at_a_time(hiera: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attendless.patch(hiera, "full", size=128)
    seen: list[int] = []
    whole = MultiScaleBlock.forward
    monkeypatch.setattr(MultiScaleBlock, "forward", lambda self, x: (seen.append(x.shape[1]), whole(self, x))[1])
    with torch.inference_mode():
        hiera.blocks[0](torch.randn(1, 32, 32, 32))
        assert seen == [8, 8, 8, 8]
        seen.clear()
        hiera.blocks[0].mlp.register_forward_hook(lambda *given: None)
        hiera.blocks[0](torch.randn(1, 32, 32, 32))
        assert seen == [32]


def test_gradients_are_those_of_whole_blocks(hiera: Any) -> None:
    ours = copy.deepcopy(hiera)
    attendless.patch(ours, "full", size=128)
    x = torch.randn(1, 3, 128, 128)
    for model in (ours, hiera):
        model(x).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), hiera.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["full", "foveal:keep=0.5"])
def test_unpatch_restores_every_class(hiera: Any, spec: str) -> None:
    before = classes(hiera)
    attendless.patch(hiera, spec, size=128, below_breakeven="keep")
    assert classes(hiera) != before
    attendless.unpatch(hiera)
    assert classes(hiera) == before


def test_a_copy_and_its_file_compute_in_bands(tmp_path: Path) -> None:
    hiera = timm.create_model("sam2_hiera_tiny", num_classes=5).eval()
    ours = attendless.convert(hiera, "foveal:keep=0.5", below_breakeven="keep")
    assert "BandedBlock" not in classes(hiera)
    assert "BandedBlock" in classes(ours)
    attendless.save(ours, tmp_path / "ours.safetensors")
    again = attendless.load(tmp_path / "ours.safetensors")
    assert classes(again) == classes(ours)
    x = torch.randn(1, 3, 128, 128)
    with torch.inference_mode():
        torch.testing.assert_close(again(x), ours(x))


def test_exported_graphs_hold_whole_blocks(hiera: Any) -> None:
    attendless.patch(hiera, "full", size=128)
    x = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        graph = torch.export.export(hiera, (x,), strict=False).graph
    assert not [node for node in graph.nodes if "aten.split" in str(node.target) and node.args[0].meta["val"].ndim == 4]
