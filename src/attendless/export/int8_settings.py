"""How linear layers are quantised, and the images that they are calibrated on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Int8:
    """Settings of the quantisation to int8.

    smooth: how much of the range of activations moves into the weights before quantisation, from 0 to 1 (the alpha of
        SmoothQuant, in OpenVINO). At 0.8, DeiT-Tiny's predictions change less than at NNCF's default of 0.95.
    dynamic: quantise the layers that read an activation function, such as the second layer of an MLP, at run time (in
        OpenVINO). Their inputs have few large values, which a scale from calibration cuts off or resolves badly.
    """

    smooth: float = 0.8
    dynamic: bool = True


class Calibration(Protocol):
    """Batches of images as arrays, to calibrate on. `available` counts the images, `batch` those that a file takes."""

    @property
    def available(self) -> int: ...
    @property
    def batch(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
