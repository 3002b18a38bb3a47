"""The fields that recipes of every task share: duration, batch, optimiser, regularisation, precision."""

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


#: An image size as text: S or HxW, as on the command line.
SIZE = Form("S or HxW", _read_size, _write_size)


@dataclasses.dataclass(frozen=True)
class Learning(Options):
    # Duration and batch
    epochs: int = option(300, "passes over the data, warm-up included", low=0)
    cooldown: int = option(0, "additional epochs at the lowest learning rate", low=0)
    batch: int = option(1024, "images per optimiser step, over all processes", low=1)
    accumulate: int = option(1, "forward passes per optimiser step, to save memory", low=1)
    size: tuple[int, ...] = option((), "image size in pixels, S or HxW (empty: the model's own)", low=1, form=SIZE)
    seed: int = option(0, "seed of every random draw", low=0)
    # Optimiser
    optimizer: str = option("adamw", "any optimiser of timm, by name")
    lr: float = option(5e-4, "highest learning rate", low=0)
    lr_batch: int = option(0, "batch that lr refers to: lr is scaled by batch / lr_batch (0: not scaled)", low=0)
    schedule: Literal["cosine", "plateau", "constant"] = option("cosine", "learning rate schedule")
    warmup: float = option(0.0, "epochs of linear warm-up", low=0)
    warmup_lr: float = option(1e-6, "learning rate at the start of the warm-up", low=0)
    min_lr: float = option(1e-5, "lowest learning rate", low=0)
    patience: int = option(
        10, "plateau: epochs without improvement of the validation loss before lr is divided by 10", low=0
    )
    weight_decay: float = option(0.05, "weight decay; biases and norms are exempt", low=0)
    betas: tuple[float, ...] = option((0.9, 0.999), "Adam's decay rates", low=0, high=1)
    eps: float = option(1e-8, "Adam's epsilon", low=0)
    clip: float = option(0.0, "largest norm of the gradient (0: no clipping)", low=0)
    backbone_lr: float = option(
        1.0, "learning rate factor of all parameters except token reducers and predictors", low=0, high=1
    )
    layer_decay: float = option(1.0, "learning rate factor per layer, from the head downwards", low=0, high=1)
    ema: float = option(
        0.0, "decay of the exponential moving average, which is then evaluated and saved (0: none)", low=0, high=1
    )
    # Regularisation
    drop: float = option(0.0, "dropout", low=0, high=1)
    drop_path: float = option(0.0, "stochastic depth", low=0, high=1)
    reduce: tuple[float, ...] = option(
        (), "epochs between which token reduction is introduced, FIRST/LAST (empty: from the start)", low=0
    )
    flip: float = option(0.5, "probability of a horizontal flip", low=0, high=1)
    repeats: int = option(1, "repeated augmentation: times that an image appears in an epoch", low=1)
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
        """Steps over which the learning rate decays."""
        return self.epochs * per_epoch

    def rising(self, per_epoch: int) -> int:
        """Steps of warm-up."""
        return round(self.warmup * per_epoch)

    def steps(self, per_epoch: int) -> int:
        """Steps in total."""
        return self.total_epochs * per_epoch
