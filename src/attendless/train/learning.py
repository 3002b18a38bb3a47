"""What decides how any run learns, whatever its task: how long, how much at a time, by which optimiser."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..errors import UserError
from ..options import Form, Options, option
from ..sizes import parse_size, size_text


def _read_size(text: str) -> tuple[int, ...]:
    height, width = parse_size(text)
    return (height,) if height == width else (height, width)


def _write_size(size: tuple[int, ...]) -> str:
    return size_text((size[0], size[-1]))


#: Image sizes are written as everywhere: S or HxW.
SIZE = Form("S or HxW", _read_size, _write_size)


@dataclasses.dataclass(frozen=True)
class Learning(Options):
    # How long, how much at a time
    epochs: int = option(300, "passes over the data, warm-up included", low=0)
    cooldown: int = option(0, "more epochs at the lowest rate", low=0)
    batch: int = option(1024, "images per optimiser step, over all processes", low=1)
    accumulate: int = option(1, "forward passes a step is split into, to save memory", low=1)
    size: tuple[int, ...] = option((), "image size in pixels, S or HxW (empty: the model's own)", low=1, form=SIZE)
    seed: int = option(0, "the seed of every draw", low=0)
    # Optimiser
    optimizer: str = option("adamw", "any optimiser of timm")
    lr: float = option(5e-4, "highest learning rate", low=0)
    lr_batch: int = option(0, "the batch lr is meant for: lr grows with batch / lr_batch (0: lr as it is)", low=0)
    schedule: Literal["cosine", "plateau", "constant"] = option("cosine", "how the learning rate falls")
    warmup: float = option(0.0, "epochs of rising learning rate", low=0)
    warmup_lr: float = option(1e-6, "learning rate to start from", low=0)
    min_lr: float = option(1e-5, "lowest learning rate", low=0)
    patience: int = option(10, "plateau: epochs without a lower validation loss before lr is divided by 10", low=0)
    weight_decay: float = option(0.05, "weight decay; biases and norms have none", low=0)
    betas: tuple[float, ...] = option((0.9, 0.999), "Adam's decay rates", low=0, high=1)
    eps: float = option(1e-8, "Adam's epsilon", low=0)
    clip: float = option(0.0, "clip the gradient's norm to this (0: never)", low=0)
    backbone_lr: float = option(1.0, "learning rate factor of all but token reducers and predictors", low=0, high=1)
    layer_decay: float = option(1.0, "learning rate factor per layer, from the head downwards", low=0, high=1)
    ema: float = option(0.0, "decay of averaged weights, which are then evaluated and saved", low=0, high=1)
    # Regularisation
    drop: float = option(0.0, "dropout", low=0, high=1)
    drop_path: float = option(0.0, "stochastic depth", low=0, high=1)
    reduce: tuple[float, ...] = option((), "epochs between which token reduction sets in, FIRST/LAST", low=0)
    flip: float = option(0.5, "share of pictures mirrored", low=0, high=1)
    repeats: int = option(1, "times a picture appears in an epoch, each differently augmented", low=1)
    # Arithmetic
    precision: Literal["fp32", "bf16"] = option("fp32", "bf16: autocast the forward pass")
    compile: bool = option(False, "torch.compile the forward pass")
    eval_every: int = option(1, "epochs between evaluations", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.size) > 2:
            raise UserError(f"size={self.size}: expected S or HxW")
        if len(self.betas) != 2:
            raise UserError("betas takes two numbers, such as 0.9/0.999")
        if len(self.reduce) not in (0, 2) or (self.reduce and self.reduce[0] > self.reduce[1]):
            raise UserError(f"reduce={self.reduce}: expected two epochs, the first and the last, such as 10/100")

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.cooldown

    @property
    def height_width(self) -> tuple[int, int] | None:
        """The image size, or None for the model's own."""
        return (self.size[0], self.size[-1]) if self.size else None

    def rate(self) -> float:
        return self.lr * self.batch / self.lr_batch if self.lr_batch else self.lr

    def falling(self, per_epoch: int) -> int:
        """Steps over which the learning rate falls."""
        return self.epochs * per_epoch

    def rising(self, per_epoch: int) -> int:
        """Steps over which it rises first."""
        return round(self.warmup * per_epoch)

    def steps(self, per_epoch: int) -> int:
        """Steps in all."""
        return self.total_epochs * per_epoch
