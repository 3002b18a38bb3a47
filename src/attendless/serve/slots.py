"""Memory that the server shares with its workers: slots for images and for predictions.

Only slot numbers go through a pipe. The server reads a prediction after its worker has reported it complete, so it
never reads what a killed worker left half written.
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
    """Number of slots, shape of an image [H, W, C] in bytes, and length of a prediction in numbers."""

    count: int
    picture: tuple[int, int, int]
    numbers: int

    @property
    def picture_bytes(self) -> int:
        # Predictions come first, because they need alignment; images are bytes.
        return self.count * int(np.prod(self.picture))

    @property
    def answer_bytes(self) -> int:
        return self.count * self.numbers * 4


#: Shared memory of Linux; containers often limit it.
PLACE = Path("/dev/shm")


class Slots:
    """The slots as tensors over the same memory in every process. The process that created them removes them."""

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
        del self.answers, self.pictures  # memory with live views cannot be closed
        self.memory.close()
        if self.made:
            self.memory.unlink()


def _check_room(size: int) -> None:
    """Raise if there is too little shared memory: writing beyond the limit would kill the process without a message."""
    free = shutil.disk_usage(PLACE).free if PLACE.is_dir() else size
    if free < size:
        raise UserError(
            f"{size / 1e6:.0f} MB of shared memory are needed, but {PLACE} has {free / 1e6:.0f}: give a smaller "
            "--batch, or more shared memory to the container (docker run --shm-size)"
        )
