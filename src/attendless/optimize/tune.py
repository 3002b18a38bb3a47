"""Search the fastest model within an accuracy drop, without training and without labels.

This is the search of `optimize` in eager PyTorch alone, on the device and in the type of the model's weights.

1. Propose: token schedules (`schedules.py`), and keep rates of each layer's attention on the remaining tokens
   (`rates.py`), by the measured time of single blocks (`proposals.py`).
2. Judge each proposal as a whole model, on images the search has not used (`judge.py`).
3. Time the best proposals and the baseline in one interleaved benchmark, so that their speed-ups are comparable.
4. Choose the fastest candidate within the goal (`goals.py`).
5. Judge the chosen candidate again on fresh images: the best of many candidates looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from ..attention import Spec
from ..errors import UserError
from ..integrations.discovery import find_slots
from ..integrations.rebuild.copying import backbone_copy
from ..integrations.weights import check_finite
from ..measure.macs import count
from ..measure.subject import attention_of, tokens_of
from ..tokens import NONE, parse_tokens
from . import judge as judging
from .candidates import share_weights, shared_copy
from .fresh import judge_fresh
from .goals import Goal
from .judge import UNCHANGED, logits
from .outcomes import Outcome
from .pace import Deadline, Pace
from .proposals import Proposal, propose, shortlist
from .rates import RATES, rate_specs
from .report import Tuned
from .results import Candidate, CostShare, Setting
from .resume_log import ResumeLog, digest_of
from .scoring import Scoring
from .search import Progress, Search, silent
from .session import Session, grouped
from .variants import EAGER, Prepared, Variant, Workshop


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
    searched, choosing, fresh = (p.to(first.device, first.dtype) for p in judging.split(images, probe))
    baseline = shared_copy(model).eval()
    backbone = share_weights(backbone_copy(model).eval(), baseline)
    if getattr(backbone, "num_classes", 2) < 2:
        raise UserError("the model has no classifier: tune judges candidates by their predictions")
    known = f"{attention_of(backbone)} {tokens_of(backbone)} {probe}"
    log = ResumeLog(resume, digest_of(backbone, images, known) if resume is not None else "")
    search = Search(images=searched, batch=batch, points=points, budget=budget, log=log, progress=progress)
    proposals, notes = propose(backbone, specs, tokens, goal, search)

    def answers(part: Tensor) -> Tensor:
        return logits(backbone, part, "the model").cpu()

    session = Session(
        Variant(proposals[0].change, EAGER),
        Modules(baseline, backbone, batch, searched),
        search,
        goal,
        Pace.timing_alone(budget),
        Deadline(math.inf),
        choosing,
        answers(choosing),
        Scoring(None, None, accuracy),
    )
    session.read([Variant(one.change, EAGER) for one in proposals[1:]])
    session.time_again(_worth_timing(session, proposals, 2 * points))
    setting = Setting((images.shape[-2], images.shape[-1]), batch, len(find_slots(backbone)))
    found = [_candidate(session, one, setting) for one in session.outcomes()]
    candidates = (found[0], *sorted(found[1:], key=lambda one: one.speedup))
    chosen, reason = goal.choose(candidates)
    judged = UNCHANGED
    if chosen.changed:
        winner = session.prepare(Variant(chosen.change, EAGER)).run
        with progress(f"judging the choice on {len(fresh)} fresh images", 2 * len(fresh)) as step:
            judged = judge_fresh(answers, winner, fresh, session.scoring, step).judged
    return Tuned(chosen, candidates, goal, reason, judged, len(images), (*notes, *grouped(session.notes)))


class Modules(Workshop):
    """Changes of a model as PyTorch modules, on the device and in the type of its weights.

    Args:
        baseline: the model, which is timed.
        backbone: the same model with attentions that can be exchanged. It returns a plain tensor of logits.
        batch, calibration: as in `Workshop`.
    """

    def __init__(self, baseline: nn.Module, backbone: nn.Module, batch: int, calibration: Tensor) -> None:
        super().__init__(backbone, lambda change: change.build(backbone), batch, calibration, Path())
        self.baseline = baseline

    def prepare(self, variant: Variant) -> Prepared:
        changed = self.module(variant.change)
        return Prepared(changed, changed if variant.change else self.baseline)


def _worth_timing(session: Session, proposals: Sequence[Proposal], points: int) -> list[Variant]:
    """At most `points` of the proposals that were judged."""
    judged = session.judgements()
    known = [one for one in proposals if not one.change or Variant(one.change, EAGER) in judged]
    drops = [0.0]
    for one in known[1:]:
        judgement, typical = judged[Variant(one.change, EAGER)]
        drops.append(max(judgement.expected_drop, typical))
    return [Variant(known[i].change, EAGER) for i in shortlist(known, drops, session.goal, points)[1:]]


def _candidate(session: Session, outcome: Outcome, setting: Setting) -> Candidate:
    """A candidate from its measurements."""
    change = outcome.variant.change
    whole, macs = (count(session.workshop.module(one), setting.size) for one in (session.original.change, change))
    return Candidate(
        change=change,
        setting=setting,
        cost=CostShare(macs.total / whole.total, macs.core / whole.core),
        judged=outcome.judged,
        typical_drop=outcome.typical_drop,
        timed=outcome.timed,
    )


def _check_arguments(probe: int, points: int, budget: float, batch: int, accuracy: float | None) -> None:
    if probe < 2 or points < 2 or not budget > 0:
        raise UserError(f"probe={probe}, points={points}, budget={budget}: expected 2, 2 and more than 0 seconds")
    if batch < 1:
        raise UserError(f"batch={batch}: expected a batch size of 1 or more")
    if accuracy is not None and not 0 < accuracy < 100:
        raise UserError(f"accuracy={accuracy}: expected the model's top-1 in percent, between 0 and 100")
