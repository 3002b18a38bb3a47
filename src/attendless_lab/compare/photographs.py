"""The demo's last part: `optimize` on a pretrained model, with photographs that come with installed packages.

matplotlib and scikit-learn ship freely licensed photographs. Random crops of them have the statistics of real images,
which is enough to see a real model become faster and how closely it agrees with itself. They are no test set: measure
the accuracy drop on images of your own.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from attendless.convert.source import open_model
from attendless.errors import UserError
from attendless.measure.accuracy import preprocessing
from attendless.optimize.optimize import optimize
from attendless.optimize.optimized import Optimized
from attendless.sizes import input_size

MODEL = "deit_tiny_patch16_224"
#: Photographs by package, relative to its folder.
_PLACES = {
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/rocket.jpg"),
}


def photographs() -> list[Path]:
    """The photographs of the installed packages. No package is imported."""
    found = []
    for package, places in _PLACES.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found += [path for place in places if (path := Path(folder, place)).is_file()]
    return found


def crops(files: list[Path], count: int, transform: Callable[[Image.Image], Tensor], seed: int = 0) -> Tensor:
    """Random square crops of the photographs, half to the whole of the shorter side, preprocessed [count, 3, H, W]."""
    draw = random.Random(seed)
    images = [Image.open(path).convert("RGB") for path in files]
    found = []
    for number in range(count):
        image = images[number % len(images)]
        side = round(min(image.size) * draw.uniform(0.5, 1.0))
        left, top = (draw.randint(0, length - side) for length in image.size)
        found.append(transform(image.crop((left, top, left + side, top + side))))
    return torch.stack(found)


def optimize_photographs(
    out: Path, *, weights: str | None, say: Callable[[str], None], budget: str = "60s", count: int = 120
) -> Optimized | None:
    """Optimise DeiT-Tiny on crops of photographs and write the folder `out`; None if there are no weights or images."""
    files = photographs()
    if not files:
        say("3. a real model: no installed package has photographs; pip install scikit-learn matplotlib")
        return None
    try:
        model: nn.Module = open_model(MODEL, weights=weights, pretrained=weights is None).eval()
    except UserError as error:
        say(f"3. a real model: the weights of {MODEL} are not here ({error})")
        say("   give a file: attendless demo --weights F")
        return None
    say(f"3. a real model: {MODEL}, optimised on {count} crops of {len(files)} photographs, about a minute")
    images = crops(files, count, preprocessing(model, input_size(model), 1.0))
    found = optimize(model, images, max_drop=1.0, quick=True, budget=budget)
    found.save(out)
    return found
