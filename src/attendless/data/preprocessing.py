"""timm's evaluation transform, with bounded memory: a thin image is cropped before it is scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

from PIL import Image
from timm.data import create_transform
from torchvision.transforms import Compose

from ..errors import UserError

#: The largest ratio of the sides of an image, relative to that of the model's input, which is scaled whole. A centre
#: crop keeps at most 1/32 of the longer side of thinner ones.
THINNEST = 32
#: The longest side, in pixels, to which images are scaled before the crop.
LONGEST = 2**16


@dataclasses.dataclass(frozen=True)
class CropThin:
    """Crops the longer side of an image to `ratio` times the shorter one, around the centre.

    The number of pixels that go is even: the centre of the image stays where it is.
    """

    ratio: int

    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (max(0, side - self.ratio * other) // 2 for side, other in (image.size, image.size[::-1]))
        return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


def evaluation_transform(config: dict[str, Any], *, normalize: bool = True) -> Compose:
    """The steps from an image to the input of a model.

    Args:
        config: The model's images, as `timm.data.create_transform` takes them: `input_size` (channels, height, width),
            `crop_pct`, `crop_mode`, `interpolation`, `mean` and `std`.
        normalize: Whether the result is scaled to 0…1 and normalised; otherwise it holds bytes.
    """
    sides, crop_pct = config["input_size"][-2:], config.get("crop_pct")
    if crop_pct and not max(sides) / LONGEST <= crop_pct:
        raise UserError(
            f"crop_pct {crop_pct:g} scales images to {max(sides) / crop_pct:,.0f} px before the crop: expected at most "
            f"{LONGEST:,}, so give at least {max(sides) / LONGEST:.2g}"
        )
    made: Any = create_transform(**config, is_training=False, normalize=normalize)
    return Compose([CropThin(THINNEST * -(-max(sides) // min(sides))), *made.transforms])
