"""Predictions of a detector or segmentor for one image, and drawings of them."""

from __future__ import annotations

import colorsys
import dataclasses
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ..errors import UserError
from ..sizes import image_config
from .model import Dense
from .tasks import in_file, probabilities
from .transforms import to_judge, to_pixels


@dataclasses.dataclass(frozen=True)
class Found:
    """Boxes [n, 4] in pixels, labels and scores [n], best first (detector), or classes [h, w] (segmentor)."""

    names: tuple[str, ...]
    boxes: Tensor | None = None
    labels: Tensor | None = None
    scores: Tensor | None = None
    classes: Tensor | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON: every box, or the fraction of the image that each class covers."""
        if self.boxes is not None and self.labels is not None and self.scores is not None:
            rows = zip(self.boxes.tolist(), self.labels.tolist(), self.scores.tolist(), strict=True)
            return {
                "boxes": [
                    {"box": [round(side, 1) for side in box], "class": self.names[label], "score": round(score, 4)}
                    for box, label, score in rows
                ]
            }
        return {"shares": {self.names[i]: round(share, 4) for i, share in self.shares()}}

    def shares(self) -> list[tuple[int, float]]:
        """For a segmentor: the classes in the image and the fraction that each covers, largest first."""
        if self.classes is None:
            raise UserError("a detector returns boxes, not fractions of the image")
        found, counts = self.classes.unique(return_counts=True)
        each = zip(found.tolist(), (counts / self.classes.numel()).tolist(), strict=True)
        return sorted(each, key=lambda pair: -pair[1])


@torch.no_grad()
def predict(model: Dense, image: Image.Image, *, size: int | None = None, score: float = 0.5) -> Found:
    """Run a detector or segmentor on one image.

    Args:
        model: A detector or segmentor; it is set to evaluation mode.
        image: The image.
        size: Length of the image's short side; default: that of the training.
        score: The lowest score of the detections to return.
    """
    config = image_config(model)
    names = tuple(map(str, config.get("label_names") or range(model.num_classes)))
    side = size or min(config.get("input_size", (3, 224, 224))[-2:])
    mean, std = config.get("mean", (0.5,) * 3), config.get("std", (0.5,) * 3)
    pixels: Any = to_judge(side, max(config.get("longest", 1333), side), mean, std)(to_pixels(image))
    images = pixels.as_subclass(Tensor)[None].to(next(model.parameters()).device)
    model.eval()
    if model.task == "detection":
        found = model(images)[0]
        sizes = torch.tensor([(image.height, image.width), images.shape[-2:]])
        keep = found["scores"] >= score
        boxes = in_file(found["boxes"][keep], sizes).cpu()
        return Found(names, boxes, found["labels"][keep].cpu(), found["scores"][keep].cpu())
    answers = probabilities(model, images)
    fine = torch.nn.functional.interpolate(answers, (image.height, image.width), mode="bilinear")
    return Found(names, classes=fine[0].argmax(0).cpu())


def draw(image: Image.Image, found: Found) -> Image.Image:
    """The image with the predictions drawn on it."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    if found.classes is None:
        return _with_boxes(image, pixels, found)
    there = [index for index, _ in found.shares()]
    masks = torch.stack([found.classes == index for index in there])
    made = draw_segmentation_masks(pixels, masks, alpha=0.5, colors=[colour(index) for index in there])
    return _with_legend(Image.fromarray(made.permute(1, 2, 0).numpy()), found)


def _with_boxes(image: Image.Image, pixels: Tensor, found: Found) -> Image.Image:
    if found.boxes is None or found.labels is None or found.scores is None or not len(found.boxes):
        return image.convert("RGB")
    labels = found.labels.tolist()
    width = max(1, round(min(image.size) / 200))
    made = draw_bounding_boxes(pixels, found.boxes, colors=[colour(label) for label in labels], width=width)
    picture = Image.fromarray(made.permute(1, 2, 0).numpy())
    pen, font = ImageDraw.Draw(picture), _font(image)
    for box, label, score in zip(found.boxes.tolist(), labels, found.scores.tolist(), strict=True):
        _write(pen, (box[0], box[1]), f"{found.names[label]} {score:.2f}", colour(label), font)
    return picture


def _with_legend(picture: Image.Image, found: Found) -> Image.Image:
    """Draw the names of classes that cover 1 % of the image or more in the corner."""
    pen, font, top = ImageDraw.Draw(picture), _font(picture), 2.0
    for index, share in found.shares():
        if share >= 0.01:
            top = _write(pen, (2, top), f"{found.names[index]}: {100 * share:.0f} %", colour(index), font)
    return picture


def _write(
    pen: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: tuple[int, int, int], font: Any
) -> float:
    """Write text on a coloured field; return the top of the next line."""
    left, top, right, bottom = pen.textbbox(place, text, font=font)
    pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), fill=fill)
    pen.text(place, text, fill="black" if sum(fill) > 330 else "white", font=font)
    return bottom + 4


def _font(image: Image.Image) -> Any:
    return ImageFont.load_default(size=max(10, round(min(image.size) / 28)))


def colour(index: int) -> tuple[int, int, int]:
    """A colour per class; consecutive classes have distant hues."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.61803398875 % 1, 0.75, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
