"""Keep rates layer by layer: the mixes of rates that are worth judging.

1. `attention_times` measures the time of a block with each rate.
2. `layer_sensitivities` measures the damage of each rate in each layer, the other layers unchanged.
3. Damages of several layers nearly add up. For any price of a millisecond, the best rate of each layer therefore does
   not depend on the other layers. A sweep of the price gives mixes from "no layer changed" to "every layer fastest".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Spec, join, parse
from ..attention.registry import attention_class
from ..errors import UserError
from ..integrations.discovery import find_slots
from ..integrations.slot import Slot
from ..measure.subject import attention_of, tokens_of
from .block_times import attention_times, repeat_to_batch
from .search import Search
from .sensitivity import layer_sensitivities

#: The keep rates of a search unless others are given.
RATES = (0.05, 0.1, 0.25, 0.5)
_COARSE = parse("foveal:keep=0.1,cell=4")


def rate_specs(attention: str, rates: Sequence[float]) -> list[Spec]:
    """The spec of each keep rate, highest rate first."""
    base = parse(attention)
    if not hasattr(base.options, "keep"):
        raise UserError(f"attention {base.name!r} has no keep option to tune")
    wrong = [rate for rate in rates if not 0 < rate <= 1]
    if wrong or not rates:
        given = ", ".join(f"{rate:g}" for rate in wrong) or "none"
        raise UserError(f"rates: got {given}, expected shares of the keys to keep, above 0 and up to 1")
    return [base.replace(keep=rate) for rate in sorted(set(rates), reverse=True)]


def specs_of(attention: str) -> list[Spec]:
    """The specs that `optimize` searches: each keep rate, and for `foveal` coarser cells in place of the highest rate.
    With them a bf16 model is 8 % faster at 384 px."""
    found = rate_specs(attention, RATES)
    return found if attention != _COARSE.name else [*found[1:], _COARSE]


def tunable_layers(slots: Sequence[Slot], spec: Spec) -> list[int]:
    """The layers that can take another attention.

    A layer cannot if its attention reads what the layer before left in the context, or if the reducer or the next layer
    reads something that the new attention does not provide.
    """
    provided = attention_class(spec.name).provides
    found = []
    for i, (slot, after) in enumerate(zip(slots, [*slots[1:], None], strict=True)):
        needed = _reads(getattr(slot.block, "reducer", None)) | (_reads(after.attn) if after else frozenset())
        if not slot.fixed and not _reads(slot.attn) and needed <= provided:
            found.append(i)
    if not found:
        raise UserError(f"no layer can take {spec.name}: each layer reads the scores of another, or is read by one")
    return found


def _reads(part: Any) -> frozenset[str]:
    return frozenset(getattr(part, "reads", ()))


def rate_mixes(
    backbone: nn.Module, specs: Sequence[Spec], search: Search, *, keep_slower: bool = False
) -> list[tuple[list[int], float]]:
    """The mixes to judge, each with the milliseconds that its blocks save by prediction.

    A mix holds for each layer 0 (unchanged) or the number of its spec in `specs`, counted from 1. The unchanged model
    comes first, then up to `search.points` mixes of the price sweep, then each rate in all layers. Mixes that are
    slower by prediction are left out, except for those with one rate in all layers if `keep_slower`.
    """
    slots = find_slots(backbone)
    layers = tunable_layers(slots, specs[0])
    text = f"on {tokens_of(backbone) or 'all tokens'} of {', '.join(map(str, specs))}"
    batch = repeat_to_batch(search.images, search.batch)
    times = torch.tensor(
        search.log.get(
            f"milliseconds {text}, batch {search.batch} {search.where.name}",
            lambda: attention_times(
                backbone, layers, specs, batch, search.budget, search.progress, search.where
            ).tolist(),
        )
    )
    if not keep_slower and not bool((times[:, 1:] < times[:, :1]).any()):
        return [([0] * len(slots), 0.0)]
    damage = torch.tensor(
        search.log.get(
            f"divergence {text}",
            lambda: layer_sensitivities(
                backbone, layers, specs, search.images, search.progress, search.distance
            ).tolist(),
        )
    )
    found: dict[tuple[int, ...], float] = {}
    uniform = [[c] * len(layers) for c in range(1, len(specs) + 1)]
    for mix in (*price_sweep(times, damage, search.points), *uniform):
        saved = float(times[:, 0].sum()) - _milliseconds(times, mix)
        if keep_slower or saved > 0 or not any(mix):
            whole = [0] * len(slots)
            for i, c in zip(layers, mix, strict=True):
                whole[i] = c
            found[tuple(whole)] = saved
    return [(list(mix), saved) for mix, saved in found.items()]


def price_sweep(times: Tensor, damage: Tensor, points: int) -> list[list[int]]:
    """At most `points` mixes from "no layer changed" to "every layer fastest", each the best for some price of a
    millisecond. A mix that is slower than the unchanged model is left out."""
    scale = float(damage.max().clamp_min(1e-9)) / max(float((times.amax(1) - times.amin(1)).max()), 1e-9)
    prices = [scale * 10.0**exponent for exponent in torch.linspace(-6, 3, 400).tolist()]
    found = {tuple((damage + price * times).argmin(dim=1).tolist()) for price in prices}
    unchanged = (0,) * len(times)
    milliseconds = {mix: _milliseconds(times, mix) for mix in found | {unchanged}}
    faster = [mix for mix in found if milliseconds[mix] < milliseconds[unchanged]]
    mixes = [unchanged, *sorted(faster, key=lambda mix: -milliseconds[mix])]
    if len(mixes) > points:
        mixes = [mixes[round(i * (len(mixes) - 1) / (points - 1))] for i in range(points)]
    return [list(mix) for mix in mixes]


def _milliseconds(times: Tensor, mix: Sequence[int]) -> float:
    return float(times[torch.arange(len(times)), list(mix)].sum())


def attention_and_layers(backbone: nn.Module, specs: Sequence[Spec], mix: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """A mix as `convert` takes it: the spec of every layer, and the layers to convert."""
    changed = tuple(i for i, c in enumerate(mix) if c)
    if not changed:
        return attention_of(backbone), ()
    # A foreign attention has no spec. `convert` ignores the spec of a layer that it leaves unchanged.
    filler = specs[mix[changed[0]] - 1]
    slots = find_slots(backbone)
    return join([specs[c - 1] if c else slot.spec or filler for c, slot in zip(mix, slots, strict=True)]), changed
