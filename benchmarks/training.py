"""Overhead of the training loop, against a minimal loop with the same model and the same data loader.

    python benchmarks/training.py DATA [--model deit_tiny_patch16_224] [--size 160] [--batch 16] [--steps 30]
                                  [--workers 0] [--threads T] [--json F]

DATA is a folder of images with class folders. Steps of the two loops alternate in one process. `ours` is the loop of
`attendless train` with its divergence checks, gradient norm, metrics, schedule and checkpoints. `bare` is a minimal
loop: next batch, forward pass, backward pass, optimizer step.

The benchmark prints the throughput of both loops, the median of paired ratios with quartiles (1 means no overhead), and
the time to decode an image, to read it from the cache, and to augment it. The exit code is 1 if the ratio is < 0.97.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

from attendless.data import open_data
from attendless.data.cache import cached
from attendless.randomness import randomness
from attendless.stamp import stamp, stamp_line
from attendless.train import Run
from attendless.train import loop as loops
from attendless.train.augment import train_transform
from attendless.train.loader import Prepared, Steps, train_loader
from attendless.train.recipe import recipe
from attendless.train.training import train
from attendless_cli.output import write_json

GOAL, WARMUP = 0.97, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder of images with class folders")
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    source = open_data(args.data, "train")

    def build() -> nn.Module:
        torch.manual_seed(0)
        return timm.create_model(args.model, num_classes=len(source.classes), img_size=args.size)

    ours, bare = alternate(args, source, build)
    ratios = sorted(b / a for a, b in zip(ours, bare, strict=True))
    low, median, high = (ratios[len(ratios) * q // 4] for q in (1, 2, 3))
    speed = {name: args.batch / statistics.median(times) for name, times in (("ours", ours), ("bare", bare))}
    found = stamp()
    print(f"{args.model} at {args.size} px, batch {args.batch}, {len(ratios)} pairs of steps")
    print(f"images/s: ours {speed['ours']:.2f}, bare {speed['bare']:.2f}")
    print(f"ours / bare: {median:.3f} (quartiles {low:.3f} to {high:.3f}); goal at least {GOAL}")
    costs = image_costs(source, args.size)
    print("ms per image: " + ", ".join(f"{name} {1000 * cost:.2f}" for name, cost in costs.items()))
    print(stamp_line(found))
    row = {"model": args.model, "size": [args.size] * 2, "batch": args.batch, "steps": len(ratios), **speed}
    row |= {"ratio": median, "spread": [low, high], "image_seconds": costs}
    write_json(args.json, {"rows": [row]})
    return 0 if median >= GOAL else 1


def alternate(args: Any, source: Any, build: Callable[[], nn.Module]) -> tuple[list[float], list[float]]:
    """Seconds of each step of our loop, and of the bare step before it."""
    settings = dataclasses.replace(recipe("quick"), batch=args.batch, size=(args.size,), epochs=1)
    model = build().train()
    optimizer = create_optimizer_v2(model, "adamw", lr=settings.lr, weight_decay=settings.weight_decay)
    config = timm.data.resolve_model_data_config(model)
    transform = train_transform(settings, (args.size, args.size), config["mean"], config["std"])
    steps = Steps(len(source), args.batch, 0, len(source) // args.batch)
    batches = iter(train_loader(Prepared(source, transform, stand_in=True), steps, args.workers))

    def bare_step() -> None:
        images, labels, _ = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels, label_smoothing=settings.smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()

    ours: list[float] = []
    bare: list[float] = []

    class Timed(loops.PhaseLoop):
        """Our loop with a bare step before each of its own; all other time between two steps counts as ours."""

        began = 0.0

        def _step(self, batches: Any, stop: Any) -> Any:
            now = time.perf_counter()
            if self.began:
                ours.append(now - self.began)
            if len(ours) == WARMUP + args.steps:
                stop.asked = True
            now = time.perf_counter()
            bare_step()
            bare.append(time.perf_counter() - now)
            self.began = time.perf_counter()
            return super()._step(batches, stop)

    with mock.patch.object(loops, "PhaseLoop", Timed), tempfile.TemporaryDirectory() as out:
        train(build(), args.data, recipe=settings, out=out, run=Run(workers=args.workers))
    return ours[WARMUP:], bare[WARMUP : len(ours)]


def image_costs(source: Any, size: int, count: int = 200) -> dict[str, float]:
    """Median seconds to decode one image, to read it from the cache, and to augment it with two recipes."""
    some = source.subset(range(0, len(source), max(1, len(source) // count)))
    mean = std = (0.5, 0.5, 0.5)

    def median(work: Callable[[int], Any]) -> float:
        times = []
        for index in range(len(some)):
            began = time.perf_counter()
            work(index)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    with tempfile.TemporaryDirectory() as folder:
        ready = cached(some, Path(folder))
        costs = {"decode": median(lambda i: some[i]), "from the cache": median(lambda i: ready[i])}
        for name in ("quick", "deit"):
            transform = train_transform(recipe(name), (size, size), mean, std)

            def prepare(index: int, transform: Callable[[Any], Any] = transform) -> None:
                image = ready[index][0]
                with randomness(index):
                    transform(image)

            costs[f"cache and augment ({name})"] = median(prepare)
    return costs


if __name__ == "__main__":
    sys.exit(main())
