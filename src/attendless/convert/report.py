"""The report of a conversion, layer by layer: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import io
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Macs
from ..backbones import Backbone
from ..backbones.class_token_tail import READOUT
from ..integrations.reducing import grids, tokens_of
from ..integrations.slot import Slot
from ..integrations.weights import check_finite
from ..sizes import size_text
from .breakeven import LARGEST

#: Decisions that leave a layer as it was, because the requested attention does not pay there.
LEFT_FULL, LEFT, NOT_CHOSEN = "left full", "left as it was", "not chosen"
#: Decision that leaves a layer as it was, because its attention cannot be exchanged.
KEPT = "kept"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer: the attention asked for and the present one, the decision and its reason, weights, and costs."""

    name: str
    grid: str
    tokens: int
    asked: str | None
    attention: str
    decision: str
    reason: str
    copied: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    before: Macs
    after: Macs

    def as_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        weights = {key: list(fields[key]) for key in ("copied", "new", "dropped")}
        macs = {"macs_before": fields.pop("before").as_dict(), "macs": fields.pop("after").as_dict()}
        return {**fields, **weights, **macs, "attention_share": self.before.share, "cap": self.before.cap}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between the outputs of the converted and the original model on the same images, or on `noise`."""

    images: int
    largest: float
    relative: float
    agreement: float
    noise: bool = False

    def __str__(self) -> str:
        what, warning = (" of noise", " (noise says little: images tell more)") if self.noise else ("", "")
        return (
            f"outputs on {self.images} images{what}: largest difference {self.largest:.2g}, relative "
            f"{self.relative:.2g}, top-1 agreement {self.agreement:.0%}{warning}"
        )


def difference(original: nn.Module, converted: nn.Module, images: Tensor) -> Difference:
    """Compare the outputs a, b of two models on `images`. The relative difference is ‖a − b‖ / ‖a‖."""
    modes = original.training, converted.training
    with torch.no_grad():
        a, b = (_tensor(model.eval()(images)).flatten(1).double() for model in (original, converted))
    original.train(modes[0]), converted.train(modes[1])
    for answer, whose in ((a, "the original model"), (b, "the converted model")):
        check_finite([("its output", answer)], f"{whose} computes no numbers")
    same = (a.argmax(1) == b.argmax(1)).double().mean()
    return Difference(len(images), float((a - b).abs().max()), float((a - b).norm() / a.norm()), float(same))


def _tensor(output: Any) -> Tensor:
    """A model's output, or the first tensor in that of a Hugging Face model."""
    return output if isinstance(output, Tensor) else next(value for value in output.values() if value is not None)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A token reducer: its spec, the number of tokens that enter each layer and (without a tail) leave the last one,
    and the names of its new weights."""

    tokens: str
    counts: tuple[int, ...]
    new: tuple[str, ...]

    @classmethod
    def of(cls, backbone: Backbone) -> Reduction | None:
        """The reduction of a backbone; None if it has no token reducer."""
        if not backbone.tokens:
            return None
        *rows, head = backbone.costs()
        counts = [row.grid.tokens for row in rows if row.spec is not None]
        counts += [] if backbone.tail is not None else [head.grid.tokens]
        new = tuple(name for name, _ in backbone.named_parameters() if ".reducer." in name)
        return cls(backbone.tokens, tuple(counts), new)

    @classmethod
    def in_place(cls, model: nn.Module, slots: Sequence[Slot]) -> Reduction | None:
        """The reduction of a model that keeps its own layers; None if it has no token reducer."""
        tokens = tokens_of(model)
        if not tokens:
            return None
        last = grids(slots[-1].block, slots[-1].grid)[1]
        new = tuple(name for name, _ in model.named_parameters() if ".reducer." in name)
        return cls(tokens, (*(slot.grid.tokens for slot in slots), last.tokens), new)

    def __str__(self) -> str:
        return f"{self.tokens} leaves {self.counts[-1]} of {self.counts[0]} tokens: {_runs(self.counts)}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a conversion.

    model: the model's name.
    size: its input size (height, width).
    layers: the decision on every layer, with its cost before and after.
    elsewhere: the number of weights outside the attentions, all of which were copied.
    difference: the difference of the outputs, if it was measured.
    pays_from: the smallest square size at which one of the layers that were left would be converted.
    random_weights: whether no weights were ever loaded into the model.
    reduction: the token reducer and the tokens that remain in every layer.
    unserved: the paths of attentions that cannot be exchanged, each with the reason.
    tail: whether the last layer computes for the class token alone.
    note: further remarks.
    """

    model: str
    size: tuple[int, int]
    layers: tuple[LayerReport, ...]
    elsewhere: int
    difference: Difference | None = None
    pays_from: int | None = None
    random_weights: bool = False
    reduction: Reduction | None = None
    unserved: tuple[tuple[str, str], ...] = ()
    tail: bool = False
    note: str = ""

    @property
    def left(self) -> list[LayerReport]:
        """The layers that kept their attention because the requested one does not pay there."""
        return [layer for layer in self.layers if layer.decision in (LEFT_FULL, LEFT)]

    @property
    def before(self) -> Macs:
        return sum((layer.before for layer in self.layers), start=Macs())

    @property
    def after(self) -> Macs:
        return sum((layer.after for layer in self.layers), start=Macs())

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "size": list(self.size),
            "attention_share": self.before.share,
            "cap": self.before.cap,
            "macs_before": self.before.as_dict(),
            "macs": self.after.as_dict(),
            "weights_elsewhere": self.elsewhere,
            "difference": dataclasses.asdict(self.difference) if self.difference else None,
            "left": len(self.left),
            "pays_from": self.pays_from,
            "random_weights": self.random_weights,
            "unserved": [{"name": name, "reason": reason} for name, reason in self.unserved],
            "tokens_spec": self.reduction.tokens if self.reduction else None,
            "tokens": list(self.reduction.counts) if self.reduction else None,
            READOUT: self.tail,
            "note": self.note,
            "layers": [layer.as_dict() for layer in self.layers],
        }

    def summary(self) -> list[str]:
        """The most important facts, in a few lines."""
        share, done = self.before.share, [x for x in self.layers if x.decision == "converted"]
        lines = [
            f"{self.model} at {self.size[0]}x{self.size[1]}: the attention core is {share:.1%} of the blocks' MACs, "
            f"so the maximum speed-up of the blocks is {self.before.cap:.2f}×",
            f"{self._done(len(done))}{self._left()}; core MACs "
            f"{_millions(self.before.core)} → {_millions(self.after.core)}, "
            f"blocks {_millions(self.before.total)} → {_millions(self.after.total)}",
        ]
        if self.reduction:
            lines.insert(1, str(self.reduction))
        if self.tail:
            lines.append("the last layer is computed for the class token alone: the classifier reads no other token")
        if self.left and not done:
            lines.append(self._nothing())
        lines += [f"not exchanged: {paths}: {reason}" for paths, reason in folded(self.unserved)]
        if self.random_weights:
            lines.append("the weights are random, so predictions are meaningless: no weights were loaded")
        new = sum(len(layer.new) for layer in self.layers) + (len(self.reduction.new) if self.reduction else 0)
        dropped = sum(len(layer.dropped) for layer in self.layers)
        if new:
            lines.append(f"{new} weights are new and untrained: train or distill before use")
        if dropped:
            lines.append(f"{dropped} weights of the original have no place here and were dropped")
        lines += [self.note] if self.note else []
        return lines + ([str(self.difference)] if self.difference else [])

    def _done(self, count: int) -> str:
        if all(layer.asked is None for layer in self.layers):
            return "attentions as they were"
        return f"{count} of {len(self.layers)} layers converted"

    def _left(self) -> str:
        how = "full" if all(layer.decision == LEFT_FULL for layer in self.left) else "as they were"
        left = f", {len(self.left)} left {how} at {size_text(self.size)} px" if self.left else ""
        kept = [layer.reason for layer in self.layers if layer.decision == KEPT]
        return left + (f", {len(kept)} kept ({kept[0]})" if kept else "")

    def _nothing(self) -> str:
        """Why nothing was converted, and the size at which a conversion would pay."""
        asked, reason = self.left[0].asked, self.left[0].reason
        better = f"it should pay from {self.pays_from} px" if self.pays_from else f"nor at any size up to {LARGEST} px"
        fewer = "" if self.reduction else "; token merging, such as tome:r=8, may pay: `attendless bench` measures it"
        return f"nothing was converted: {asked} does not pay at {size_text(self.size)} px ({reason}); {better}{fewer}"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The summary and a table of the layers, in lines of at most `width` characters (default: any length)."""
        from rich.console import Console
        from rich.table import Table

        columns = ("layer", "grid", "attention", "decision", "why", "core MACs", "layer MACs", "cap", "weights")
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column, min_width=14 if column == "why" else 6, overflow="fold")
        for row in folded([_cells(layer) for layer in self.layers]):
            table.add_row(*row)
        text = io.StringIO()
        Console(file=text, width=width or 200, highlight=False, markup=False).print(table)
        wrapped = [textwrap.fill(line, width or 10**6, subsequent_indent="  ") for line in self.summary()]
        return "\n".join([*wrapped, "", *(line.rstrip() for line in text.getvalue().splitlines())])


def folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge rows of consecutive layers with equal cells: `blocks.0`, …, `blocks.11` → `blocks.0–11`.

    The first cell is the layer's name.
    """
    found: list[tuple[str, ...]] = []
    for (place, *cells), group in itertools.groupby(rows, key=lambda row: (row[0].rpartition(".")[0], *row[1:])):
        names = [row[0] for row in group]
        together = f"{names[0]}–{names[-1].rpartition('.')[2]}"
        if len(names) == 1 or not place:
            found += [(name, *cells) for name in names]
        else:
            found.append((together, *cells))
    return found


def _cells(layer: LayerReport) -> tuple[str, ...]:
    weights = {"copied": layer.copied, "new": layer.new, "dropped": layer.dropped}
    return (
        layer.name,
        layer.grid,
        layer.attention,
        layer.decision,
        layer.reason,
        f"{_millions(layer.before.core).removesuffix(' M')} → {_millions(layer.after.core)}",
        f"{_millions(layer.before.total).removesuffix(' M')} → {_millions(layer.after.total)}",
        f"{layer.before.cap:.2f}×",
        ", ".join(f"{len(names)} {what}" for what, names in weights.items() if names) or "none",
    )


def _runs(counts: Sequence[int]) -> str:
    """197, 197, 140, 140 → `197×2 140×2`."""
    runs = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return " ".join(str(count) if times == 1 else f"{count}×{times}" for count, times in runs)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"
