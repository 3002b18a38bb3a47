"""What do a million and a billion pictures cost, and what limits it? Measured in parts, and added up.

    python benchmarks/scaling.py DATA [--model deit_tiny_patch16_224] [--weights F] [--attention full foveal:keep=0.1]
                                 [--size 224 384] [--runtime eager onnx onnx-kernels openvino] [--batch 1 8 32]
                                 [--images 100] [--budget 20] [--json F] [--markdown F]

With one thread, in processor time: what a picture costs to decode and to prepare, and what the model costs at each
batch; the contestants take turns and the median counts. Waiting for a disk or a network is not in it. An answer's bytes
are those of a Parquet shard written here. The sum is checked against `predict` itself. From there it is arithmetic
(`Cost`), printed as a Markdown table: core-hours for a million pictures, core-years for a billion, how many cores empty
a network link of 10 Gbit/s, and how much faster it could be if the model took no time at all.
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
    """What one picture costs a core, in milliseconds, and what follows for many."""

    decode_ms: float
    prepare_ms: float
    forward_ms: float
    picture_bytes: float
    answer_bytes: float

    @property
    def total_ms(self) -> float:
        return self.decode_ms + self.prepare_ms + self.forward_ms

    def as_dict(self) -> dict[str, float]:
        """Core-hours of a million, core-years of a billion, cores that empty the link, and the cap on what a quicker
        model can bring."""
        per_second = 1000 / self.total_ms
        reading = self.decode_ms + self.prepare_ms
        return {
            **dataclasses.asdict(self),
            "images_per_core_second": per_second,
            "core_hours_per_million": 1e6 / per_second / 3600,
            "core_years_per_billion": 1e9 / per_second / 3600 / 24 / 365,
            "cores_on_10_gbit": LINK / (per_second * self.picture_bytes),
            "share_of_reading": reading / self.total_ms,
            "cap": self.total_ms / reading,
            "terabytes_read_per_billion": self.picture_bytes / 1e3,
            "terabytes_written_per_billion": self.answer_bytes / 1e3,
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
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing for each size")
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
        print(f"\n`predict`, from {len(files)} files to answers, took {check['cpu_ms']:.2f} ms of processor time each; "
              f"the parts add up to {check['parts_ms']:.2f} ms.")  # fmt: skip
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"This process, with {len(rows)} models opened one after the other, took {memory:.0f} MB at most.")
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
        pictures = [load_image(path) for path in files[:16]]
        pixels = torch.from_numpy(np.stack([prepare(picture) for picture in pictures]))
        pixels = pixels.repeat(-(-max(args.batch) // len(pixels)), 1, 1, 1)
        pool, number = itertools.cycle(range(len(pictures))), itertools.cycle(range(len(files)))
        calls: dict[Any, Callable[[], Any]] = {
            "decode": lambda: load_image(files[next(number)]),
            "prepare": lambda: prepare(pictures[next(pool)]),
        }
        for name, batch in itertools.product(models, args.batch):
            calls[name, batch] = functools.partial(models[name], pixels[:batch])
        times = by_turns(calls, args.budget)
        answer = shard_bytes(first, files[:16])
    read = statistics.mean(Path(path).stat().st_size for path in files)
    rows = []
    for (attention, runtime), model in models.items():
        each = {batch: times[(attention, runtime), batch] / batch for batch in args.batch}
        best = min(each, key=lambda batch: each[batch])
        cost = Cost(times["decode"], times["prepare"], each[best], read, answer)
        about = {"model": args.model, "attention": model.card.description.attention, "runtime": runtime}
        rows.append(about | {"size": list(size), "best_batch": best, "ms_at_batch": each, **cost.as_dict()})
    return rows


def opened(args: argparse.Namespace, size: tuple[int, int], attention: str, runtime: str, folder: Path) -> Predictor:
    asked = {"weights": args.weights, "size": size, "attention": attention}
    if runtime in ("eager", "compile"):
        return Opening(args.model, **asked, runtime=runtime, threads=1).open()
    out = folder / f"{len(list(folder.iterdir()))}{ENDINGS[runtime]}"
    kernels = True if runtime == "onnx-kernels" else None
    attendless.export(args.model, out, batch=None, kernels=kernels, measure=False, below_breakeven="keep", **asked)
    return Opening(str(out), threads=1).open()


def by_turns(calls: dict[Any, Callable[[], Any]], budget: float) -> dict[Any, float]:
    """Milliseconds of processor time of each call, by turns."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began = time.perf_counter()
    while time.perf_counter() - began < budget or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            for _ in range(10 if isinstance(name, str) else 1):  # pictures differ: more of them
                start = time.process_time()
                call()
                times[name].append(1000 * (time.process_time() - start))
    # Decoding's mean is what many pictures cost; of the same work again and again the median is steadier.
    return {name: (statistics.mean if name == "decode" else statistics.median)(taken) for name, taken in times.items()}


def shard_bytes(predictor: Predictor, files: Sequence[str]) -> float:
    """Bytes of an answer in a shard of many."""
    answers = [answer for part in predict(predictor, files) for answer in part] * 64
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "x.parquet"), answers)
        return Path(folder, "x.parquet").stat().st_size / len(answers)


def check_sum(args: argparse.Namespace, files: Sequence[str], row: dict[str, Any] | None) -> dict[str, float] | None:
    """Processor time of `predict` from files to answers, against the sum of the parts."""
    if row is None:
        return None
    asked = {"weights": args.weights, "size": tuple(row["size"]), "attention": args.attention[0]}
    predictor = Opening(args.model, **asked, threads=1).open()
    list(predict(predictor, files[:8], batch=row["best_batch"]))
    start = time.process_time()
    list(predict(predictor, files, batch=row["best_batch"]))
    used = 1000 * (time.process_time() - start) / len(files)
    return {"cpu_ms": used, "parts_ms": row["decode_ms"] + row["prepare_ms"] + row["forward_ms"]}


def table(rows: list[dict[str, Any]]) -> str:
    head = ("attention", "runtime", "size", "batch", "decode ms", "prepare ms", "model ms", "images/s a core",
            "core-hours, 10⁶", "core-years, 10⁹", "cores on 10 Gbit/s", "cap")  # fmt: skip
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
