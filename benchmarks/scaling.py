"""How many CPU hours do predictions for a million or a billion images take, and what limits the throughput?

    python benchmarks/scaling.py DATA [--model deit_tiny_patch16_224] [--weights F] [--attention full foveal:keep=0.1]
                                 [--size 224 384] [--runtime eager onnx onnx-kernels openvino] [--batch 1 8 32]
                                 [--images 100] [--budget 20] [--json F] [--markdown F]

The benchmark measures the CPU time, with one thread, of decoding an image, of preprocessing it, and of the model at
each batch size. The calls are interleaved. Waiting for a disk or a network is not included. The size of a prediction is
measured in a Parquet shard. The sum of the parts is compared with the CPU time of `predict`.

`Cost` extrapolates from these parts. A Markdown table shows core-hours per million images, core-years per billion, the
number of cores that saturate a network link of 10 Gbit/s, and the maximum speed-up if the model took no time at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attendless
from attendless.data.source import load_image
from attendless.predict import Opening, Predictor, find_pictures, predict
from attendless.predict.shards import write
from attendless.sizes import size_text
from attendless.stamp import stamp, stamp_line
from attendless_cli.arguments import parse_size
from attendless_cli.output import write_json, write_text

LINK = 10e9 / 8  # bytes per second of 10 Gbit/s
ENDINGS = {"onnx": ".onnx", "onnx-kernels": ".onnx", "openvino": ".xml", "pt2": ".pt2"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """CPU milliseconds and bytes per image, and their extrapolation to many images."""

    decode_ms: float
    prepare_ms: float
    forward_ms: float
    image_bytes: float
    prediction_bytes: float

    @property
    def total_ms(self) -> float:
        return self.decode_ms + self.prepare_ms + self.forward_ms

    def as_dict(self) -> dict[str, float]:
        """The fields, and per number of images: core-hours, core-years, cores that saturate the link, terabytes.

        `cap` is the maximum speed-up (Amdahl's law) if the model took no time at all."""
        per_second = 1000 / self.total_ms
        reading = self.decode_ms + self.prepare_ms
        return {
            **dataclasses.asdict(self),
            "images_per_core_second": per_second,
            "core_hours_per_million": 1e6 / per_second / 3600,
            "core_years_per_billion": 1e9 / per_second / 3600 / 24 / 365,
            "cores_on_10_gbit": LINK / (per_second * self.image_bytes),
            "share_of_reading": reading / self.total_ms,
            "cap": self.total_ms / reading,
            "terabytes_read_per_billion": self.image_bytes / 1e3,
            "terabytes_written_per_billion": self.prediction_bytes / 1e3,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder of images")
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights")
    parser.add_argument("--attention", nargs="+", default=["full", "foveal:keep=0.1"])
    parser.add_argument("--size", nargs="+", type=parse_size, default=[(224, 224), (384, 384)])
    parser.add_argument("--runtime", nargs="+", default=["eager", "onnx", "onnx-kernels", "openvino"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing per image size")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = find_pictures([args.data])
    files = tuple(files[i * len(files) // args.images] for i in range(min(args.images, len(files))))
    rows = [row for size in args.size for row in of_size(args, files, size)]
    text = table(rows)
    print(text)
    check = check_sum(args, files, next((row for row in rows if row["runtime"] == "eager"), None))
    if check:
        print(f"\n`predict` took {check['cpu_ms']:.2f} ms of CPU time per image, on {len(files)} files; "
              f"the parts add up to {check['parts_ms']:.2f} ms.")  # fmt: skip
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"Peak memory of this process, which opened {len(rows)} models: {memory:.0f} MB.")
    print(stamp_line(stamp()))
    write_json(args.json, {"rows": rows, "check": check, "peak_memory_mb": memory})
    if args.markdown:
        write_text(args.markdown, f"{text}\n\n{stamp_line(stamp())}\n")
    return 0


def of_size(args: argparse.Namespace, files: Sequence[str], size: tuple[int, int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        models = {
            (attention, runtime): opened(args, size, attention, runtime, Path(folder))
            for attention, runtime in itertools.product(args.attention, args.runtime)
        }
        first = next(iter(models.values()))
        prepare = first.card.preparation()
        images = [load_image(path) for path in files[:16]]
        pixels = torch.from_numpy(np.stack([prepare(image) for image in images]))
        pixels = pixels.repeat(-(-max(args.batch) // len(pixels)), 1, 1, 1)
        pool, number = itertools.cycle(range(len(images))), itertools.cycle(range(len(files)))
        calls: dict[Any, Callable[[], Any]] = {
            "decode": lambda: load_image(files[next(number)]),
            "prepare": lambda: prepare(images[next(pool)]),
        }
        for name, batch in itertools.product(models, args.batch):
            calls[name, batch] = functools.partial(models[name], pixels[:batch])
        times = interleaved(calls, args.budget)
        written = shard_bytes(first, files[:16])
    read = statistics.mean(Path(path).stat().st_size for path in files)
    rows = []
    for (attention, runtime), model in models.items():
        each = {batch: times[(attention, runtime), batch] / batch for batch in args.batch}
        best = min(each, key=lambda batch: each[batch])
        cost = Cost(times["decode"], times["prepare"], each[best], read, written)
        about = {"model": args.model, "attention": model.card.description.attention, "runtime": runtime}
        rows.append(about | {"size": list(size), "best_batch": best, "ms_at_batch": each, **cost.as_dict()})
    return rows


def opened(args: argparse.Namespace, size: tuple[int, int], attention: str, runtime: str, folder: Path) -> Predictor:
    settings = {"weights": args.weights, "size": size, "attention": attention}
    if runtime in ("eager", "compile"):
        return Opening(args.model, **settings, runtime=runtime, threads=1).open()
    out = folder / f"{len(list(folder.iterdir()))}{ENDINGS[runtime]}"
    kernels = True if runtime == "onnx-kernels" else None
    attendless.export(args.model, out, batch=None, kernels=kernels, measure=False, below_breakeven="keep", **settings)
    return Opening(str(out), threads=1).open()


def interleaved(calls: dict[Any, Callable[[], Any]], budget: float) -> dict[Any, float]:
    """CPU milliseconds of each call, interleaved: the mean of decoding, the median of all others."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began = time.perf_counter()
    while time.perf_counter() - began < budget or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            for _ in range(10 if isinstance(name, str) else 1):  # images differ, so more of them are measured
                start = time.process_time()
                call()
                times[name].append(1000 * (time.process_time() - start))
    # The cost of decoding varies with the image: its mean extrapolates to many. The median is robust for repeated work.
    return {name: (statistics.mean if name == "decode" else statistics.median)(taken) for name, taken in times.items()}


def shard_bytes(predictor: Predictor, files: Sequence[str]) -> float:
    """Bytes per prediction in a Parquet shard of many predictions."""
    predictions = [one for part in predict(predictor, files) for one in part] * 64
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "x.parquet"), predictions)
        return Path(folder, "x.parquet").stat().st_size / len(predictions)


def check_sum(args: argparse.Namespace, files: Sequence[str], row: dict[str, Any] | None) -> dict[str, float] | None:
    """CPU milliseconds per image of `predict`, from files to predictions, and the sum of the measured parts."""
    if row is None:
        return None
    settings = {"weights": args.weights, "size": tuple(row["size"]), "attention": args.attention[0]}
    predictor = Opening(args.model, **settings, threads=1).open()
    list(predict(predictor, files[:8], batch=row["best_batch"]))
    start = time.process_time()
    list(predict(predictor, files, batch=row["best_batch"]))
    used = 1000 * (time.process_time() - start) / len(files)
    return {"cpu_ms": used, "parts_ms": row["decode_ms"] + row["prepare_ms"] + row["forward_ms"]}


def table(rows: list[dict[str, Any]]) -> str:
    head = ("attention", "runtime", "size", "batch", "decode ms", "prepare ms", "model ms", "images/s per core",
            "core-hours, 10⁶", "core-years, 10⁹", "cores on 10 Gbit/s", "maximum speed-up")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * 3 + "|--:" * (len(head) - 3) + "|"]
    for row in rows:
        cells = (row["attention"], row["runtime"], size_text(tuple(row["size"])), str(row["best_batch"]),
                 *(f"{row[name]:.2f}" for name in ("decode_ms", "prepare_ms", "forward_ms")),
                 *(f"{row[name]:.1f}" for name in ("images_per_core_second", "core_hours_per_million")),
                 f"{row['core_years_per_billion']:.2f}", f"{row['cores_on_10_gbit']:.0f}",
                 f"{row['cap']:.1f}×")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
