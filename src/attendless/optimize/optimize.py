"""Search the fastest file that keeps a model's accuracy: attention × tokens × precision × runtime.

1. Time the unmodified model in every runtime and precision, in one interleaved benchmark. Where int8 is the fastest,
   return the layers to floating point where it costs most accuracy per millisecond.
2. Propose changes of attention and tokens by the engine of `tune`, with the time of blocks in the fastest target, and
   judge them in eager fp32.
3. Prepare the best changes in the fastest runtimes and precisions whose unmodified model meets the goal, and time them
   there, interleaved with the original. Variants in bf16 or int8 are judged by running their files.
4. Choose the fastest variant within the goal (`goals.py`), the unmodified ones included.
5. Judge the chosen file on images that took no part in calibration, search or choice.

All drops are against the original fp32 model.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..export.runner import as_runner
from ..integrations.discovery import find_slots
from ..integrations.weights import check_finite
from ..measure.scores import Metric
from ..measure.subject import attention_of, tokens_of
from ..sizes import input_size
from ..stamp import stamp
from ..tokens import NONE, parse_tokens
from . import judge as judging
from . import selection, starting
from .candidates import Change
from .fresh import Final, judge_fresh
from .goals import Goal
from .int8_layers import mixed_targets
from .judge import UNCHANGED, logits
from .optimized import Optimized
from .outcomes import Parts
from .pace import CALIBRATION, QUICK, Deadline, Pace, seconds_of
from .rates import specs_of
from .results import Setting
from .resume_log import ResumeLog, digest_of
from .scoring import Scoring
from .search import Progress, Search, silent
from .session import Session, grouped
from .variants import EAGER, Variant, Workshop, targets

#: Shares of the budget after which no further unmodified variant, and no further candidate, is prepared.
_BASELINES, _CANDIDATES = 0.35, 0.8
#: The share of the budget after which the search of changes ends early.
_SEARCH = 0.5
#: Changes that each promising target is tried with at once, whatever the time the first ones, and the second ones if
#: none of the first is within the goal. The harm of those tried tells which to try next.
_TRIED = 2


def optimize(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | Sequence[int] | None = None,
    *,
    max_drop: float | None = None,
    min_agreement: float | None = None,
    target_ms: float | None = None,
    metric: Metric | None = None,
    runtimes: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    attention: str = "foveal",
    tokens: str = "rank",
    batch: int = 1,
    threads: int | None = None,
    budget: str | float = "15m",
    quick: bool = False,
    resume: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = silent,
) -> Optimized:
    """Search the fastest deployable variant of `model` within a goal.

    Args:
        model: a model that returns one output per image, such as an image classifier. It is not changed.
        images: preprocessed images [n, channels, H, W]: at least 6, better a thousand. Up to 300, a third at most,
            serve calibration and search; one half of the others serves the choice, the other half the final judgement.
        labels: the class of every image, or what `metric` compares with; default: accuracy is estimated without labels.
        max_drop: bound of the accuracy drop, in percentage points of top-1, or of 100 · `metric`; 1.0 if no bound is
            given.
        min_agreement: bound of the share of images with the original's prediction, instead of `max_drop`.
        target_ms: bound of the latency, in milliseconds per image, instead of `max_drop`.
        metric: (outputs, targets) → a score per image [n], higher is better. It is called with parts of the images.
            Targets are the labels, or the original's outputs if there are none. Default: top-1; for models without a
            classifier cosine similarity.
        runtimes: `eager`, `compile`, `onnx`, `onnx-kernels`, `openvino`; default: all that are installed, except for
            `compile`.
        precisions: `fp32`, `bf16`, `int8`; default: all that the CPU computes.
        attention: a mechanism with a `keep` option, whose rates are searched; `none`: attentions stay.
        tokens: a token reducer, whose schedules are searched; `none`: tokens stay.
        batch: images per forward pass.
        threads: CPU threads; default: PyTorch's setting. It is set for the process.
        budget: time that the search may take, such as `90s`, `15m` or `1h`.
        quick: take changes from the presets, and from an earlier search in `cache`, rather than searching them;
            `budget` is then a minute at most.
        resume: a folder for the prepared files, from which the same search resumes.
        cache: a folder for the log of measured values, which a search of the same model with another goal reads too;
            default: `resume`.
        progress: reports the steps done.

    Returns:
        The chosen variant, all others, and its judgement on fresh images. Ctrl-C returns the best so far, if the
        unmodified variants were measured.

    Raises:
        UserError: an argument is out of range, or the model's outputs cannot be judged.
    """
    if max_drop is None and min_agreement is None and target_ms is None:
        max_drop = 1.0
    goal = Goal(max_drop, target_ms, min_agreement)
    starting.check_goal(goal, metric, model)
    seconds = min(seconds_of(budget), QUICK) if quick else seconds_of(budget)
    deadline = Deadline(seconds)
    if batch < 1:
        raise UserError(f"batch={batch}: expected a batch size of 1 or more")
    specs = specs_of(attention) if attention != NONE else []
    parse_tokens(tokens)  # raises before any work
    judging.check_images(images)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    given = starting.targets_of(labels, len(images))
    where, reasons = targets(runtimes, precisions, quick=quick)
    if threads is not None:
        torch.set_num_threads(threads)
    original = starting.plain(model, images.shape[1:])

    folder = Path(tempfile.mkdtemp(prefix="attendless-") if resume is None else resume)
    known = f"optimize {attention_of(original)} {tokens_of(original)} {batch} {starting.metric_name(metric, given)}"
    kept = cache if cache is not None else resume
    log = ResumeLog(kept, digest_of(original, images, known) if kept is not None else "")
    run = as_runner(original).run

    def answers(part: Tensor) -> Tensor:
        return logits(lambda chunk: run(chunk)[-1], part, "the model").cpu()

    parts = judging.split(torch.arange(len(images)), CALIBRATION)
    per_image, outputs = log.get("seconds and shape of outputs", lambda: starting.cost_of(answers, images))
    used = starting.metric_for(metric, original, outputs)
    given = given if used is metric else None  # features are compared with the original's

    if used is not None:
        goal = dataclasses.replace(goal, drop="drop of the score")

    def scored(part: Tensor) -> Scoring:
        return Scoring(None if given is None else given[part], used)

    pace = Pace.of(seconds, per_image, quick, starting.most_images(outputs))
    calibration, choosing, fresh = map(evenly, parts, (pace.calibration, pace.choosing, pace.fresh))
    searched = evenly(calibration, pace.search)
    if all(target.precision == EAGER.precision for target in where):  # PyTorch judges all
        choosing = evenly(choosing, pace.in_pytorch or len(choosing))
    # Folders are sorted by class; some steps take the first of these images.
    choosing = choosing[torch.randperm(len(choosing), generator=torch.Generator().manual_seed(0))]
    search = Search(
        images=images[searched],
        batch=batch,
        points=pace.points,
        budget=pace.timing,
        log=log,
        progress=progress,
        expired=lambda: deadline.passed(_SEARCH),
        distance=scored(searched).distance,
        drop=scored(searched).drop,
    )
    backbone, notes = starting.backbone_of(original)
    if not starting.rebuilds(original):  # PyTorch's other precisions are saved as checkpoints
        where = [target for target in where if target.format or target.precision == EAGER.precision]
    workshop = Workshop(
        original,
        lambda change: change.build(backbone),
        batch,
        images[calibration],
        folder / f"files-{log.key}",
        calibrated=None if notes else Change(attention_of(original), readout=True),
    )
    if resume is None:  # the files last as long as the result
        weakref.finalize(workshop, shutil.rmtree, folder, ignore_errors=True)
    with progress(f"outputs of the original model on {len(choosing)} images", 1) as step:
        belief = answers(images[choosing])
        step(1)
    unchanged = Change(attention_of(original))
    session = Session(
        Variant(unchanged, EAGER), workshop, search, goal, pace, deadline, images[choosing], belief, scored(choosing)
    )
    session.notes += [f"left out: {reason}" for reason in reasons] + notes
    asked = precisions is not None
    session.measure([Variant(unchanged, target) for target in where[1:]], _BASELINES, forced=asked)
    try:
        for target in selection.to_refine(session):
            session.measure([Variant(unchanged, mixed) for mixed in mixed_targets(session, target)], _BASELINES)
        found = selection.proposals(backbone, specs, tokens, session) if not notes else []
        session.read([Variant(one.change, EAGER) for one in found])
        for target in selection.promising(session):
            tried, at_once = list[Variant](), pace.candidates if goal.bound is None else _TRIED
            while len(tried) < pace.candidates:
                changes = selection.nearest(session, found, target, [one.change for one in tried])[:at_once]
                if not changes:
                    break
                needed = _TRIED if len(tried) < 2 * _TRIED and not selection.reached(session, tried) else 0
                tried += (variants := [Variant(change, target) for change in changes])
                session.measure(variants, _CANDIDATES, at_least=needed)
                session.release()
        if finalists := selection.finalists(session):
            session.time(finalists, "final timing")
    except KeyboardInterrupt:
        session.notes.append("interrupted: the best variant so far")
    outcomes = session.outcomes()
    chosen, reason = goal.choose(outcomes)
    prepared = session.prepare(chosen.variant)
    final = Final(UNCHANGED)
    if not session.is_exact(chosen.variant):
        scoring = dataclasses.replace(session.scoring, labels=scored(fresh).labels)
        with progress(f"judging the choice on {len(fresh)} fresh images", 2 * len(fresh)) as step:
            final = judge_fresh(answers, prepared.run, images[fresh], scoring, step)
    return Optimized(
        chosen=chosen,
        outcomes=tuple(outcomes),
        goal=goal,
        reason=reason,
        fresh=final.judged,
        accuracy=final.accuracy,
        images=len(images),
        parts=Parts(len(calibration), len(choosing), len(fresh), len(parts[2])),
        setting=Setting(input_size(original), batch, len(find_slots(backbone)) if backbone is not original else 0),
        scored_by=starting.scored_by(used, given),
        by_metric=used is not None,
        notes=grouped(session.notes),
        stamp=stamp(),
        workshop=workshop,
        prepared=prepared,
        examples=final.examples,
    )


def evenly(part: Tensor, count: int) -> Tensor:
    """At most `count` of a part's indices, spread over it."""
    return part[torch.arange(min(count, len(part))) * len(part) // min(count, len(part))]
