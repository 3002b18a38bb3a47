"""A model opened for prediction: a description from which any process opens the same model, and its metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..convert import open_model
from ..convert.source import random_weights
from ..data.names import names_of
from ..data.preprocessing import evaluation_transform
from ..errors import UserError
from ..export.description import Description, describe
from ..export.folder import deployed
from ..export.runner import OPENERS, Runner, open_runner
from ..plugins import load_plugins


@dataclasses.dataclass(frozen=True)
class Card:
    """Metadata of an opened model, for preprocessing images and reading its outputs.

    An output is one row of numbers: `scores` logits, then `features`. `random`: the weights are random.
    """

    description: Description
    runtime: str
    scores: int
    features: int
    random: bool

    def preparation(self) -> Callable[[Image.Image], np.ndarray]:
        """The part of timm's evaluation transform that works on pixels: an image → bytes [H, W, C].

        The predictor scales and normalises whole batches. So the threads that decode images run no PyTorch operations,
        which would start threads of their own.
        """
        config = self.description.data_config()
        steps = evaluation_transform(config, normalize=False).transforms[:-1]
        mode = {1: "L", 3: "RGB"}.get(self.description.channels)
        if mode is None:
            raise UserError(
                f"{self.description.model} takes inputs of {self.description.channels} channels: expected 1 or 3"
            )

        def prepare(picture: Image.Image) -> np.ndarray:
            for step in steps:
                picture = step(picture)
            pixels = np.asarray(picture.convert(mode))
            return pixels.reshape(*pixels.shape[:2], self.description.channels)

        return prepare

    def names(self) -> tuple[str, ...]:
        return names_of(self.description.class_names, self.scores)


@dataclasses.dataclass(frozen=True)
class Opening:
    """A model and its settings in plain values, from which any process on any machine opens the same model.

    Every layer gets the given attention, even where it is slower. Random weights are drawn from a fixed seed. With
    `features`, outputs include the input of the classifier; an exported file returns what it was exported for.
    """

    model: str
    runtime: str | None = None
    weights: str | None = None
    pretrained: bool = False
    size: tuple[int, int] | None = None
    attention: str | None = None
    tokens: str | None = None
    predictor: str | None = None
    readout: bool | None = None
    crop_pct: float | None = None
    precision: str | None = None
    features: bool = False
    threads: int | None = None
    plugins: tuple[str, ...] = ()

    def open(self) -> Predictor:
        load_plugins(self.plugins)
        if Path(self.model).suffix in OPENERS or deployed(self.model) is not None:
            runner, random = open_runner(self.model, **self._asked(), runtime=self.runtime), False
        else:
            runner, random = self._open_model()
        if self.crop_pct is not None:
            described = dataclasses.replace(runner.description, crop_pct=self.crop_pct)
            runner = dataclasses.replace(runner, description=described)
        return Predictor(runner, features=self.features, random=random)

    def _asked(self) -> dict[str, Any]:
        given = ("weights", "size", "attention", "tokens", "threads", "pretrained", "predictor", "readout", "precision")
        return {name: getattr(self, name) for name in given}

    def _open_model(self) -> tuple[Runner, bool]:
        random = random_weights(self.model, weights=self.weights, pretrained=self.pretrained)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if not self.features:
                runner = open_runner(self.model, **self._asked(), runtime=self.runtime, below_breakeven="keep")
                return runner, random
            asked = self._asked()
            if asked.pop("precision") not in (None, "fp32"):
                raise UserError(f"--precision {self.precision} with --features: features are computed in fp32 only")
            if threads := asked.pop("threads"):
                torch.set_num_threads(threads)
            opened = open_model(self.model, **asked, below_breakeven="keep")
        return _with_features(opened, self.model, self.runtime), random


class Predictor:
    """Computes the outputs of a model for batches of any size."""

    def __init__(self, runner: Runner, *, features: bool = False, random: bool = False) -> None:
        self.runner = runner
        described = runner.description
        self.mean, self.std = (torch.tensor(value)[:, None, None] for value in (described.mean, described.std))
        first = self(torch.zeros(1, *described.size, described.channels, dtype=torch.uint8))
        scores = 0 if described.features else described.classes
        if not scores and not (features or described.features):
            raise UserError(f"{described.model} has no classifier: give --features to get its features")
        if scores and features and first.shape[1] == scores:
            raise UserError(f"{described.model} was exported without features: export it with --features")
        self.card = Card(described, runner.runtime, scores, first.shape[1] - scores, random)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Preprocessed images [B, H, W, C] → outputs [B, scores + features]."""
        images = pixels.permute(0, 3, 1, 2).contiguous().float().div_(255).sub_(self.mean).div_(self.std)
        at_once = self.runner.batch or len(images)
        return torch.cat([self._rows(part) for part in images.split(at_once)])

    def _rows(self, images: Tensor) -> Tensor:
        count = len(images)
        missing = self._computed(count) - count
        if missing:
            images = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
        found = self.runner.outputs(images)
        if self.runner.description.features:
            found = (found[-1].mean((-2, -1)),)
        return torch.cat([part[:count].float() for part in found], 1)

    def _computed(self, count: int) -> int:
        """The batch size for `count` images. A model is compiled again for each batch size, so compiled models use
        powers of two only."""
        if self.runner.batch is not None:
            return self.runner.batch
        return 1 << (count - 1).bit_length() if self.runner.runtime == "compile" else count


class _Both(nn.Module):
    """Logits of a classifier and their features, from one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        model: Any = self.model
        tokens = model.forward_features(images)
        features = model.forward_head(tokens, pre_logits=True)
        return (model.forward_head(tokens), features) if model.num_classes else (features,)


def _with_features(model: Any, name: str, runtime: str | None) -> Runner:
    if runtime not in (None, "eager", "compile"):
        raise UserError(f"{name!r} is not an exported file: `attendless export --features` makes one for {runtime}")
    if not hasattr(model, "forward_head"):
        raise UserError(f"{name!r} has no forward_head, so --features is not available")
    both = _Both(model).eval()
    called = torch.compile(both, dynamic=False) if runtime == "compile" else both

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(called(images))

    return Runner(runtime or "eager", describe(model, name=name), run)
