"""The content of the page as HTML: images with captions, and the predictions of a model beside full attention."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any

from attendless.errors import UserError

from . import paint
from .picture import Picture
from .sides import DENSE, Explorer, Facts, Look


@dataclasses.dataclass(frozen=True)
class Question:
    """A query: the image, the patch (row and column in the first layer), the layer, and one head or all (None)."""

    picture: Picture
    place: tuple[int, int]
    layer: int
    head: int | None = None


def moved(place: tuple[int, int], grid: tuple[int, int], event: dict[str, Any]) -> tuple[int, int]:
    """The patch after a click at `down` and `across`, as shares of an image's sides, or after a `step`."""
    try:
        if "step" in event:
            wanted = [now + int(step) for now, step in zip(place, event["step"], strict=True)]
        else:
            wanted = [int(float(event[name]) * count) for name, count in zip(("down", "across"), grid, strict=True)]
    except (KeyError, TypeError, ValueError, OverflowError):  # not from our page
        return place
    row, column = (min(max(0, number), count - 1) for number, count in zip(wanted, grid, strict=True))
    return row, column


def query(explorer: Explorer, asked: Question) -> str:
    """The image with the patch marked, and the map of full attention for that patch."""
    try:
        look = explorer.look(explorer.reference, asked.picture, asked.place, asked.layer, asked.head)
        grid = explorer.grid(asked.picture)
    except UserError as error:
        return wrong(error)
    row, column = asked.place
    patch = f"row {row}, column {column}"
    shown = _figure(paint.picture(asked.picture, grid, asked.place), f"the patch: {patch}", f"The image, {patch}")
    return _row(shown, _heat(asked, look, "full attention" if explorer.reference == DENSE else explorer.reference))


def side(explorer: Explorer, asked: Question, attention: str) -> str:
    """The keys that an attention uses exactly for the patch, its map, and the prediction of the model with it."""
    try:
        look = explorer.look(attention, asked.picture, asked.place, asked.layer, asked.head)
        facts, before = (explorer.facts(name, asked.picture) for name in (attention, explorer.reference))
    except UserError as error:
        return wrong(error)
    sharp, patches = float(look.sharp.sum()), look.sharp.numel()
    text = f"attended exactly: {sharp:.0f} of {patches} patches"
    place = (look.row, look.column)
    mask = _figure(paint.heat(asked.picture, look.sharp, place, most=1.0), text, f"Mask of {attention}: {text}")
    return _row(mask, _heat(asked, look, "its map")) + _facts(facts, before, explorer)


def wrong(error: UserError) -> str:
    return f'<p class="wrong" role="alert">{escape(str(error))}</p>'


def _heat(asked: Question, look: Look, name: str) -> str:
    text = f"{name}: up to {float(look.weights.max()):.1%} for a patch"
    source = paint.heat(asked.picture, look.weights, (look.row, look.column))
    return _figure(source, text, f"Attention map of {text}, layer {asked.layer}")


def _figure(source: str, text: str, alt: str) -> str:
    image = f'<img src="{source}" alt="{escape(alt)}" draggable="false">'
    return f"<figure>{image}<figcaption>{escape(text)}</figcaption></figure>"


def _row(*figures: str) -> str:
    return f'<div class="figures">{"".join(figures)}</div>'


def _facts(ours: Facts, reference: Facts, explorer: Explorer) -> str:
    """A table: latency, multiply-accumulates, and the classes with the highest probability."""
    names, ratio = explorer.classes, ours.reference_ms / ours.ms
    pace = f"{ratio:.2f}× as fast"
    rows = [
        ("latency, ms", f"{ours.ms:.1f}", f"{ours.reference_ms:.1f}", pace),
        ("MACs", f"{ours.macs / 1e9:.3f} G", f"{reference.macs / 1e9:.3f} G", f"{ours.macs / reference.macs - 1:+.1%}"),
    ]
    for number in ours.answer.topk(min(5, len(names))).indices.tolist():
        now, before = float(ours.answer[number]), float(reference.answer[number])
        rows.append((names[number], f"{now:.1%}", f"{before:.1%}", f"{100 * (now - before):+.1f} points"))
    head = "".join(
        f'<th scope="col">{escape(text)}</th>'
        for text in ("", "this model", "full" if explorer.reference == DENSE else explorer.reference, "change")
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"
        for name, *values in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
