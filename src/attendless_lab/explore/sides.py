"""The model with each attention, and its results for an image.

A click computes the rows of one patch in one layer. The rest (the input of that layer, the prediction, the latency)
does not depend on the patch and is cached.
"""

from __future__ import annotations

import dataclasses
import threading
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from attendless.attention import Attention, parse
from attendless.convert import convert
from attendless.errors import UserError
from attendless.maps import (
    Entry,
    entry,
    layers,
    numbers,
    on_grid,
    patches_under,
    seen_by_us,
)
from attendless.measure.clock import interleave
from attendless.measure.macs import count
from attendless.show.scene import with_full_attention

from .picture import Picture

#: Seconds of timing per image; `attendless bench` takes longer and reports an interval.
GLANCE = 0.25
#: In place of a spec: full attention with every token, the baseline; and the model as it was given.
DENSE, OWN = "dense", "as it is"


@dataclasses.dataclass(frozen=True)
class Look:
    """The attention of one patch in one layer, on that layer's grid [height, width]: `sharp` is the share of heads that
    use a key exactly, `weights` its attention weight. `row` and `column` are those of the patch."""

    sharp: Tensor
    weights: Tensor
    row: int
    column: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """The prediction of a model, as probabilities [classes], and its cost: latency, that of the baseline in the same
    interleaved benchmark, and multiply-accumulates."""

    answer: Tensor
    ms: float
    reference_ms: float
    macs: int


class Explorer:
    """A model with any attention, and its maps and predictions for images. A lock serialises the queries."""

    def __init__(self, model: nn.Module, predictor: str | None = None) -> None:
        self.own = seen_by_us(model).eval()
        self._predictor = predictor
        self._asking = threading.RLock()
        # Models are large, what enters a layer is small.
        self.model = lru_cache(maxsize=6)(self._model)
        self._entry = lru_cache(maxsize=64)(self._find_entry)
        self._facts = lru_cache(maxsize=64)(self._find_facts)
        layers(self.own)  # raises if there are none
        self.reference = self._reference()
        self.layers = numbers(self.model(self.reference), None)
        known = layers(self.model(self.reference))
        self.heads = max(attention.num_heads for attention in known if isinstance(attention, Attention))

    def _reference(self) -> str:
        """The baseline: full attention, or the model as it is where full attention does not fit (the stages of a LaViT
        pass on scores of another shape)."""
        try:
            self.model(DENSE)
        except UserError:
            return OWN
        return DENSE

    def grid(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of patches in the first layer; patches are identified by them."""
        with self._asking:
            grid = self._entry(self.reference, picture, self.layers[0]).context.grid
        return grid.height, grid.width

    def look(
        self, attention: str, picture: Picture, place: tuple[int, int], layer: int, head: int | None = None
    ) -> Look:
        """The attention of the patch at `place`, a row and column in the first layer, in `layer`: of one head, or the
        mean of all heads."""
        height, width = picture.image.shape[-2:]
        rows, columns = self.grid(picture)
        row, column = place
        if not (0 <= row < rows and 0 <= column < columns):
            raise UserError(
                f"there is no patch in row {row}, column {column}: the last is in row {rows - 1}, column {columns - 1}"
            )
        pixel = ((column + 0.5) * width / columns, (row + 0.5) * height / rows)
        with self._asking, torch.no_grad():
            given = self._entry(attention, picture, layer)
            grid = given.context.grid
            (query,) = patches_under(pixel, grid, picture.image)
            found = given.attention.map(given.x, given.context, query)[0, :, 0]
            sharp = given.attention.sees(given.x, given.context, query)[0].to(found.dtype)
        if head is not None and not 0 <= head < len(found):
            raise UserError(f"layer {layer} has no head {head}: it has heads 0 to {len(found) - 1}")
        shown = slice(None) if head is None else slice(head, head + 1)
        sharp, weights = (on_grid(value[None, shown], grid)[0].mean(0) for value in (sharp, found))
        return Look(sharp, weights, int(pixel[1] * grid.height / height), int(pixel[0] * grid.width / width))

    def facts(self, attention: str, picture: Picture) -> Facts:
        """Prediction and cost of the model with that attention."""
        with self._asking:
            return self._facts(attention, picture)

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes."""
        count = int(self.own.num_classes)  # type: ignore[arg-type]
        if count != 1000:
            return [f"class {number}" for number in range(count)]
        return [name.split(",")[0] for name in ImageNetInfo().label_descriptions()]

    # Cached results ------------------------------------------------------------------------------------------------

    def _model(self, attention: str) -> nn.Module:
        if attention == OWN:
            return self.own
        if attention == DENSE:
            return with_full_attention(self.own)
        uses = self._predictor if "sparsifiner" in attention else None
        return convert(self.own, attention, below_breakeven="keep", predictor=uses).eval()

    def _find_entry(self, attention: str, picture: Picture, layer: int) -> Entry:
        return entry(self.model(attention), picture.image, layer)

    @torch.no_grad()
    def _find_facts(self, attention: str, picture: Picture) -> Facts:
        ours = self.model(attention)
        answer = ours(picture.image)[0].float().softmax(-1)
        variants = {
            name: partial(self.model(name), picture.image) for name in dict.fromkeys((self.reference, attention))
        }
        timed = interleave(variants, budget=GLANCE, rounds=7)
        ms, before = (1000 * timed.median(name) for name in (attention, self.reference))
        return Facts(answer, ms, before, count(ours).total)


def keep_of(attention: str) -> float | None:
    """The keep rate of a spec; None if the spec has no such option or several parts."""
    try:
        keep: Any = getattr(parse(attention).options, "keep", None)
    except UserError:
        return None
    return float(keep) if isinstance(keep, int | float) else None


def with_keep(attention: str, keep: float) -> str:
    """The spec with another keep rate, unchanged if it has no keep rate."""
    now = keep_of(attention)
    return attention if now is None or now == keep else str(parse(attention).replace(keep=keep))
