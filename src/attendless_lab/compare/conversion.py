"""A trained model, converted without training: its accuracy, agreement, latency, memory and attention maps."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageChops
from torch import Tensor

from attendless.convert import convert, load, open_model
from attendless.data.opening import open_data
from attendless.maps import entry, numbers, on_grid
from attendless.measure.accuracy import evaluate, preprocessing
from attendless.measure.bench import bench
from attendless.measure.subject import original
from attendless.sizes import input_size
from attendless.sparse import execution
from attendless.stamp import cores

from .progress import Progress
from .variants import PICTURES

#: Scale of the images in the report relative to a pixel of the map.
_PIXELS = 4
#: Brightness of positions to which no query attends sharply.
_DARK = 0.15
#: One patch in this many is a query of the map; no divisor of a row's length, so that all columns occur.
_EVERY = 37


@dataclasses.dataclass(frozen=True)
class Asked:
    """The conversion, and the images for its evaluation: those of the comparison, six times as large."""

    attention: str = "foveal:keep=0.1"
    size: int = 192
    data: str = f"{PICTURES},size=192,val=600"
    #: Threads of the latency benchmark; the evaluation uses all cores.
    threads: int = 1
    #: Seconds of timing.
    budget: float = 20.0
    #: Number of images in the report.
    shown: int = 2


def convert_and_measure(path: Path, asked: Asked, say: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """The row of the conversion as JSON: accuracy and agreement, paired per image, latency and memory."""
    model = open_model(path, size=asked.size).eval()
    dense, size = original(model), input_size(model)
    fast = convert(model, asked.attention).eval()
    source = open_data(asked.data, "val")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores())
        how, models = preprocessing(model, size), {"full": dense, asked.attention: fast}
        # The default backends, so that predictions are reproducible.
        with execution("off"), progress(f"images of {size[0]} px", len(source)) as advance:
            found = evaluate(dense, models, source, how, batch=16, workers=0, progress=advance)
    finally:
        torch.set_num_threads(before)
    timing: dict[str, Any] = {"threads": asked.threads, "budget": asked.budget, "throughput": False, "parts": False}
    row = bench(fast, like=dense, progress=say, **timing)
    accuracy = dataclasses.asdict(found[asked.attention])
    full = {"dense_top1": found["full"].top1, "dense_top1_ci": found["full"].top1_ci}
    return {
        **row.as_dict(),
        **accuracy,
        **full,
        "data": asked.data,
        "trained_at": list(input_size(load(path))),
        "stamp": dict(row.stamp),
        "shown": [_shown(fast, source[i], how) for i in range(min(asked.shown, len(source)))],
    }


def headline(row: dict[str, Any]) -> str:
    """The result of the conversion in one sentence."""
    low, high = row["difference_ci"]
    quicker = f"{row['speedup']:.1f}× faster" if row["distinguishable"] and row["speedup"] > 1 else row["verdict"]
    return (
        f"{row['attention'].partition(':')[0]}: {quicker} at {row['tokens']:,} tokens, {points(row['difference'])} "
        f"({low:+.1f} to {high:+.1f}), no training"
    ).replace("-", "−")


def points(difference: float) -> str:
    """`accuracy drop 0.2 points`, `accuracy gain 0.4 points`."""
    amount = f"{abs(difference):.1f}"
    return "no accuracy drop" if amount == "0.0" else f"accuracy {'drop' if difference < 0 else 'gain'} {amount} points"


@torch.no_grad()
def _shown(model: Any, labelled: tuple[Image.Image, int], transform: Callable[[Any], Tensor]) -> dict[str, Any]:
    """One image, and how many patches attend sharply to each position of it in the middle layer."""
    picture, label = labelled
    image = transform(picture)[None]
    layers = numbers(model, None)
    given = entry(model, image, layers[len(layers) // 2])
    grid = given.context.grid
    asking = range(grid.prefix + _EVERY // 2, grid.tokens, _EVERY)
    sees = torch.stack([given.attention.sees(given.x, given.context, query)[0] for query in asking]).float()
    sharp = on_grid(sees.mean((0, 1))[None, None], grid)[0, 0]
    size = (grid.width * _PIXELS, grid.height * _PIXELS)
    levels = (255 * (_DARK + (1 - _DARK) * sharp / sharp.max())).round().to(torch.uint8).numpy()
    whole = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    light = Image.fromarray(levels).resize(size, Image.Resampling.NEAREST)
    return {
        "picture": _png(whole),
        "sharp": _png(ImageChops.multiply(whole, light.convert("RGB"))),
        "share": float(sees.mean()),
        "layer": given.layer,
        "label": label,
        "answer": int(model(image).argmax()),
    }


def _png(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
