"""Prediction for image files in order; threads decode the next batches while the model computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..data.source import BadImage, load_image
from ..stamp import cores
from .answers import Answer, read_answers
from .model import Predictor

#: Batches that are prepared in advance.
AHEAD = 2


def predict(predictor: Predictor, images: Sequence[str], *, batch: int = 32, topk: int = 5) -> Iterator[list[Answer]]:
    """Yield the predictions of each batch, in the order of the files.

    Args:
        predictor: The opened model.
        images: Paths of image files. For an unreadable file, the `error` of its prediction is set.
        batch: Images per forward pass.
        topk: Classes per image.
    """
    prepare, names = predictor.card.preparation(), predictor.card.names()

    def load(path: str) -> np.ndarray | str:
        try:
            return prepare(load_image(path))
        except BadImage as error:
            return str(error)

    for part, loaded in _ahead(load, images, batch):
        sound = [found for found in loaded if not isinstance(found, str)]
        good = [path for path, found in zip(part, loaded, strict=True) if not isinstance(found, str)]
        rows = predictor(torch.from_numpy(np.stack(sound))) if sound else torch.empty(0, len(names))
        answers = iter(read_answers(rows, good, names, topk))
        each = zip(part, loaded, strict=True)
        yield [Answer(path, error=found) if isinstance(found, str) else next(answers) for path, found in each]


def _ahead(
    load: Callable[[str], np.ndarray | str], images: Sequence[str], batch: int
) -> Iterator[tuple[Sequence[str], list[np.ndarray | str]]]:
    """Yield each batch of paths with the loaded images, while threads load the next batches."""
    with ThreadPoolExecutor(cores()) as pool:
        waiting: deque[tuple[Sequence[str], list[Future[np.ndarray | str]]]] = deque()
        try:
            for start in range(0, len(images), batch):
                part = images[start : start + batch]
                waiting.append((part, [pool.submit(load, path) for path in part]))
                if len(waiting) > AHEAD:
                    part, futures = waiting.popleft()
                    yield part, [future.result() for future in futures]
            while waiting:
                part, futures = waiting.popleft()
                yield part, [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
