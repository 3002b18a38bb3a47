"""SAM 2's masks as a metric: the example's encoder, its decoder inputs, and the agreement of masks."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import attendless

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "sam2_masks.py"
TINY = {"stages": (1, 1, 3, 1), "global_att_blocks": (3,), "num_classes": 0, "embed_dim": 32}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="imported")


@pytest.fixture
def encoder(example: dict[str, Any]) -> Any:
    return example["Encoder"](timm.create_model("sam2_hiera_tiny", **TINY), size=128).eval()


class FakeDecoder:
    """Three nested masks per prompt, from the embedding alone: larger with its mean. The middle one is preferred."""

    def run(self, names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
        count = len(given["point_coords"])
        assert given["point_labels"].shape == given["point_coords"].shape[:2]
        assert given["mask_input"].shape == (count, 1, 256, 256)
        rows = np.arange(256, dtype=np.float32)[:, None] / 256
        levels = given["image_embed"].mean() + np.array([0.25, 0.5, 0.75], np.float32)
        masks = np.broadcast_to(levels[:, None, None] - rows, (3, 256, 256))
        quality = np.array([0.1, 0.9, 0.2], np.float32)
        return [np.tile(masks, (count, 1, 1, 1)), np.tile(quality, (count, 1))]


@pytest.fixture
def _fake(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(example["decode"].__globals__, "decoder", lambda folder: FakeDecoder())


def test_one_output_holds_the_three_maps(example: dict[str, Any], encoder: Any) -> None:
    x = torch.randn(2, 3, 128, 128)
    with torch.inference_mode():
        out = encoder(x)
        stages = encoder.trunk.forward_intermediates(x, intermediates_only=True)
        maps = example["maps_of"](out[1])
        assert {name: value.shape for name, value in maps.items()} == {
            "high_res_feats_0": (1, 32, 32, 32),
            "high_res_feats_1": (1, 64, 16, 16),
            "image_embed": (1, 256, 8, 8),
        }
        finest = encoder.narrow[0](encoder.neck[3](stages[0]))[1]
    np.testing.assert_allclose(maps["high_res_feats_0"][0], finest, rtol=1e-5, atol=1e-5)


def test_patch_finds_the_trunk_inside_and_keeps_the_function(encoder: Any) -> None:
    x = torch.randn(1, 3, 128, 128)
    with torch.inference_mode():
        before = encoder(x)
        report = attendless.patch(encoder, "foveal:keep=1", below_breakeven="keep", size=128)
        assert [row.decision for row in report.layers].count("converted") == 1
        torch.testing.assert_close(encoder(x), before, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_fake")
def test_agreement_is_the_overlap_of_the_original_choice(example: dict[str, Any]) -> None:
    original = torch.zeros(2, 4 * 128 * 128)
    changed = original.clone()
    changed[1, -256 * 64 :] = 0.25  # the embedding: masks grow by a quarter of the image
    found = example["mask_agreement"](changed, original)
    assert found[0] == 1
    assert found[1] == pytest.approx(0.5 / 0.75, abs=0.01)


def test_empty_masks_agree(example: dict[str, Any]) -> None:
    nothing, something = np.zeros((1, 4, 4), bool), np.ones((1, 4, 4), bool)
    assert example["iou"](nothing, nothing)[0] == 1
    assert example["iou"](nothing, something)[0] == 0


def weights() -> Path:
    """The folder that examples/sam2_weights.py made, or a skip."""
    path = Path(os.environ.get("ATTENDLESS_SAM2", EXAMPLE.parent / "sam2"))
    if not (path / "encoder.safetensors").is_file():
        pytest.skip(f"no SAM 2 weights at {path}: python examples/sam2_weights.py FOLDER, and set ATTENDLESS_SAM2")
    return path


@pytest.mark.slow
@pytest.mark.data
def test_masks_of_foveal_agree(
    example: dict[str, Any], data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = weights()
    monkeypatch.setenv("SAM2", str(folder))
    images = sorted((data_dir / "pets-256" / "val" / "images").iterdir())[:2]
    example["main"](str(folder), *map(str, images))
    lines = capsys.readouterr().out.splitlines()
    assert [float(x) > 0.9 for line in lines for x in line.split()[-2:]] == [True] * 4
