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

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import join, parse
from ..convert import convert
from ..errors import UserError
from .clock import race
from .macs import count

RATES = (0.05, 0.1, 0.25, 0.5)
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the trade-off: what every layer attends with, and what was measured of it."""

    attention: str
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

    chosen: Setting
    front: tuple[Setting, ...]
    images: int
    reason: str

    @property
    def attention(self) -> str:
        """The spec that `convert` takes."""
        return self.chosen.attention


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
    base = parse(attention)
    if not hasattr(base.options, "keep"):
        raise UserError(f"attention {base.name!r} has no keep option to tune")
    choices = [parse("full"), *(base.replace(keep=rate) for rate in sorted(rates, reverse=True))]
    hosts = [convert(model, str(choice), below_breakeven="keep").eval() for choice in choices]
    costs = _costs(hosts, images[:1])
    damages = _damages(hosts, images[:probe], progress)
    dense = torch.cat(_logits(hosts[0], images))
    progress(len(images))
    settings = [
        _measure(model, join([choices[c] for c in mix]), images, dense, budget, progress)
        for mix in _front(costs, damages, points)
    ]
    chosen, reason = _choose(settings, max_drop, target_ms)
    return Tuned(chosen, tuple(settings), len(images), reason)


def steps(layers: int, images: int, *, rates: int = len(RATES), probe: int = 64, points: int = 8) -> int:
    """How much `progress` will have counted at the end, at most."""
    return min(probe, images) * rates * layers + images * (1 + points)


def _costs(hosts: Sequence[Any], image: Tensor) -> list[float]:
    """Milliseconds of one layer's attention with each choice, by turns."""
    with torch.inference_mode():
        x, context = hosts[0].embed(image)
        x = hosts[0].blocks[0].norm1(x)

        def layer(host: Any) -> Callable[[], object]:
            return lambda: host.blocks[0].attn(x, context)

        timed = race({str(i): layer(host) for i, host in enumerate(hosts)}, budget=4.0)
    return [1e3 * timed.median(str(i)) for i in range(len(hosts))]


@torch.inference_mode()
def _damages(hosts: Sequence[Any], images: Tensor, progress: Progress) -> Tensor:
    """[layers, choices]: mean KL(dense ‖ with this layer alone changed) of the answers, in nats."""
    full, depth = hosts[0], len(hosts[0].blocks)
    total = torch.zeros(depth, len(hosts))
    for chunk in images.split(16):
        states = [full.embed(chunk)]
        for block in full.blocks:
            states.append(block(*states[-1]))
        dense = _head(full, states[-1][0]).log_softmax(-1)
        for i in range(depth):
            for c, host in enumerate(hosts[1:], 1):
                x, context = host.blocks[i](*states[i])
                for block in full.blocks[i + 1 :]:
                    x, context = block(x, context)
                changed = _head(full, x).log_softmax(-1)
                total[i, c] += (dense.exp() * (dense - changed)).sum()
                progress(len(chunk))
    return total / len(images)


def _head(host: Any, x: Tensor) -> Tensor:
    return host.forward_head(host.norm(x)).float()


def _front(costs: Sequence[float], damages: Tensor, points: int) -> list[list[int]]:
    """Mixes of choices, from all-full to all-cheapest, each best for some price of a millisecond; at most `points`.

    Between them the prices are bisected where the cost jumps most, so the points spread evenly along the curve.
    """
    cost = torch.tensor(costs)

    def best(price: float) -> tuple[int, ...]:
        return tuple((damages + price * cost).argmin(dim=1).tolist())

    scale = float(damages.max().clamp_min(1e-9)) / max(max(costs) - min(costs), 1e-9)
    full = (0,) * damages.shape[0]
    found = {best(scale * 10.0**exponent) for exponent in torch.linspace(-6, 3, 400).tolist()} - {full}
    price = {mix: sum(costs[c] for c in mix) for mix in found}
    dearest = costs[0] * len(full)  # where attending less costs more than full attention, it has no place on the front
    mixes = [full, *sorted((mix for mix in found if price[mix] < dearest), key=lambda mix: -price[mix])]
    if len(mixes) > points:
        mixes = [mixes[round(i * (len(mixes) - 1) / (points - 1))] for i in range(points)]
    return [list(mix) for mix in mixes]


def _measure(
    model: nn.Module, attention: str, images: Tensor, dense: Tensor, budget: float, progress: Progress
) -> Setting:
    host = convert(model, attention, below_breakeven="keep").eval()
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
    full = convert(model, "full")
    return Setting(
        attention=attention,
        latency_ms=1e3 * timed.median("ours"),
        speedup=comparison.ratio,
        spread=comparison.spread,
        agreement=float((ours == theirs).float().mean()),
        expected_drop=100 * float(loss.mean()),
        core_share=count(host, size).core / count(full, size).core,
    )


def _choose(settings: Sequence[Setting], max_drop: float | None, target_ms: float | None) -> tuple[Setting, str]:
    if max_drop is not None:
        fitting = [s for s in settings if s.expected_drop <= max_drop]
        return min(
            fitting, key=lambda s: s.latency_ms
        ), f"quickest with an expected loss of at most {max_drop:g} points"
    assert target_ms is not None
    fitting = [s for s in settings if s.latency_ms <= target_ms]
    if fitting:
        return min(fitting, key=lambda s: s.expected_drop), f"most faithful within {target_ms:g} ms"
    return min(settings, key=lambda s: s.latency_ms), f"nothing reaches {target_ms:g} ms: this is the quickest found"


@torch.inference_mode()
def _logits(host: nn.Module, images: Tensor) -> list[Tensor]:
    return [host(chunk).float() for chunk in images.split(16)]
