"""Memory that the server shares with its workers: places for pictures, and for their answers.

Only numbers of places go through a pipe. An answer counts once its worker has said that it is whole, so what a killed
worker left half written is never read.
"""

from __future__ import annotations

import dataclasses
import shutil
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Shape:
    """How many places there are, the size of a picture [H, W, C] in bytes, and how many numbers an answer has."""

    count: int
    picture: tuple[int, int, int]
    numbers: int

    @property
    def picture_bytes(self) -> int:
        # Answers come first and are aligned; pictures behind them are bytes.
        return self.count * int(np.prod(self.picture))

    @property
    def answer_bytes(self) -> int:
        return self.count * self.numbers * 4


#: Where Linux keeps it, and containers give little of it.
PLACE = Path("/dev/shm")


class Slots:
    """The places, as tensors over the same memory in every process. Whoever made them removes them."""

    pictures: Tensor
    answers: Tensor

    def __init__(self, shape: Shape, name: str | None = None) -> None:
        size = shape.answer_bytes + shape.picture_bytes
        self.shape, self.made = shape, name is None
        if self.made:
            _check_room(size)
        self.memory = SharedMemory(name, create=self.made, size=size)
        buffer: Any = self.memory.buf
        whole = np.frombuffer(buffer, dtype=np.uint8, count=size)
        answers, pictures = whole[: shape.answer_bytes], whole[shape.answer_bytes :]
        self.answers = torch.from_numpy(answers.view(np.float32).reshape(shape.count, shape.numbers))
        self.pictures = torch.from_numpy(pictures.reshape(shape.count, *shape.picture))

    @property
    def name(self) -> str:
        return self.memory.name

    def close(self) -> None:
        del self.answers, self.pictures  # memory that someone looks at cannot be closed
        self.memory.close()
        if self.made:
            self.memory.unlink()


def _check_room(size: int) -> None:
    """Raise if there is too little shared memory: whoever wrote beyond it would be killed without a word."""
    free = shutil.disk_usage(PLACE).free if PLACE.is_dir() else size
    if free < size:
        raise UserError(
            f"{size / 1e6:.0f} MB of shared memory are needed and {PLACE} has {free / 1e6:.0f}: give a smaller "
            "--batch, or the container more (docker run --shm-size)"
        )
