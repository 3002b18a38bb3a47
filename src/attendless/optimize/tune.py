"""Search the fastest model within an accuracy drop, without training and without labels.

1. Propose: token schedules (`schedules.py`), and keep rates of each layer's attention on the remaining tokens
   (`rates.py`), by the measured time of single blocks (`proposals.py`).
2. Judge each proposal as a whole model, on images the search has not used (`judge.py`).
3. Time the best proposals and the baseline in one interleaved benchmark, so that their speed-ups are comparable.
4. Choose the fastest candidate within the goal (`goals.py`).
5. Judge the chosen candidate again on fresh images: the best of many candidates looks better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attention import Spec
from ..errors import UserError
from ..integrations.discovery import find_slots
from ..integrations.rebuild.copying import backbone_copy
from ..integrations.weights import check_finite
from ..measure.clock import Timings, device_timer
from ..measure.macs import count
from ..measure.subject import attention_of, tokens_of
from ..tokens import NONE, parse_tokens
from . import judge as judging
from .block_times import repeat_to_batch
from .candidates import share_weights, shared_copy
from .goals import Goal
from .judge import UNCHANGED
from .measuring import benchmark, forward_call, read_all
from .proposals import propose, shortlist
from .rates import rate_specs
from .report import Tuned
from .results import Candidate, CostShare, Setting, Timing
from .resume_log import ResumeLog, digest_of
from .search import Progress, Search, silent

RATES = (0.05, 0.1, 0.25, 0.5)
#: The baseline's name in the benchmark.
_BASELINE = "baseline"


def attentions_to_try(attention: str, tokens: str, rates: Sequence[float]) -> list[Spec]:
    """The attention of each keep rate; empty if attentions stay unchanged. Raises if there is nothing to search."""
    parse_tokens(tokens)
    if attention != NONE:
        return rate_specs(attention, rates)
    if tokens == NONE:
        raise UserError("attention and tokens are both none: there is nothing to search")
    return []


def tune(
    model: nn.Module,
    images: Tensor,
    *,
    attention: str = "foveal",
    tokens: str = "rank",
    rates: Sequence[float] = RATES,
    max_drop: float | None = None,
    target_ms: float | None = None,
    accuracy: float | None = None,
    batch: int = 1,
    probe: int = 64,
    points: int = 8,
    budget: float = 10.0,
    resume: str | Path | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Search which tokens `model` should merge or prune, and the attention of each layer.

    Args:
        model: an image classifier that `convert` supports. It is not changed.
        images: unlabelled, preprocessed images [n, 3, H, W]: at least 6, better a few hundred.
        attention: a mechanism with a `keep` option; `none`: attentions stay unchanged.
        tokens: the name of a token reducer with a search space (`rank`), whose schedules are searched; a spec with
            options (`tome:r=8`) is taken as it is; `none`: tokens stay unchanged.
        rates: the keep rates to choose from.
        max_drop: bound of the expected accuracy drop, in percentage points of top-1; 0.5 if no bound is given.
        target_ms: bound of the latency, in milliseconds per image, instead of `max_drop`.
        accuracy: the model's top-1 on such images in percent, if known. It calibrates the model's confidence, from
            which the drop is estimated.
        batch: the batch size to time.
        probe: up to so many images, a third at most, serve the search. One half of the others serves the choice, the
            other half the final judgement.
        points: up to 2 · `points` candidates are timed.
        budget: seconds of timing for each candidate.
        resume: a folder for the log of measured values, from which the same search resumes.
        progress: reports the steps done.

    Returns:
        The chosen candidate, all other candidates and the reason of the choice.

    Raises:
        UserError: an argument is out of range, the model cannot be converted or its logits are not finite.
    """
    goal, specs = Goal(max_drop, target_ms), attentions_to_try(attention, tokens, rates)
    _check_arguments(probe, points, budget, batch, accuracy)
    judging.check_images(images)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    first = next(model.parameters())
    searched, choosing, reporting = (p.to(first.device, first.dtype) for p in judging.split(images, probe))
    baseline = shared_copy(model).eval()
    # The benchmark runs the baseline itself. Where logits are asked for, the backbone stands for it: it returns a
    # plain tensor of logits.
    backbone = share_weights(backbone_copy(model).eval(), baseline)
    if getattr(backbone, "num_classes", 2) < 2:
        raise UserError("the model has no classifier: tune judges candidates by their predictions")
    known = f"{attention_of(backbone)} {tokens_of(backbone)} {probe}"
    log = ResumeLog(resume, digest_of(backbone, images, known) if resume is not None else "")
    search = Search(images=searched, batch=batch, points=points, budget=budget, log=log, progress=progress)
    proposals, notes = propose(backbone, specs, tokens, goal, search)
    changes = [one.change for one in proposals]
    models = [backbone, *(change.build(backbone).eval() for change in changes[1:])]
    belief, given, divergences = read_all(models, list(map(str, changes)), choosing, "choosing", search)
    predictions = list(map(torch.tensor, given))
    confidence = judging.temperature(belief, accuracy)
    belief = belief / confidence
    cost = judging.flip_cost(belief, [judging.losses(belief, given) for given in predictions])
    judged = [UNCHANGED, *(judging.judge(belief, given, cost) for given in predictions[1:])]
    drops = [one.expected_drop for one in judged]
    typical = judging.typical_drops(drops, divergences)
    chosen_indices = shortlist(proposals, [*map(max, drops, typical)], goal, 2 * points)
    timed = [baseline, *(models[i] for i in chosen_indices[1:])]
    times = _benchmark(timed, repeat_to_batch(choosing, batch), budget, progress)
    setting = Setting((images.shape[-2], images.shape[-1]), batch, len(find_slots(backbone)))
    macs = [count(models[i], setting.size) for i in chosen_indices]
    found = [
        Candidate(
            change=changes[i],
            setting=setting,
            cost=CostShare(each.total / macs[0].total, each.core / macs[0].core),
            judged=judged[i],
            typical_drop=typical[i],
            timed=Timing(times.compare(name, _BASELINE), 1e3 * times.median(_BASELINE) / batch),
        )
        for i, each, name in zip(chosen_indices, macs, times.seconds, strict=True)
    ]
    candidates = (found[0], *sorted(found[1:], key=lambda one: one.speedup))
    chosen, reason = goal.choose(candidates)
    fresh = UNCHANGED
    if chosen.changed:
        winner = chosen_indices[found.index(chosen)]
        names = [str(changes[0]), str(changes[winner])]
        belief, (_, again), _ = read_all([backbone, models[winner]], names, reporting, "fresh", search)
        fresh = judging.judge(belief / confidence, torch.tensor(again), cost)
    return Tuned(chosen, candidates, goal, reason, fresh, len(images), notes)


def _check_arguments(probe: int, points: int, budget: float, batch: int, accuracy: float | None) -> None:
    if probe < 2 or points < 2 or not budget > 0:
        raise UserError(f"probe={probe}, points={points}, budget={budget}: expected 2, 2 and more than 0 seconds")
    if batch < 1:
        raise UserError(f"batch={batch}: expected a batch size of 1 or more")
    if accuracy is not None and not 0 < accuracy < 100:
        raise UserError(f"accuracy={accuracy}: expected the model's top-1 in percent, between 0 and 100")


def _benchmark(models: Sequence[nn.Module], images: Tensor, budget: float, progress: Progress) -> Timings:
    """An interleaved benchmark of all models, the baseline first, for `budget` seconds each."""
    calls = {str(i) if i else _BASELINE: forward_call(model, images) for i, model in enumerate(models)}
    return benchmark(calls, budget * (len(models) - 1), progress, device_timer(images.device))
