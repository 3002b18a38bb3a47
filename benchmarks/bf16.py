"""Does bf16 change a model's predictions? Top-1 accuracy and agreement of bf16 with fp32, per attention and reducer.

    python benchmarks/bf16.py WEIGHTS DATA [--images 1000] [--work FILE] [--publish]

WEIGHTS are DeiT-Tiny's, DATA a folder of labelled ImageNet images. Each variant predicts every image in both
precisions. The compiled kernels compute attention. On CPUs without bf16 instructions, PyTorch's own bf16 products are
several times slower, so linear layers and convolutions compute in fp32 there and round the result. Batches in FILE are
not computed again, so the command resumes where it stopped. `--publish` writes the table of docs/precision.md.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from quoting import publish
from study import MODEL, Rows, against, by_machine, table
from torch import Tensor, nn

import attendless
from attendless.data.labels import match_labels
from attendless.data.opening import open_data
from attendless.measure.accuracy import Pictures, batches, paired_difference, preprocessing
from attendless.measure.precision import no_bf16
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
BATCH = 20
#: Name: image size and arguments of `convert`.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (224, {"attention": "full"}),
    "tome:r=15,start=1,protect=0.1": (224, {"tokens": "tome:r=15,start=1,protect=0.1"}),
    "rank:r=15,start=1": (224, {"tokens": "rank:r=15,start=1"}),
    "sparsifiner:keep=0.1,rest=pooled": (
        224,
        {"attention": "sparsifiner:keep=0.1,rest=pooled", "predictor": "deit_tiny_patch16_224-pooled"},
    ),
    "foveal:keep=0.1": (384, {"attention": "foveal:keep=0.1"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bf16.json", help="predictions of each batch")
    parser.add_argument("--publish", action="store_true", help="write docs/results/bf16.json and docs/precision.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(args.work)
    prepared = {name: Prepared(name, args) for name in VARIANTS}
    for first in range(0, args.images, BATCH):
        for name, variant in prepared.items():
            if f"{name} {first}" not in rows:
                rows.keep({f"{name} {first}": variant.predictions(first)})
                print(name, first, flush=True)
    found = {"stamp": rows["stamp"], "rows": summaries(rows)}
    print(section(found))
    if args.publish:
        publish("bf16", found["stamp"], found)


class Prepared:
    """A variant in both precisions, and the images at its size."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        size, how = VARIANTS[name]
        original = attendless.open_model(MODEL, weights=args.weights, size=size)
        self.wide = attendless.convert(original, size=size, below_breakeven="keep", **how).eval()
        self.low = in_bf16(self.wide)
        transform = preprocessing(original, (size, size), None if size == 224 else 1.0)
        self.pictures = Pictures(open_data(args.data), transform, args.images)
        self.indices = self.pictures.indices
        self.classes = match_labels(self.pictures.source.classes, original).classes

    @torch.inference_mode()
    def predictions(self, first: int) -> list[list[int]]:
        """The classes of a batch of images, the predictions in fp32 and those in bf16."""
        self.pictures.indices = self.indices[first : first + BATCH]
        ((images, labels, _, _),) = batches(self.pictures, BATCH, 0)
        with attendless.execution("native"):
            wide, low = self.wide(images).argmax(1), self.low(images.bfloat16()).argmax(1)
        return [[self.classes[label] for label in labels], wide.tolist(), low.tolist()]


def in_bf16(model: nn.Module) -> nn.Module:
    """A copy in bf16 whose products are added in fp32."""
    low = copy.deepcopy(model).bfloat16()
    for module in low.modules():
        if no_bf16() and isinstance(module, nn.Linear | nn.Conv2d):
            module.float()
            module.forward = widened(type(module).forward.__get__(module))  # type: ignore[method-assign]
    return low


def widened(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x.float()).to(x.dtype)


def summaries(batches: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracy and agreement of each variant, over all batches, in percent."""
    made = []
    for name, (size, _) in VARIANTS.items():
        parts = [row for key, row in batches.items() if key.rsplit(" ", 1)[0] == name]
        truth, wide, low = ([x for part in parts for x in part[i]] for i in range(3))
        right = [[a == b for a, b in zip(truth, predicted, strict=True)] for predicted in (wide, low)]
        difference, interval = paired_difference(right[1], right[0])
        made.append(
            {
                "variant": name,
                "size": size,
                "images": len(truth),
                "fp32": 100 * sum(right[0]) / len(truth),
                "bf16": 100 * sum(right[1]) / len(truth),
                "difference": 100 * difference,
                "difference_ci": [100 * bound for bound in interval],
                "agreement": 100 * sum(a == b for a, b in zip(wide, low, strict=True)) / len(truth),
            }
        )
    return made


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The table of one machine."""
    lines = [
        [
            *(f"`{row['variant']}`", str(row["size"]), f"{row['images']:,}"),
            *(f"{row['fp32']:.1f}", f"{row['bf16']:.1f}", against(row), f"{row['agreement']:.1f} %"),
        ]
        for row in found["rows"]
    ]
    columns = ["variant", "px", "images", "top-1 fp32", "top-1 bf16", "difference (95 % interval)", "top-1 agreement"]
    return f"{table(columns, lines)}\n\nDeiT-Tiny. {stamp_line(found['stamp'])}"


if __name__ == "__main__":
    main()
