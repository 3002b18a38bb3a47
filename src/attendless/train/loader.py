"""From images to batches: the order of an epoch, each process's share of a step, and prefetching.

A draw is (epoch, index, copy): an image, and which of its augmentations. The sampler makes the draws, so a loader that
starts at step 1000 yields the same batches as one that started at step 0, with any number of workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.source import IGNORE, BadImage, Source
from ..errors import UserError
from ..randomness import ORDER, PICTURE, key, randomness
from .process import ignore_interrupts

Draw = tuple[int, int, int]
#: Pixels [3, h, w], the target, and the index of an image that could not be read (or IGNORE).
Item = tuple[Tensor, Any, int]


@dataclasses.dataclass(frozen=True)
class Prepared(Dataset[Item]):
    """A source with a transform. In training, the next readable image replaces one that cannot be read."""

    source: Source
    transform: Callable[[Any], Tensor]
    seed: int = 0
    stand_in: bool = False

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Item:
        epoch, index, copy = draw
        bad = IGNORE
        for offset in range(len(self.source) if self.stand_in else 1):
            taken = (index + offset) % len(self.source)
            try:
                image, label = self.source[taken]
            except BadImage:
                bad = index
                continue
            with randomness(PICTURE, self.seed, epoch, taken, copy):
                return *self.prepare(image, label), bad
        if self.stand_in:
            raise UserError("no image of the training data can be read")
        return torch.empty(0), IGNORE, bad

    def prepare(self, image: Any, label: Any) -> tuple[Tensor, Any]:
        """An image and its target, transformed for the model."""
        return self.transform(image), label

    def stack(self, images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[Tensor, Any]:
        """Several images and targets as one batch."""
        return torch.stack(list(images)), torch.tensor(labels, dtype=torch.long)

    def collate(self, items: Sequence[Item]) -> tuple[Tensor | None, Any, Tensor]:
        """A batch of the readable images, and the indices of the others."""
        bad = torch.tensor([item[2] for item in items if item[2] != IGNORE], dtype=torch.long)
        good = items if self.stand_in else [item for item in items if item[2] == IGNORE]
        if not good:
            return None, torch.empty(0, dtype=torch.long), bad
        return *self.stack([item[0] for item in good], [item[1] for item in good]), bad


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> list[Draw]:
    """The draws of one epoch: every image once, or a part of them `repeats` times."""
    order = np.random.Generator(np.random.PCG64(key(ORDER, seed, epoch))).permutation(count)
    return [(epoch, int(order[i // repeats]), i % repeats) for i in range(count)]


def shares(batch: int, parts: int) -> list[list[int]]:
    """Split positions 0 … batch-1 into equal parts, keeping i and batch-1-i together: mixup mixes such pairs."""
    if batch % parts:
        raise UserError(f"batch {batch} does not divide into {parts} equal parts (processes × accumulate)")
    pairs = [p for i in range((batch + 1) // 2) for p in dict.fromkeys((i, batch - 1 - i))]
    size = batch // parts
    return [sorted(pairs[part * size : (part + 1) * size]) for part in range(parts)]


@dataclasses.dataclass(frozen=True)
class Steps:
    """This process's batches from step `start` to step `stop`, `accumulate` to each step."""

    count: int
    batch: int
    start: int
    stop: int
    seed: int = 0
    repeats: int = 1
    accumulate: int = 1
    rank: int = 0
    processes: int = 1
    #: Epochs that earlier phases of the run have used up.
    first_epoch: int = 0

    @property
    def per_epoch(self) -> int:
        return steps_per_epoch(self.count, self.batch)

    def __len__(self) -> int:
        return (self.stop - self.start) * self.accumulate

    def __iter__(self) -> Iterator[list[Draw]]:
        parts = shares(self.batch, self.processes * self.accumulate)
        mine = parts[self.rank * self.accumulate : (self.rank + 1) * self.accumulate]
        epoch, order = -1, list[Draw]()
        for step in range(self.start, self.stop):
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                order = epoch_order(self.count, self.seed, self.first_epoch + epoch, self.repeats)
            first = step % self.per_epoch * self.batch
            for part in mine:
                yield [order[first + position] for position in part]


def steps_per_epoch(count: int, batch: int) -> int:
    """Complete batches in `count` images; the remainder of an epoch is dropped."""
    if batch > count:
        raise UserError(f"batch {batch} is larger than the training data ({count} images): give a smaller --batch")
    return count // batch


def train_loader(data: Prepared, steps: Steps, workers: int) -> DataLoader[Any]:
    return _loader(data, steps, workers)


def eval_loader(data: Prepared, batch: int, workers: int, rank: int = 0, processes: int = 1) -> DataLoader[Any]:
    """Every image exactly once over all processes; batches leave out images that cannot be read."""
    mine = [(0, index, 0) for index in range(rank, len(data), processes)]
    return _loader(data, [mine[i : i + batch] for i in range(0, len(mine), batch)], workers)


def _loader(data: Prepared, batches: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=data.collate,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=ignore_interrupts,
    )
