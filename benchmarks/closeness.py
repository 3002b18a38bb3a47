"""How close are the features of `foveal` to those of full attention, layer by layer, on large photographs?

    python benchmarks/closeness.py WEIGHTS SAM2 DATA [--sizes 1024 2048] [--attention SPEC …] [--images 2] [--out FILE]

WEIGHTS is a file with DeiT-Tiny's weights, SAM2 the output folder of examples/sam2_weights.py, DATA a folder of
photographs; labels are not needed. For each layer, the benchmark reports the cosine similarity and the relative
difference of the layer's output tokens. Both include the errors of earlier layers. Results that are already in FILE are
not measured again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from quoting import quote
from study import MODEL, Rows, table
from torch import Tensor

import attendless
from attendless.measure.accuracy import preprocessing
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
SPECS = ("foveal:keep=0.1", "foveal:keep=0.1,cell=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("sam2", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--attention", nargs="+", default=SPECS)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "closeness.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.sizes:
        for name in ("DeiT-Tiny", "SAM 2 Hiera-Tiny"):
            measure(name, size, args, Rows(args.out))
    quote(ROOT / "docs" / "results" / "sam2.md", "closeness", block(Rows(args.out)))


def opened(name: str, size: int, args: argparse.Namespace) -> Any:
    if name == "DeiT-Tiny":
        return attendless.open_model(MODEL, weights=args.weights, size=size)
    sys.path.insert(0, str(ROOT / "examples"))
    import sam2_masks  # noqa: F401 (registers the model)

    return attendless.open_model("sam2_tiny_encoder", weights=args.sam2 / "encoder.safetensors").trunk


@torch.inference_mode()
def measure(name: str, size: int, args: argparse.Namespace, rows: Rows) -> None:
    files = sorted(args.data.iterdir())
    for file in files[:: len(files) // args.images][: args.images]:
        todo = [spec for spec in args.attention if f"{name} {size} {spec} {file.name}" not in rows]
        if not todo:
            continue
        model = opened(name, size, args)
        x = preprocessing(model, (size, size), 1.0)(Image.open(file).convert("RGB"))[None]
        original = tokens(model, x)
        for spec in todo:
            attendless.patch(model, spec, size=size)
            layers = [closeness(*pair) for pair in zip(tokens(model, x), original, strict=True)]
            attendless.unpatch(model)
            rows.keep({f"{name} {size} {spec} {file.name}": layers})
            print(name, size, spec, file.name, *(f"{cosine:.4f}" for cosine, _ in layers), flush=True)


def tokens(model: Any, x: Tensor) -> list[Tensor]:
    """The output tokens of each block."""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, given, out: found.append(out)) for block in model.blocks]
    model.forward_features(x)
    for hook in hooks:
        hook.remove()
    return found


def closeness(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean cosine similarity of tokens [..., C], and their relative difference ‖ours − theirs‖ / ‖theirs‖."""
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean()
    return float(cosine), float((ours - theirs).norm() / theirs.norm())


def block(found: dict[str, Any]) -> str:
    """The table of the page, in Markdown: one line per model, size and attention, averaged over images."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for key, layers in found.items():
        if key != "stamp":
            name, size, spec, _ = key.rsplit(" ", 3)
            groups.setdefault((name, size, spec), []).append(layers)
    lines = []
    for (name, size, spec), images in sorted(groups.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        values = np.array(images)  # [images, layers, 2]
        cosines = [f"{values[:, i, 0].mean():.4f}" for i in (values.shape[1] // 2 - 1, values.shape[1] - 1)]
        worst = f"{values[:, :, 0].mean(0).min():.4f} (layer {values[:, :, 0].mean(0).argmin()})"
        last = f"{100 * values[:, -1, 1].mean():.1f} %"
        lines.append([name, size, f"`{spec}`", str(len(images)), *cosines, worst, last])
    columns = ["model", "px", "attention", "images", "middle layer", "last layer", "lowest", "last layer differs by"]
    return f"{table(columns, lines)}\n\nCosine similarity, fp32. {stamp_line(found['stamp'])}"


if __name__ == "__main__":
    main()
