"""Which mixes of rates, layer by layer, are worth a look.

1. What a rate costs is measured: one block's milliseconds with each rate, by turns with the block as it is.
2. What it damages is measured too: each layer alone is given each rate, the others stay as they are, and the
   divergence KL(dense ‖ changed) of the answers is averaged over a few images. Layers before it are run once.
3. Damages nearly add up, so for any price of a millisecond the best rate of each layer is found on its own: a sweep of
   the price gives mixes from all as it is to all cheapest.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Spec, join, parse
from ..attention.registry import attention_class
from ..backbones import is_backbone
from ..backbones.base import Step
from ..errors import UserError
from ..integrations.slot import Slot, find_slots
from ..measure.clock import race
from ..measure.subject import attention_of
from .judge import BATCH, divergence, logits
from .resume_log import Notes

#: What is done and how many steps it has → a function that is told of each step.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def rates_of(attention: str, rates: Sequence[float]) -> list[Spec]:
    """The spec of each rate, the gentlest first."""
    base = parse(attention)
    if not hasattr(base.options, "keep"):
        raise UserError(f"attention {base.name!r} has no keep option to tune")
    wrong = [rate for rate in rates if not 0 < rate <= 1]
    if wrong or not rates:
        given = ", ".join(f"{rate:g}" for rate in wrong) or "none"
        raise UserError(f"rates: got {given}, expected shares of the keys to keep, above 0 and up to 1")
    return [base.replace(keep=rate) for rate in sorted(set(rates), reverse=True)]


def tunable(slots: Sequence[Slot], spec: Spec) -> list[int]:
    """The layers that can be given another attention: not those that read what the layer before left, nor those that
    leave what the new attention could not."""
    leaves = attention_class(spec.name).provides
    found = []
    for i, (slot, after) in enumerate(zip(slots, [*slots[1:], None], strict=True)):
        needed = _reads(getattr(slot.block, "reducer", None)) | (_reads(after.attn) if after else frozenset())
        if not slot.stays and not _reads(slot.attn) and needed <= leaves:
            found.append(i)
    if not found:
        raise UserError(f"no layer can be given {spec.name}: each reads another's scores, or is read by one")
    return found


def _reads(part: Any) -> frozenset[str]:
    return frozenset(getattr(part, "reads", ()))


def mixes(
    backbone: nn.Module,
    specs: Sequence[Spec],
    images: Tensor,
    batch: int,
    points: int,
    budget: float,
    notes: Notes,
    progress: Progress,
    slower: bool = False,
) -> list[tuple[list[int], float]]:
    """The mixes to judge, each with the milliseconds its blocks take less than as they are: for each layer 0, as it is,
    or the place of its rate in `specs`, counted from 1.

    First the model as it is; then up to `points` mixes found by searching; then every rate in all layers alike. What is
    slower by what blocks take is left out, or every rate is there though it may be `slower`.
    """
    slots = find_slots(backbone)
    free = tunable(slots, specs[0])
    chosen, on = [slots[i] for i in free], f"on {getattr(backbone, 'tokens', '') or 'all tokens'}"
    asked = ", ".join(map(str, specs))
    costs = torch.tensor(
        notes.get(
            f"milliseconds {on} of {asked}, batch {batch}",
            lambda: block_costs(chosen, specs, batch_of(images, batch), budget, progress).tolist(),
        )
    )
    if not slower and not bool((costs[:, 1:] < costs[:, :1]).any()):
        return [([0] * len(slots), 0.0)]
    harms = torch.tensor(
        notes.get(
            f"harm {on} of {asked}",
            lambda: damages(backbone, chosen, free, specs, images, progress).tolist(),
        )
    )
    found: dict[tuple[int, ...], float] = {}
    alike = [[c] * len(free) for c in range(1, len(specs) + 1)]
    for mix in (*front(costs, harms, points), *alike):
        saved = float(costs[:, 0].sum()) - _milliseconds(costs, mix)
        if slower or saved > 0 or not any(mix):
            whole = [0] * len(slots)
            for i, c in zip(free, mix, strict=True):
                whole[i] = c
            found[tuple(whole)] = saved
    return [(list(mix), saved) for mix, saved in found.items()]


def batch_of(images: Tensor, batch: int) -> Tensor:
    """So many images at once for the clock, the same again where there are fewer."""
    return images[torch.arange(batch, device=images.device) % len(images)]


def _milliseconds(cost: Tensor, mix: Sequence[int]) -> float:
    return float(cost[torch.arange(len(cost)), list(mix)].sum())


def named(backbone: nn.Module, specs: Sequence[Spec], mix: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """A mix as `convert` takes it: the spec of every layer, and which layers to convert."""
    changed = tuple(i for i, c in enumerate(mix) if c)
    if not changed:
        return attention_of(backbone), ()
    # An attention of the model's own has no spec; as its layer is not converted, what stands there does not matter.
    filler = specs[mix[changed[0]] - 1]
    slots = find_slots(backbone)
    return join([specs[c - 1] if c else slot.spec or filler for c, slot in zip(mix, slots, strict=True)]), changed


@torch.inference_mode()
def block_costs(
    slots: Sequence[Slot], specs: Sequence[Spec], images: Tensor, budget: float, progress: Progress
) -> Tensor:
    """[layers, 1 + specs]: milliseconds of a block as it is, and with each spec, for `budget` seconds in all; blocks of
    one kind are timed once."""
    kinds = [(str(slot.grid), str(slot.spec), *(value.shape for value in slot.weights().values())) for slot in slots]
    timed: dict[Any, list[float]] = {}
    with progress("timing blocks", len(set(kinds))) as step:
        for slot, kind in zip(slots, kinds, strict=True):
            if kind in timed:
                continue
            blocks = [slot.block]
            with _kept(slot):
                for spec in specs:
                    slot.put(slot.make(spec))
                    blocks.append(_twin(slot.block, "attn"))  # the next one is put into the same block
                args, kwargs = _inputs(slot.model, slot.name, images)
            calls = {str(i): partial(block, *args, **kwargs) for i, block in enumerate(blocks)}
            raced = race(calls, budget=budget / len(set(kinds)))
            timed[kind] = [1e3 * raced.median(name) for name in calls]
            step(1)
    return torch.tensor([timed[kind] for kind in kinds])


def _twin(module: nn.Module, *inside: str) -> nn.Module:
    """A module with the same weights whose parts can be exchanged, and so can those of its part `inside`."""
    twin = copy.copy(module)
    twin._modules = dict(twin._modules)
    for name in inside:
        twin._modules[name] = _twin(twin._modules[name])  # type: ignore[arg-type]
    return twin


def _inputs(backbone: nn.Module, name: str, images: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What enters a block."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = backbone.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True
    )
    try:
        backbone(images)
    finally:
        hook.remove()
    return found[0]


@torch.inference_mode()
def damages(
    backbone: Any,
    slots: Sequence[Slot],
    places: Sequence[int],
    specs: Sequence[Spec],
    images: Tensor,
    progress: Progress,
) -> Tensor:
    """[layers, 1 + specs]: mean KL(dense ‖ with this layer alone changed) of the answers, in nats."""
    total = torch.zeros(len(slots), 1 + len(specs))
    with progress("searching: one layer at a time", len(slots) * len(specs) * len(images)) as step:
        for chunk in images.split(BATCH):
            # One of our backbones goes on from the layer that was changed; any other model begins anew.
            states = [*backbone.walk(*backbone.embed(chunk))] if is_backbone(backbone) else None
            dense = logits(backbone, chunk, "the model")
            for (row, slot), place in zip(enumerate(slots), places, strict=True):
                with _kept(slot):
                    for column, spec in enumerate(specs, 1):
                        slot.put(slot.make(spec))
                        changed = logits(_rest(backbone, states, place), chunk, f"{spec} in {slot.name}")
                        total[row, column] += len(chunk) * divergence(dense, changed)
                        step(len(chunk))
    return total / len(images)


def _rest(backbone: Any, states: Sequence[Step] | None, start: int) -> Callable[[Tensor], Tensor]:
    """The model, run from layer `start` on if the state there is known."""
    if states is None:
        return backbone

    def run(_: Tensor) -> Tensor:
        x, context = backbone.run_layers(states[start].x, states[start].context, start=start)
        return backbone.answer(backbone.norm(x), context.grid)

    return run


@contextlib.contextmanager
def _kept(slot: Slot) -> Iterator[None]:
    """Whatever is put into the slot inside, what stands there now stands there again afterwards."""
    back = slot.standing()
    try:
        yield
    finally:
        back()


def front(cost: Tensor, harm: Tensor, points: int) -> list[list[int]]:
    """Mixes from all as it is to all cheapest, each best for some price of a millisecond; at most `points`.

    Where attending less costs more than the block as it is, it has no place among them.
    """
    scale = float(harm.max().clamp_min(1e-9)) / max(float((cost.amax(1) - cost.amin(1)).max()), 1e-9)
    prices = [scale * 10.0**exponent for exponent in torch.linspace(-6, 3, 400).tolist()]
    found = {tuple((harm + price * cost).argmin(dim=1).tolist()) for price in prices}
    as_it_is = (0,) * len(cost)
    milliseconds = {mix: _milliseconds(cost, mix) for mix in found | {as_it_is}}
    quicker = [mix for mix in found if milliseconds[mix] < milliseconds[as_it_is]]
    whole = [as_it_is, *sorted(quicker, key=lambda mix: -milliseconds[mix])]
    if len(whole) > points:
        whole = [whole[round(i * (len(whole) - 1) / (points - 1))] for i in range(points)]
    return [list(mix) for mix in whole]
