"""Data sets that are not image folders: CIFAR's binary files, and torchvision's data sets by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError, unknown
from .scenes import Scenes
from .source import Split

_PIXELS = 3 * 32 * 32
#: torchvision's data sets whose items are an image and one class.
TORCHVISION = (
    *("CIFAR10", "CIFAR100", "Caltech101", "Caltech256", "Country211", "DTD", "EMNIST", "EuroSAT", "FER2013"),
    *("FGVCAircraft", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "ImageNet", "Imagenette", "KMNIST", "MNIST"),
    *(
        "OxfordIIITPet",
        "PCAM",
        "Places365",
        "QMNIST",
        "RenderedSST2",
        "STL10",
        "SUN397",
        "SVHN",
        "StanfordCars",
        "USPS",
    ),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Cifar:
    """CIFAR's binary version: rows of one label (CIFAR-100: two, the second counts) and 3 × 32 × 32 bytes."""

    rows: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def open(cls, root: Path, split: Split) -> Cifar:
        hundred = (root / "train.bin").is_file()
        train = (
            ["train.bin"] if hundred else sorted(p.name for p in root.glob("data_batch_*.bin")) or ["data_batch_1.bin"]
        )
        files = train if split == "train" else ["test.bin" if hundred else "test_batch.bin"]
        width = _PIXELS + (2 if hundred else 1)
        parts = []
        for name in files:
            if not (root / name).is_file():
                raise UserError(f"{str(root)!r} looks like CIFAR's binary version, but {name} is missing")
            content = np.fromfile(root / name, dtype=np.uint8)
            if not content.size or content.size % width:
                raise UserError(f"{str(root / name)!r} is damaged: expected rows of {width} bytes, got {content.size}")
            parts.append(content.reshape(-1, width)[:, width - _PIXELS - 1 :])
        rows = np.concatenate(parts)
        names = root / ("fine_label_names.txt" if hundred else "batches.meta.txt")
        count = 100 if hundred else 10
        classes = names.read_text(errors="replace").split() if names.is_file() else []
        if len(classes) != count:
            classes = [str(i) for i in range(count)]
        if rows[:, 0].max() >= count:
            raise UserError(f"{str(root)!r} contains label {rows[:, 0].max()}: CIFAR-{count} has labels below {count}")
        return cls(rows, tuple(classes))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        row = self.rows[index]
        return Image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0).copy()), int(row[0])

    def name(self, index: int) -> str:
        return f"row {index}"


def is_cifar(root: Path) -> bool:
    return (root / "test_batch.bin").is_file() or ((root / "test.bin").is_file() and (root / "train.bin").is_file())


@dataclasses.dataclass(frozen=True, eq=False)
class Torchvision:
    """A torchvision classification data set as a `Source`."""

    inner: Any
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.inner[index]
        return image.convert("RGB"), int(label)

    def name(self, index: int) -> str:
        return f"{type(self.inner).__name__} {index}"


def open_named(text: str, split: Split) -> Any:
    """`scenes`, `scenes:size=64`, or a torchvision data set as NAME@DIR; raises `UserError` otherwise."""
    if re.fullmatch(r"scenes(:.*)?", text):
        return Scenes.open(text, split)
    name, at, folder = text.partition("@")
    if not at:
        raise UserError(
            f"--data {text!r} is neither a folder nor a data set. Give a folder of images, `scenes` (included), or "
            "a torchvision data set as NAME@DIR, such as CIFAR10@data"
        )
    return _open_torchvision(name, Path(folder).expanduser(), split)


def _open_torchvision(name: str, root: Path, split: Split) -> Torchvision:
    from torchvision import datasets

    kinds = {n.lower(): n for n in TORCHVISION if hasattr(datasets, n)}
    if name.lower() not in kinds:
        raise unknown("torchvision data set", name, kinds.values())
    kind = getattr(datasets, kinds[name.lower()])
    parameters = inspect.signature(kind).parameters
    if "train" in parameters:
        attempts: Sequence[dict[str, Any]] = [{"train": split == "train"}]
    elif "split" in parameters:
        attempts = [{"split": s} for s in (("train", "trainval") if split == "train" else ("val", "test"))]
    else:
        attempts = [{}]
    problem: Exception | None = None
    for arguments in attempts:
        try:
            inner = kind(root=str(root), **arguments)
            labels = getattr(inner, "classes", None) or sorted({int(inner[i][1]) for i in range(len(inner))})
            return Torchvision(inner, tuple(map(str, labels)))
        except Exception as error:  # data sets raise different errors if files are missing or damaged
            problem = problem or error
    raise UserError(f"torchvision's {kind.__name__} cannot be read from {str(root)!r}: {problem}")
