"""Images whose prediction changed, as HTML: each with its class before and after, and its label if there is one."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import torch
from PIL import Image
from torch import Tensor

from ..data.names import names_of
from ..export.description import Description
from .fresh import Example

#: Pixels of the longer side of an image on the page.
_SIDE = 160


def examples_html(examples: Sequence[Example], about: Description) -> str:
    """The images; a sentence if no prediction changed."""
    if not examples:
        return '<p class="note">No prediction changed on the fresh images, or there are no predictions to compare.</p>'
    names = [name.split(",")[0] for name in names_of(about.class_names, about.classes)]  # the first of synonyms
    return f'<div class="row">{"".join(_figure(one, about, names) for one in examples)}</div>'


def _figure(one: Example, about: Description, names: Sequence[str]) -> str:
    before, after = (names[i] if i < len(names) else f"class {i}" for i in (one.before, one.after))
    truth = "" if one.label is None else f"<br>label: {escape(names[one.label])}"
    shown = f'<img alt="{escape(before)}" src="data:image/jpeg;base64,{_jpeg(one.image, about)}">'
    told = f"{escape(before)} → {escape(after)}{truth}"
    return f'<figure style="margin: 0">{shown}<figcaption class="note">{told}</figcaption></figure>'


def _jpeg(image: Tensor, about: Description) -> str:
    """A preprocessed image as it looked, small."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (about.mean, about.std))
    pixels = (255 * (image * std + mean)).clamp(0, 255).byte().permute(1, 2, 0).numpy()
    made = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    made.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    made.convert("RGB").save(out, "JPEG", quality=80)
    return base64.b64encode(out.getvalue()).decode()
