"""Search, without training and without labels, which tokens to merge and what each layer should attend with: as few
milliseconds as the answers allow.

1. A search proposes how many tokens each layer merges (`schedules.py`), and on the tokens left the keep rate of each
   layer's attention (`search.py`), by what blocks take on this machine (`proposals.py`).
2. Each is judged whole, on images the search has not seen: the accuracy it is expected to lose, and how often it gives
   the dense model's answer (`judge.py`).
3. What nothing beats races together against the dense model, by turns, so that their speed-ups belong to the same
   minutes (`clock.py`).
4. The quickest that keeps the promise is chosen, by its speed-up: neither what it lost nor what is typical of how far
   its answers moved may be more. One that cannot be told from the dense model is no quicker.
5. The best of many looks better than it is: of the one chosen, the loss is judged once more, on fresh images.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Spec
from ..convert.conversion import backbone_copy
from ..errors import UserError
from ..integrations.weights import check_finite
from ..measure.clock import (
    Call,
    Race,
    Timer,
    device_timer,
    race,
)
from ..measure.macs import count
from ..measure.subject import attention_of
from ..tokens import NONE, parse_tokens
from . import search
from .judge import (
    ITSELF,
    check_images,
    divergence,
    judge,
    jump,
    logits,
    losses,
    split,
    temperature,
    typical,
)
from .proposals import Proposal, propose, shortlist
from .resume_log import Notes, digest_of
from .tradeoff import Candidate, Goal, Tuned, convert_candidate

RATES = (0.05, 0.1, 0.25, 0.5)
#: The dense model's place in the race, and the rounds there are at least: a verdict takes 8.
_DENSE, _ROUNDS = "dense", 10


@contextmanager
def _silent(what: str, total: int) -> Iterator[Any]:
    yield lambda done: None


def searched(attention: str, tokens: str, rates: Sequence[float]) -> list[Spec]:
    """The specs of the rates to choose from, none if the attention stays; raises if there is nothing to search."""
    parse_tokens(tokens)
    if attention != NONE:
        return search.rates_of(attention, rates)
    if tokens == NONE:
        raise UserError("attention and tokens are both none: there is nothing to search")
    return []


def tune(
    model: nn.Module,
    images: Tensor,
    *,
    attention: str = "foveal",
    tokens: str = "tome",
    rates: Sequence[float] = RATES,
    max_drop: float | None = None,
    target_ms: float | None = None,
    accuracy: float | None = None,
    batch: int = 1,
    probe: int = 64,
    points: int = 8,
    budget: float = 10.0,
    resume: str | Path | None = None,
    progress: search.Progress = _silent,
) -> Tuned:
    """Find which tokens `model` should merge, and what each layer should attend with, judged on unlabelled,
    preprocessed `images` [n, 3, H, W].

    `attention` names a mechanism with a `keep` option, `tokens` the reducer to search over (`tome`) or to take as it is
    (`tome:r=8`); `none` leaves the one or the other as it stands. `max_drop` bounds the expected loss of top-1, in
    points (0.5 if neither bound is given), `target_ms` the milliseconds an image may take instead. Times are of `batch`
    images at once: merging tokens gains more there. `accuracy` is the model's own top-1 on such images in percent, if
    it is known: the loss is expected by how sure the model is of its answers, and many are right more often than they
    are sure. Up to `probe` images serve the search; one half of the others chooses among what it found, and the other
    half reports on the choice. Up to 2 · `points` candidates are timed, each for about `budget` seconds. `resume` is a
    folder in which what was measured is kept: the same search, started again, goes on from there.
    """
    goal, specs = Goal(max_drop, target_ms), searched(attention, tokens, rates)
    if probe < 2 or points < 2 or not budget > 0:
        raise UserError(f"probe={probe}, points={points}, budget={budget}: expected 2, 2 and more than 0 seconds")
    if batch < 1:
        raise UserError(f"batch={batch}: expected how many images are to be run at once, 1 or more")
    if accuracy is not None and not 0 < accuracy < 100:
        raise UserError(f"accuracy={accuracy}: expected the model's top-1 in percent, between 0 and 100")
    check_images(images)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    first = next(model.parameters())
    parts = [part.to(first.device, first.dtype) for part in split(images, probe)]
    dense, backbone = copy.deepcopy(model).eval(), backbone_copy(model).eval()
    if getattr(backbone, "num_classes", 2) < 2:
        raise UserError("the model has no classifier: tune judges by the answers it gives")
    known = f"{attention_of(backbone)} {getattr(backbone, 'tokens', '')} {probe}"
    notes = Notes(resume, digest_of(backbone, images, known) if resume is not None else "")
    proposals, said = propose(backbone, specs, tokens, parts[0], goal, batch, points, budget, notes, progress)
    # The backbone stands for the dense model where answers are asked for, as it gives plain logits; the clock runs the
    # dense model itself.
    models = [backbone, *(_sharing(_built(model, one).eval(), dense) for one in proposals[1:])]
    belief, answers, moved = _answers(models, proposals, parts[1], "choosing", notes, progress)
    sharper = temperature(belief, accuracy)
    belief = belief / sharper
    cost = jump(belief, [losses(belief, given) for given in answers])
    judged = [ITSELF, *(judge(belief, given, cost) for given in answers[1:])]
    drops = [one.expected_drop for one in judged]
    usual = typical(drops, moved)
    places = shortlist(proposals, [*map(max, drops, usual)], goal, 2 * points)
    raced = _race([dense, *(models[i] for i in places[1:])], search.batch_of(parts[1], batch), budget, progress)
    size = (images.shape[-2], images.shape[-1])
    macs = [count(models[i], size) for i in places]
    depth = len(search.find_slots(backbone))
    found = [
        Candidate(
            proposals[i].attention,
            proposals[i].layers,
            proposals[i].tokens,
            depth,
            size,
            each.total / macs[0].total,
            each.core / macs[0].core,
            judged[i],
            usual[i],
            raced.compare(place, _DENSE),
            1e3 * raced.median(_DENSE) / batch,
            batch,
        )
        for i, each, place in zip(places, macs, raced.seconds, strict=True)
    ]
    order = [0, *sorted(range(1, len(found)), key=lambda k: found[k].speedup)]
    chosen, reason = goal.choose([found[k] for k in order])
    fresh = ITSELF
    if chosen.changed:
        winner = places[found.index(chosen)]
        both = [proposals[0], proposals[winner]]
        belief, (_, given), _ = _answers([backbone, models[winner]], both, parts[2], "fresh", notes, progress)
        fresh = judge(belief / sharper, given, cost)
    return Tuned(chosen, tuple(found[k] for k in order), goal, reason, fresh, len(images), said)


def _built(model: nn.Module, proposal: Proposal) -> Any:
    return convert_candidate(model, proposal.attention, proposal.layers, proposal.tokens)


def _sharing(model: nn.Module, dense: nn.Module) -> nn.Module:
    """`model` with the dense model's own weights wherever they are equal: a dozen copies may not fit into memory, and
    in a race nobody should find weights warmer than others do."""
    theirs = dict(dense.named_parameters())
    for prefix, module in model.named_modules():
        for name, ours in module._parameters.items():
            same = theirs.get(f"{prefix}.{name}" if prefix else name)
            if ours is not None and same is not None and torch.equal(ours, same):
                module._parameters[name] = same
    return model


def _answers(
    models: Sequence[nn.Module],
    proposals: Sequence[Proposal],
    images: Tensor,
    part: str,
    notes: Notes,
    progress: search.Progress,
) -> tuple[Tensor, list[Tensor], list[float]]:
    """The logits of the first model, which stands for the dense one, the answers of all, and how far they diverge."""
    with progress(f"judging {len(models) - 1} on {len(images)} images", len(models) * len(images)) as step:
        belief = logits(models[0], images, "the model", step).cpu()
        answers, moved = [belief.argmax(-1)], [0.0]
        for model, one in zip(models[1:], proposals[1:], strict=True):
            name = " ".join([one.attention, *(["in", *map(str, one.layers)] if one.layers else []), one.tokens])
            ask = partial(_answered, model, images, belief, name, step)
            given, far = notes.get(f"answers and divergence of {name}, {part}", ask)
            answers.append(torch.tensor(given))
            moved.append(far)
    return belief, answers, moved


def _answered(model: nn.Module, images: Tensor, belief: Tensor, name: str, step: Any) -> tuple[list[int], float]:
    found = logits(model, images, name, step).cpu()
    return found.argmax(-1).tolist(), divergence(belief, found)


def _race(models: Sequence[nn.Module], images: Tensor, budget: float, progress: search.Progress) -> Race:
    """All models by turns, the dense one first, for `budget` seconds each or as long as a verdict takes."""

    def forward(model: nn.Module) -> Call:
        def call() -> object:
            with torch.inference_mode():
                return model(images)

        return call

    timer = device_timer(images.device)
    calls = {str(i) if i else _DENSE: forward(model) for i, model in enumerate(models)}
    lap = sum(timer(call) for call in calls.values())
    seconds = max(budget * (len(models) - 1), _ROUNDS * lap)
    warm = 4 * lap  # each is called four times or so before it counts
    with progress(f"timing {len(models)} models by turns, in seconds", math.ceil(seconds + warm)) as step:
        return race(calls, timer=_ticking(timer, step), budget=seconds)


def _ticking(timer: Timer, step: Any) -> Timer:
    """The timer, telling of every whole second it has timed."""
    passed = 0.0

    def timed(call: Call) -> float:
        nonlocal passed
        found = timer(call)
        if whole := int(passed + found) - int(passed):
            step(whole)
        passed += found
        return found

    return timed
