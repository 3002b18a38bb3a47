"""Search, without training, what each layer should attend with: as few milliseconds as the answers allow.

1. What a setting costs is measured: one layer's attention at each rate, by turns with full attention.
2. What it damages is measured too: each layer alone is given each rate, the others stay full, and the divergence
   KL(dense ‖ changed) of the answers is averaged over a few images. Layers before the changed one are run once.
3. Damages nearly add up, so for any price λ of a millisecond the best rate of each layer is found on its own: the λ
   sweep gives a front of settings from all-full to all-cheapest.
4. Each setting on the front is run whole: agreement with the dense model, the accuracy it is expected to lose, and the
   measured milliseconds. The quickest that keeps the promise is the answer.

No labels are needed. The expected loss takes the dense model at its word: an image it gives p to its own answer and p′
to the new one is right with p before and p′ after, so the loss is the mean of p − p′.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Spec, join, parse
from ..backbones import is_host
from ..backbones.host import Step
from ..convert import convert
from ..convert.rebuild import host_copy
from ..convert.slots import Slot, find_slots
from ..errors import UserError
from .clock import race
from .macs import count
from .subject import attention_of

RATES = (0.05, 0.1, 0.25, 0.5)
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One point of the trade-off: what every layer attends with, and what was measured of it.

    `layers` are those changed: in a model with attentions of its own, `attention` counts for them alone.
    """

    attention: str
    layers: tuple[int, ...]
    latency_ms: float
    speedup: float
    spread: float
    agreement: float
    expected_drop: float
    core_share: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The setting chosen, and the front it was chosen from, the all-full setting first."""

    chosen: Candidate
    front: tuple[Candidate, ...]
    images: int
    reason: str

    @property
    def attention(self) -> str:
        """What the layers chosen attend with, as `convert` takes it."""
        return self.chosen.attention

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers to convert; the others stay as they are."""
        return self.chosen.layers

    def convert(self, model: nn.Module) -> Any:
        """`model` as it was tuned; a copy, as always."""
        if not self.layers:
            return host_copy(model)
        return convert(model, self.attention, layers=self.layers, below_breakeven="keep")


def tune(
    model: nn.Module,
    images: Tensor,
    *,
    attention: str = "foveal",
    rates: Sequence[float] = RATES,
    max_drop: float | None = None,
    target_ms: float | None = None,
    probe: int = 64,
    points: int = 8,
    budget: float = 4.0,
    progress: Progress = lambda done: None,
) -> Tuned:
    """Find what each layer of `model` should attend with, judged on unlabelled, preprocessed `images` [n, 3, H, W].

    `attention` names a mechanism with a `keep` option; `max_drop` bounds the expected loss of top-1, in points (0.5 if
    neither bound is given), `target_ms` asks for a latency at batch 1 instead. `probe` images measure the damages, all
    of them the front's `points` settings, each timed for about `budget` seconds.
    """
    if max_drop is not None and target_ms is not None:
        raise UserError("give max_drop or target_ms, not both")
    max_drop = 0.5 if max_drop is None and target_ms is None else max_drop
    if max_drop is not None and not max_drop >= 0:
        raise UserError(f"max_drop={max_drop}: expected the points of top-1 that may be lost, 0 or more")
    base = parse(attention)
    if not hasattr(base.options, "keep"):
        raise UserError(f"attention {base.name!r} has no keep option to tune")
    specs = [base.replace(keep=rate) for rate in sorted(rates, reverse=True)]
    host = host_copy(model).eval()
    costs = _costs(host, specs, images[:1])
    damages = _damages(host, specs, images[:probe], progress)
    dense = torch.cat(_logits(host, images))
    progress(len(images))
    candidates = [
        _measure(model, host, _named(host, specs, mix), images, dense, budget, progress)
        for mix in _front(costs, damages, points)
    ]
    chosen, reason = _choose(candidates, max_drop, target_ms)
    return Tuned(chosen, tuple(candidates), len(images), reason)


def layers_of(model: nn.Module) -> int:
    """How many layers there are to tune."""
    return len(find_slots(host_copy(model)))


def steps(layers: int, images: int, *, rates: int = len(RATES), probe: int = 64, points: int = 8) -> int:
    """How much `progress` will have counted at the end, at most."""
    return min(probe, images) * rates * layers + images * (1 + points)


@torch.inference_mode()
def _costs(host: nn.Module, specs: Sequence[Spec], image: Tensor) -> Tensor:
    """[layers, 1 + specs]: milliseconds of a block as it is, and with each spec; blocks of one kind are timed once."""
    slots = find_slots(host)
    inputs = _inputs(host, [slot.name for slot in slots], image)
    timed: dict[Any, list[float]] = {}
    rows = []
    for slot, given in zip(slots, inputs, strict=True):
        kind = (slot.grid, str(slot.spec), tuple(value.shape for value in slot.weights().values()))
        if kind not in timed:
            blocks = [slot.block]
            with _kept(slot):
                for spec in specs:
                    slot.put(slot.make(spec))
                    blocks.append(copy.copy(slot.block))
                    blocks[-1]._modules = dict(blocks[-1]._modules)  # the next one is put into the same block
            calls = {str(i): partial(block, *given) for i, block in enumerate(blocks)}
            raced = race(calls, budget=4.0)
            timed[kind] = [1e3 * raced.median(name) for name in calls]
        rows.append(timed[kind])
    return torch.tensor(rows)


def _inputs(host: nn.Module, names: Sequence[str], image: Tensor) -> list[tuple[Any, ...]]:
    """What enters each of the blocks named, for one image."""
    found: dict[str, tuple[Any, ...]] = {}
    hooks = [
        host.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: found.update({name: given}))
        for name in names
    ]
    try:
        host(image)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[name] for name in names]


@torch.inference_mode()
def _damages(host: Any, specs: Sequence[Spec], images: Tensor, progress: Progress) -> Tensor:
    """[layers, 1 + specs]: mean KL(dense ‖ with this layer alone changed) of the answers, in nats."""
    slots = find_slots(host)
    total = torch.zeros(len(slots), 1 + len(specs))
    for chunk in images.split(16):
        # One of our hosts goes on from the layer that was changed; any other model begins anew.
        states = [*host.walk(*host.embed(chunk))] if is_host(host) else None
        dense = _answers(host, chunk, states, len(slots)).log_softmax(-1)
        for i, slot in enumerate(slots):
            with _kept(slot):
                for c, spec in enumerate(specs, 1):
                    slot.put(slot.make(spec))
                    changed = _answers(host, chunk, states, i).log_softmax(-1)
                    total[i, c] += (dense.exp() * (dense - changed)).sum()
                    progress(len(chunk))
    return total / len(images)


def _answers(host: Any, chunk: Tensor, states: Sequence[Step] | None, start: int) -> Tensor:
    """The model's answers, run from layer `start` on if the state there is known."""
    if states is None:
        return host(chunk).float()
    x, _ = host.run_layers(states[start].x, states[start].context, start=start)
    return host.forward_head(host.norm(x)).float()


@contextlib.contextmanager
def _kept(slot: Slot) -> Iterator[None]:
    """Whatever is put into the slot inside, what stands there now stands there again afterwards."""
    parent, _, index = slot.name.rpartition(".")
    block = slot.block
    attn = block.attn
    try:
        yield
    finally:
        block.attn = attn
        slot.model.get_submodule(parent)[int(index)] = block  # type: ignore[operator]


def _named(host: nn.Module, specs: Sequence[Spec], mix: Sequence[int]) -> tuple[str, list[int]]:
    """A mix of choices as `convert` takes it: the spec of every layer, and which layers to convert."""
    changed = [i for i, c in enumerate(mix) if c]
    if not changed:
        return attention_of(host), []
    # An attention of the model's own has no spec; as its layer is not converted, what stands there does not matter.
    filler = specs[mix[changed[0]] - 1]
    return join([specs[c - 1] if c else s.spec or filler for c, s in zip(mix, find_slots(host), strict=True)]), changed


def _front(cost: Tensor, damages: Tensor, points: int) -> list[list[int]]:
    """Mixes of choices, from all-full to all-cheapest, each best for some price of a millisecond; at most `points`.

    Between them the prices are bisected where the cost jumps most, so the points spread evenly along the curve.
    """

    def best(price: float) -> tuple[int, ...]:
        return tuple((damages + price * cost).argmin(dim=1).tolist())

    layers = torch.arange(len(cost))
    scale = float(damages.max().clamp_min(1e-9)) / max(float((cost.amax(1) - cost.amin(1)).max()), 1e-9)
    full = (0,) * len(cost)
    found = {best(scale * 10.0**exponent) for exponent in torch.linspace(-6, 3, 400).tolist()} - {full}
    price = {mix: float(cost[layers, list(mix)].sum()) for mix in found}
    dearest = float(
        cost[:, 0].sum()
    )  # where attending less costs more than full attention, it has no place on the front
    mixes = [full, *sorted((mix for mix in found if price[mix] < dearest), key=lambda mix: -price[mix])]
    if len(mixes) > points:
        mixes = [mixes[round(i * (len(mixes) - 1) / (points - 1))] for i in range(points)]
    return [list(mix) for mix in mixes]


def _measure(
    model: nn.Module,
    dense_host: nn.Module,
    named: tuple[str, list[int]],
    images: Tensor,
    dense: Tensor,
    budget: float,
    progress: Progress,
) -> Candidate:
    attention, layers = named
    host = convert(model, attention, layers=layers, below_breakeven="keep").eval() if layers else dense_host
    answers = []
    for chunk in _logits(host, images):
        answers.append(chunk.argmax(-1))
        progress(len(chunk))
    ours, theirs = torch.cat(answers), dense.argmax(-1)
    belief = dense.softmax(-1)
    loss = belief.gather(1, theirs[:, None]) - belief.gather(1, ours[:, None])
    image = images[:1]
    with torch.inference_mode():
        timed = race({"dense": lambda: model(image), "ours": lambda: host(image)}, budget=budget)
    comparison = timed.compare("ours", "dense")
    size = (images.shape[-2], images.shape[-1])
    return Candidate(
        attention=attention,
        layers=tuple(layers),
        latency_ms=1e3 * timed.median("ours"),
        speedup=comparison.ratio,
        spread=comparison.spread,
        agreement=float((ours == theirs).float().mean()),
        expected_drop=100 * float(loss.mean()),
        core_share=count(host, size).core / count(dense_host, size).core,
    )


def _choose(candidates: Sequence[Candidate], max_drop: float | None, target_ms: float | None) -> tuple[Candidate, str]:
    if max_drop is not None:
        fitting = [s for s in candidates if s.expected_drop <= max_drop]
        return min(
            fitting, key=lambda s: s.latency_ms
        ), f"quickest with an expected loss of at most {max_drop:g} points"
    assert target_ms is not None
    fitting = [s for s in candidates if s.latency_ms <= target_ms]
    if fitting:
        return min(fitting, key=lambda s: s.expected_drop), f"most faithful within {target_ms:g} ms"
    return min(candidates, key=lambda s: s.latency_ms), f"nothing reaches {target_ms:g} ms: this is the quickest found"


@torch.inference_mode()
def _logits(host: nn.Module, images: Tensor) -> list[Tensor]:
    return [host(chunk).float() for chunk in images.split(16)]
