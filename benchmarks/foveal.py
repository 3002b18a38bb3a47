"""Accuracy and latency of foveal attention for several specs; the defaults of `auto` are chosen from this trade-off.

    python benchmarks/foveal.py --weights deit.safetensors --data imagenet/val [--sizes 224 384 …] [--images 500]
                                [--specs foveal:keep=0.1,cell=4,tile=4 …] [--only closeness | time] [--json F]

Each spec replaces the attention in every layer of a pretrained model (`--model`, by default DeiT-Tiny), without
training. Every other image serves to choose defaults, the rest to report results. Columns:

    divergence_chosen_by       KL divergence of the predictions from those of full attention, on images to choose by
    divergence                 the same on images to report; so are the next two
    agreement, points          top-1 agreement, and change of top-1 accuracy in percentage points
    ms, speedup                latency of the whole model, and speed-up over timm's: batch 1, one thread, interleaved
    kernel_ms, kernel_speedup  the same for selection and attention alone, against PyTorch's fused full attention

Latency is CPU time of the thread, because other processes disturb it least. A run takes minutes at 384 px and longer at
larger sizes. `--only closeness` measures predictions alone, `--only time` latency alone.
"""

from __future__ import annotations

import argparse
import math
import time as clock
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attendless import Grid, convert, create
from attendless.convert.source import open_model
from attendless.data.labels import match_labels
from attendless.data.opening import open_data
from attendless.measure.accuracy import preprocessing
from attendless.sparse import operations
from attendless.stamp import stamp, stamp_line
from attendless_cli.output import write_json

SPECS = [
    f"foveal:keep={keep},{sides},order={order}"
    for sides in ("cell=2,tile=1", "cell=2,tile=2", "cell=2,tile=4", "cell=3,tile=3", "cell=4,tile=4")
    for keep in (0.1, 0.05)
    for order in (0, 1)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, help="labelled images, one folder per class")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 384, 512, 768])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--only", choices=["closeness", "time"])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of timing per spec")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = stamp()
    print(stamp_line(machine), flush=True)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        full = open_model(options.model, weights=options.weights, size=size).eval()
        found: dict[str, dict[str, Any]] = {spec: {"size": size, "spec": spec} for spec in options.specs}
        if options.only != "time":
            closeness(full, size, options, found)
        if options.only != "closeness":
            time(full, size, options, found)
        rows += found.values()
        print(table(list(found.values())), flush=True)
    write_json(options.json, {"machine": machine, "images": options.images, "rows": rows})


def sparse(full: nn.Module, spec: str) -> nn.Module:
    return convert(full, spec, below_breakeven="keep").eval()


# Closeness -----------------------------------------------------------------------------------------------------------


def closeness(full: nn.Module, size: int, options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    images, labels = load(full, size, options.data, options.images)
    original = logits(full, images)
    for spec, row in found.items():
        row |= compare(original, logits(sparse(full, spec), images), labels)
        print(f"{size} px {spec} {row}", flush=True)


def load(full: nn.Module, size: int, data: str, count: int) -> tuple[Tensor, Tensor]:
    """`count` evenly spaced images of the data, and their classes."""
    source, prepare = open_data(data), preprocessing(full, (size, size), None)
    classes = match_labels(source.classes, full).classes
    pairs = [source[i * len(source) // count] for i in range(count)]
    return torch.stack([prepare(image).half() for image, _ in pairs]), torch.tensor([classes[c] for _, c in pairs])


@torch.inference_mode()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(some.float()) for some in images.split(10)])


def compare(original: Tensor, ours: Tensor, labels: Tensor) -> dict[str, float]:
    divergence = (original.softmax(1) * (original.log_softmax(1) - ours.log_softmax(1))).sum(1)
    best, found = original.argmax(1), ours.argmax(1)
    points = (found == labels).float() - (best == labels).float()
    report = slice(1, None, 2)
    return {
        "divergence_chosen_by": divergence[::2].mean().item(),
        "divergence": divergence[report].mean().item(),
        "agreement": (best == found)[report].float().mean().item(),
        "points": 100 * points[report].mean().item(),
        "points_of_all": 100 * points.mean().item(),
        "agreement_of_all": (best == found).float().mean().item(),
    }


# Time ----------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def time(full: nn.Module, size: int, options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))

    def model(one: nn.Module) -> Callable[[], object]:
        return lambda: one(image)

    models = {"full": model(full)} | {spec: model(sparse(full, spec)) for spec in found}
    kernels = {"full": kernel(full, "full")} | {spec: kernel(full, spec) for spec in found}
    for prefix, calls in (("", models), ("kernel_", kernels)):
        seconds = interleaved(calls, options.budget * len(calls))
        print(f"{size} px, {prefix}full: {1e3 * median(seconds['full']):.2f} ms", flush=True)
        for spec, row in found.items():
            ratios = [a / b for a, b in zip(seconds["full"], seconds[spec], strict=True)]
            row |= {f"{prefix}ms": 1e3 * median(seconds[spec]), f"{prefix}speedup": median(ratios)}
            row[f"{prefix}quartiles"] = quantiles(ratios, n=4)[::2]


def kernel(full: Any, spec: str) -> Callable[[], object]:
    """A call of the attention of one layer, selection included, on random q, k and v of the layer's shape."""
    attention = full.blocks[0].attn
    heads, width = attention.num_heads, attention.head_dim
    grid = Grid(*full.patch_embed.grid_size, full.num_prefix_tokens)
    q, k, v = torch.randn(1, grid.tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    scale = 1 / math.sqrt(width)
    if spec == "full":
        return lambda: F.scaled_dot_product_attention(q, k, v, scale=scale)
    layout = create(spec, heads * width, heads, grid=grid).layout(grid)
    return lambda: operations.foveal(q, k, v, layout, scale=scale)


def interleaved(calls: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """CPU seconds of each call, interleaved until the budget is spent; at least five of each."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    while sum(map(sum, seconds.values())) < budget or len(seconds["full"]) < 5:
        for name, call in calls.items():
            start = clock.thread_time()
            call()
            seconds[name].append(clock.thread_time() - start)
    return seconds


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/results/foveal.md, sorted by divergence."""
    kinds = {"divergence_chosen_by": ".4f", "divergence": ".4f", "agreement": ".3f", "points": "+.1f"}
    kinds |= {"ms": ".1f", "speedup": ".2f", "kernel_ms": ".2f", "kernel_speedup": ".2f"}
    names = ["size", "spec", *(name for name in kinds if name in rows[0])]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: row.get("divergence", 0)):
        lines.append("| " + " | ".join(format(row[name], kinds.get(name, "")) for name in names) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
