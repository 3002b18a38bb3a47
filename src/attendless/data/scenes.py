"""`scenes`: an included data set whose classes depend on two distant objects, so that attention is needed.

A scene shows a disc and a striped flag, far apart, each in one of ten `colours` that form a circle, and small grey
shapes without information. The class is the number of steps along the circle from the disc's colour to the flag's.

Either colour alone does not predict the class: for each colour of the disc, all ten classes are equally likely, and the
same holds for the flag. So a model that only adds up evidence from single patches stays at the accuracy of guessing; it
must combine two distant patches. An image is a pure function of (seed, split, index, size).

`clutter` adds small squares with vertical stripes in the same colours, without information: then the set of colours is
not enough, and a model must find the two objects. `grain` sets the width of stripes in pixels at every image size: a
patch inside an object then looks the same in small and large images, so that training on small ones transfers. `shade`
varies the colours of objects, so that no model can reach 100 %.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from PIL import Image

from ..options import Options, option, parse_options
from ..randomness import key
from .source import Split

CELLS = 8
#: Side of the disc and the flag, and the least number of cells between them, in cells.
LARGE, GAP = 3, 2
COLOURS = {
    "red": (225, 30, 35),
    "orange": (255, 140, 0),
    "yellow": (255, 230, 40),
    "lime": (150, 225, 30),
    "green": (0, 130, 50),
    "cyan": (60, 220, 225),
    "blue": (25, 115, 255),
    "navy": (30, 25, 140),
    "purple": (145, 35, 195),
    "pink": (255, 135, 205),
}
_PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
_GREYS = np.array([[240.0] * 3, [95.0] * 3, [15.0] * 3], dtype=np.float32)
#: Upper left cells (y, x, y, x) of the disc and of the flag.
_FAR_APART = [
    (*disc, *flag)
    for disc in np.ndindex(CELLS - LARGE + 1, CELLS - LARGE + 1)
    for flag in np.ndindex(CELLS - LARGE + 1, CELLS - LARGE + 1)
    if max(abs(disc[0] - flag[0]), abs(disc[1] - flag[1])) >= LARGE + GAP
]
_SPLITS: dict[Split, int] = {"train": 0, "val": 1}


@dataclasses.dataclass(frozen=True)
class SceneOptions(Options):
    size: int = option(32, "side in pixels", low=16, high=1024)
    train: int = option(12000, "training images", low=1)
    val: int = option(2000, "validation images", low=1)
    seed: int = option(0, "seed of every image", low=0)
    colours: int = option(10, "colours in the circle, and classes", low=2, high=10)
    shade: int = option(0, "standard deviation of the colours", low=0, high=255)
    clutter: int = option(0, "small coloured squares without information", low=0, high=64)
    grain: int = option(0, "period of the stripes in pixels (0: an eighth of the image)", low=0, high=64)


@dataclasses.dataclass(frozen=True)
class Scenes:
    options: SceneOptions
    split: Split

    @classmethod
    def open(cls, text: str, split: Split) -> Scenes:
        """`scenes`, `scenes:size=64,train=5000`."""
        return cls(parse_options(text.partition(":")[2], SceneOptions, "scenes"), split)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(f"{steps} steps" for steps in range(self.options.colours))

    def __len__(self) -> int:
        return self.options.train if self.split == "train" else self.options.val

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        pixels, label = scene(self.options, _SPLITS[self.split], index)
        return Image.fromarray(pixels), label

    def name(self, index: int) -> str:
        return f"scene {index}"


def scene(options: SceneOptions, split: int, index: int) -> tuple[np.ndarray, int]:
    """Pixels [size, size, 3] and label. The content is drawn before the size is used, so all sizes show the same."""
    size, colours = options.size, options.colours
    draw = np.random.Generator(np.random.SFC64(key(options.seed, split, index)))
    disc, flag = draw.integers(colours, size=2).tolist()
    places = _FAR_APART[draw.integers(len(_FAR_APART))]
    greys = draw.integers(CELLS * CELLS * 2 * len(_GREYS), size=5).tolist()
    clutter = draw.integers(CELLS * CELLS * colours, size=options.clutter).tolist()
    shades = np.zeros((2 + options.clutter, 3))
    if options.shade:
        shades = draw.normal(0, options.shade, shades.shape)
    light, down, across = (draw.random(3) * (80, 40, 40) + (80, -20, -20)).tolist()
    ramp = np.linspace(-1, 1, size, dtype=np.float32)
    ground = draw.standard_normal((size, size), dtype=np.float32) * 6 + (light + down * ramp[:, None]) + across * ramp
    canvas = np.empty((size, size, 3), dtype=np.float32)
    canvas[:] = ground[..., None]
    grain = options.grain or size / CELLS
    for thing in greys:
        thing, grey = divmod(thing, len(_GREYS))
        cell, shape = divmod(thing, 2)
        _paint(canvas, divmod(cell, CELLS), 1, ("cross", "triangle")[shape], _GREYS[grey], grain)
    for thing, shade in zip(clutter, shades[2:], strict=True):
        cell, colour = divmod(thing, colours)
        _paint(canvas, divmod(cell, CELLS), 1, "square", _PALETTE[colour] + shade, grain)
    _paint(canvas, places[:2], LARGE, "disc", _PALETTE[disc] + shades[0], grain)
    _paint(canvas, places[2:], LARGE, "flag", _PALETTE[flag] + shades[1], grain)
    return canvas.clip(0, 255, out=canvas).astype(np.uint8), (flag - disc) % colours


def _paint(canvas: np.ndarray, cell: tuple[int, ...], cells: int, shape: str, colour: np.ndarray, grain: float) -> None:
    size = len(canvas)
    top, left = (edge * size // CELLS for edge in cell)
    bottom, right = ((edge + cells) * size // CELLS for edge in cell)
    canvas[top:bottom, left:right][_mask(shape, bottom - top, right - left, grain)] = colour


@functools.lru_cache(maxsize=256)
def _mask(shape: str, height: int, width: int, grain: float) -> np.ndarray:
    """The pixels that a shape covers in its box, bool [height, width]."""
    y = ((np.arange(height) + 0.5) / height * 2 - 1)[:, None]
    x = ((np.arange(width) + 0.5) / width * 2 - 1)[None]
    inside = {
        "disc": np.hypot(x, y) < 1,
        "flag": _stripes(height, grain)[:, None] & (abs(x) < 1),
        "square": _stripes(width, grain)[None] & (abs(y) < 1),
        "cross": abs(abs(x) - abs(y)) < 0.4,
        "triangle": abs(x) < (y + 1) / 2,
    }
    return inside[shape]


def _stripes(length: int, grain: float) -> np.ndarray:
    return (np.arange(length) + 0.5) / grain % 1 < 0.6


def draw_samples(path: str, size: int = 96, rows: int = 3) -> None:
    """Draw some scenes of every class. `python -m attendless.data.scenes docs/scenes.png`"""
    from matplotlib.figure import Figure

    found: dict[int, list[np.ndarray]] = {label: [] for label in range(len(COLOURS))}
    index = 0
    while any(len(pictures) < rows for pictures in found.values()):
        pixels, label = scene(SceneOptions(size=size), 0, index)
        found[label].append(pixels)
        index += 1
    figure = Figure(figsize=(len(COLOURS) * 1.1, rows * 1.1 + 0.3), layout="constrained")
    for label, axes in enumerate(figure.subplots(rows, len(COLOURS)).T):
        axes[0].set_title(f"{label} step{'s' * (label != 1)}", fontsize=9)
        for axis, pixels in zip(axes, found[label], strict=False):
            axis.imshow(pixels, interpolation="nearest")
            axis.set_axis_off()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    import sys

    draw_samples(sys.argv[1])
