"""Masks of SAM 2 as the metric of `eval` and `optimize`, in place of the distance of features.

    python examples/sam2_weights.py sam2        # the weights, about a minute
    python examples/sam2_masks.py sam2 photo.jpg

The last command prints how well the masks of `foveal` agree with those of full attention. On the command line, this
module provides the metric and registers the model:

    cd examples
    attendless eval sam2_tiny_encoder --weights sam2/encoder.safetensors --data photos/ \
        --metric sam2_masks:mask_agreement --no-labels --attention foveal:keep=0.25 foveal:keep=0.1
    attendless optimize sam2_tiny_encoder --weights sam2/encoder.safetensors --data photos/ \
        --metric sam2_masks:mask_agreement --no-labels --max-drop 1.0 --out fast/

The metric prompts SAM 2's mask decoder with four points per image and returns the mean intersection over union with the
masks of the original encoder, each weighted by the quality that the decoder predicts for the original's mask. The
metric needs no labels. The environment variable `SAM2` names the folder of decoder.onnx (default: sam2).
"""

import functools
import os
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import register_model
from torch import Tensor, nn
from torch.nn import functional as F

import attendless
from attendless.measure.accuracy import preprocessing

#: Points as shares of the image's width and height.
POINTS = np.array([[[x, y]] for y in (1 / 3, 2 / 3) for x in (1 / 3, 2 / 3)], np.float32)
#: SAM 2's labels of prompts: a point inside of the object; the two corners of a box.
POINT, BOX = [1], [2, 3]


class Encoder(nn.Module):
    """SAM 2's image encoder: trunk and neck.

    `eval` and `optimize` compare one output per image: a row of 4 · S · S numbers for an image of S × S pixels. The row
    holds the three maps that the mask decoder reads, [32, S/4, S/4], [64, S/8, S/8] and [256, S/16, S/16].
    """

    num_classes = 0

    def __init__(
        self, trunk: nn.Module, width: int = 256, narrow: tuple[int, int] = (32, 64), size: int = 1024
    ) -> None:
        super().__init__()
        self.trunk = trunk
        widths = [info["num_chs"] for info in trunk.feature_info]
        self.neck = nn.ModuleList([nn.Conv2d(channels, width, 1) for channels in reversed(widths)])
        self.narrow = nn.ModuleList([nn.Conv2d(width, channels, 1) for channels in narrow])
        self.no_memory = nn.Parameter(torch.zeros(width))
        config = {"architecture": "sam2_tiny_encoder", "input_size": (3, size, size), "crop_pct": 1.0}
        self.pretrained_cfg = trunk.pretrained_cfg | config | {"crop_mode": "squash", "num_classes": 0}

    def forward(self, images: Tensor) -> Tensor:
        return self.join(self.trunk.forward_intermediates(images, intermediates_only=True)[-4:])

    def join(self, stages: list[Tensor]) -> Tensor:
        """The neck: maps of the trunk's four stages, the finest first → [B, 4 · S · S]."""
        fine, finer = (conv(stage) for conv, stage in zip(list(self.neck)[2:], (stages[1], stages[0]), strict=True))
        above = F.interpolate(self.neck[0](stages[3]), scale_factor=2.0, mode="nearest")
        embedding = self.neck[1](stages[2]) + above + self.no_memory[:, None, None]
        return torch.cat([m.flatten(1) for m in (self.narrow[0](finer), self.narrow[1](fine), embedding)], dim=1)


@register_model
def sam2_tiny_encoder(pretrained: bool = False, **options: object) -> Encoder:
    trunk = timm.create_model("sam2_hiera_tiny", num_classes=0)
    trunk.head = nn.Identity()
    return Encoder(trunk)


def maps_of(output: Tensor) -> dict[str, np.ndarray]:
    """An encoder's output for one image [4 · S · S] as the inputs of the mask decoder."""
    side = round((len(output) / 4) ** 0.5)
    shapes = {
        "high_res_feats_0": (1, 32, side // 4, side // 4),
        "high_res_feats_1": (1, 64, side // 8, side // 8),
        "image_embed": (1, 256, side // 16, side // 16),
    }
    parts = output.split([int(np.prod(shape)) for shape in shapes.values()])
    return {name: part.reshape(shapes[name]).numpy() for name, part in zip(shapes, parts, strict=True)}


@functools.cache
def decoder(folder: str) -> object:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(Path(folder) / "decoder.onnx"), options, providers=["CPUExecutionProvider"])


def decode(output: Tensor, prompts: np.ndarray, labels: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the three masks for each prompt [P, 3, 256, 256], and their predicted quality [P, 3].

    prompts: points [P, points per prompt, 2] as shares of width and height.
    labels: the kind of each point: `POINT` or `BOX`.
    """
    count = len(prompts)
    return decoder(os.environ.get("SAM2", "sam2")).run(
        ["masks", "iou_predictions"],
        maps_of(output)
        | {
            "point_coords": (prompts * 1024).astype(np.float32),
            "point_labels": np.tile(np.array(labels, np.float32), (count, 1)),
            "mask_input": np.zeros((count, 1, 256, 256), np.float32),
            "has_mask_input": np.zeros(1, np.float32),
        },
    )


def iou(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Intersection over union of boolean masks [..., H, W]; 1 where both are empty."""
    both, either = (ours & theirs).sum((-2, -1)), (ours | theirs).sum((-2, -1))
    return np.where(either == 0, 1.0, both / np.maximum(either, 1))


def mask_agreement(outputs: Tensor, targets: Tensor) -> Tensor:
    """The metric: agreement of the masks of an encoder's outputs with those of the original's, one value per image."""
    found = []
    for output, target in zip(outputs, targets, strict=True):
        ours, _ = decode(output, POINTS, POINT)
        theirs, quality = decode(target, POINTS, POINT)
        best = np.arange(len(POINTS)), quality.argmax(1)  # of three nested masks, the one that the original prefers
        found.append(np.average(iou(ours[best] > 0, theirs[best] > 0), weights=quality[best].clip(1e-3)))
    return torch.tensor(np.array(found))


def main(folder: str, *images: str) -> None:
    os.environ["SAM2"] = folder
    encoder = attendless.open_model("sam2_tiny_encoder", weights=Path(folder) / "encoder.safetensors")
    prepare = preprocessing(encoder, (1024, 1024))
    pixels = torch.stack([prepare(Image.open(file).convert("RGB")) for file in images])
    with torch.inference_mode():
        original = encoder(pixels)
        for rate in (0.25, 0.1):
            attendless.patch(encoder, f"foveal:keep={rate}")
            print(f"keep={rate}: masks agree to", *(f"{x:.3f}" for x in mask_agreement(encoder(pixels), original)))
            attendless.unpatch(encoder)


if __name__ == "__main__":
    main(*sys.argv[1:])
