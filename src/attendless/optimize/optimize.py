"""Search the fastest file that keeps a model's accuracy: attention × tokens × precision × runtime.

1. Time the unmodified model in every runtime and precision, in one interleaved benchmark.
2. Propose changes of attention and tokens by the engine of `tune`, and judge them in eager fp32.
3. Prepare the best changes in the fastest runtimes and precisions whose unmodified model meets the goal, and time them
   there, interleaved with the original. Variants in bf16 or int8 are judged by running their files.
4. Choose the fastest variant within the goal (`goals.py`), the unmodified ones included.
5. Judge the chosen file on images that took no part in calibration, search or choice.

All drops are against the original fp32 model.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..export.runner import as_runner
from ..integrations.discovery import find_slots
from ..integrations.rebuild.copying import backbone_copy
from ..integrations.weights import check_finite
from ..measure.subject import attention_of, tokens_of
from ..sizes import input_size
from ..stamp import stamp
from ..tokens import NONE, parse_tokens
from . import judge as judging
from . import selection
from .candidates import Change, share_weights, shared_copy
from .goals import Goal
from .judge import UNCHANGED, Judgement, logits
from .measuring import read_one
from .optimized import Optimized
from .pace import QUICK, Deadline, Pace, seconds_of
from .rates import rate_specs
from .results import Setting
from .resume_log import ResumeLog, digest_of
from .scoring import Metric, Scoring, cosine
from .search import Progress, Search, silent
from .session import Session
from .tune import RATES
from .variants import EAGER, Variant, Workshop, targets

#: The most images to calibrate int8 on. The search takes its images from them.
CALIBRATION = 300
#: Shares of the budget after which no further unmodified variant, and no further candidate, is prepared.
_BASELINES, _CANDIDATES = 0.35, 0.8
#: The share of the budget after which the search of changes ends early.
_SEARCH = 0.5


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
        metric: (outputs, targets) → a score per image [n], higher is better. Targets are the labels, or the original's
            outputs if there are none. Default: top-1; for models without a classifier cosine similarity.
        runtimes: `eager`, `compile`, `onnx`, `onnx-kernels`, `openvino`; default: all that are installed, except for
            `compile`.
        precisions: `fp32`, `bf16`, `int8`; default: all that the CPU computes.
        attention: a mechanism with a `keep` option, whose rates are searched; `none`: attentions stay.
        tokens: a token reducer, whose schedules are searched; `none`: tokens stay.
        batch: images per forward pass.
        threads: CPU threads; default: PyTorch's setting. It is set for the process.
        budget: time that the search may take, such as `90s`, `15m` or `1h`.
        quick: take changes from the presets rather than searching them; `budget` is then a minute at most.
        resume: a folder for the log and the prepared files, from which the same search resumes.
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
    seconds = min(seconds_of(budget), QUICK) if quick else seconds_of(budget)
    deadline = Deadline(seconds)
    if batch < 1:
        raise UserError(f"batch={batch}: expected a batch size of 1 or more")
    specs = rate_specs(attention, RATES) if attention != NONE else []
    parse_tokens(tokens)  # raises before any work
    judging.check_images(images)
    check_finite(model.named_parameters(), "the model's weights are damaged")
    given = _targets_of(labels, len(images))
    where, reasons = targets(runtimes, precisions)
    if threads is not None:
        torch.set_num_threads(threads)
    original = _plain(model)
    scored = _scoring(original, given, metric)

    folder = Path(tempfile.mkdtemp(prefix="attendless-") if resume is None else resume)
    known = f"optimize {attention_of(original)} {tokens_of(original)} {batch}"
    log = ResumeLog(resume, digest_of(original, images, known) if resume is not None else "")
    run = as_runner(original).run

    def answers(part: Tensor) -> Tensor:
        return logits(lambda chunk: run(chunk)[-1], part, "the model")

    parts = judging.split(torch.arange(len(images)), CALIBRATION)
    per_image = log.get("seconds per image", lambda: _seconds(answers, images[: min(16, len(images))]))
    pace = Pace.of(seconds, per_image, quick)
    calibration, choosing, fresh = map(evenly, parts, (CALIBRATION, pace.choosing, pace.fresh))
    search = Search(
        images=images[evenly(calibration, pace.search)],
        batch=batch,
        points=pace.points,
        budget=pace.timing,
        log=log,
        progress=progress,
        expired=lambda: deadline.passed(_SEARCH),
    )
    backbone, notes = _backbone(original)
    workshop = Workshop(
        original, lambda change: change.build(backbone), batch, images[calibration], folder / f"files-{log.key}"
    )
    if resume is None:  # the files last as long as the result
        weakref.finalize(workshop, shutil.rmtree, folder, ignore_errors=True)
    with progress(f"outputs of the original model on {len(choosing)} images", 1) as step:
        belief = answers(images[choosing]).cpu()
        step(1)
    unchanged = Change(attention_of(original))
    session = Session(
        Variant(unchanged, EAGER), workshop, search, goal, pace, deadline, images[choosing], belief, scored(choosing)
    )
    session.notes += [f"left out: {reason}" for reason in reasons] + notes
    session.measure([Variant(unchanged, target) for target in where[1:]], _BASELINES)
    try:
        found = selection.proposals(backbone, specs, tokens, session) if not notes else []
        session.read([Variant(one.change, EAGER) for one in found])
        for number, target in enumerate(selection.promising(session)):
            if number and deadline.passed(_CANDIDATES):
                session.notes.append(f"the time budget was used up before changes were tried in {target}")
                continue
            session.measure([Variant(c, target) for c in selection.nearest(session, found, target)], _CANDIDATES)
            session.release()
        if finalists := selection.finalists(session):
            session.time(finalists)
    except KeyboardInterrupt:
        session.notes.append("interrupted: the best variant so far")
    outcomes = session.outcomes()
    chosen, reason = goal.choose(outcomes)
    prepared = session.prepare(chosen.variant)
    judged, accuracy = UNCHANGED, None
    if not session.is_exact(chosen.variant):
        scoring = _with_labels(session.scoring, scored(fresh))
        judged, accuracy = _fresh(answers, prepared.run, images[fresh], scoring, search, str(chosen.variant))
    return Optimized(
        chosen=chosen,
        outcomes=tuple(outcomes),
        goal=goal,
        reason=reason,
        fresh=judged,
        accuracy=accuracy,
        images=len(images),
        setting=Setting(input_size(original), batch, len(find_slots(backbone)) if backbone is not original else 0),
        scored_by=_scored_by(metric, given, original),
        notes=tuple(dict.fromkeys(session.notes)),
        stamp=stamp(),
        workshop=workshop,
        prepared=prepared,
    )


# Preparing -----------------------------------------------------------------------------------------------------------


def _plain(model: nn.Module) -> nn.Module:
    """The model in evaluation mode and fp32 on the CPU, sharing its weights where they are so already."""
    first = next(model.parameters())
    plain = first.dtype == torch.float32 and first.device.type == "cpu"
    return (shared_copy(model) if plain else copy.deepcopy(model).float().cpu()).eval()


def _backbone(original: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model whose attentions can be exchanged; the original itself, with the reason, if there is none."""
    try:
        return share_weights(backbone_copy(original).eval(), original), []
    except UserError as error:
        return original, [f"attention and tokens were not searched: {error}"]


def _targets_of(labels: Tensor | Sequence[int] | None, count: int) -> Tensor | None:
    if labels is None:
        return None
    found = torch.as_tensor(labels).cpu()
    if len(found) != count:
        raise UserError(f"{len(found)} labels for {count} images: expected one for each")
    return found


def _scoring(original: nn.Module, labels: Tensor | None, metric: Metric | None) -> Callable[[Tensor], Scoring]:
    """The scoring of a part of the images, by their indices."""
    classifies = getattr(original, "num_classes", 2) != 0
    metric = metric if metric is not None or classifies else cosine
    return lambda part: Scoring(None if labels is None else labels[part], metric)


def _scored_by(metric: Metric | None, labels: Tensor | None, original: nn.Module) -> str:
    if metric is not None:
        return f"drop of 100 · {getattr(metric, '__name__', 'metric')}"
    if getattr(original, "num_classes", 2) == 0:
        return "drop of 100 · cosine similarity"
    return f"{'expected ' if labels is None else ''}accuracy drop in percentage points"


def _with_labels(calibrated: Scoring, part: Scoring) -> Scoring:
    return Scoring(part.labels, part.metric, calibrated.cost, calibrated.confidence)


def _seconds(answers: Callable[[Tensor], Tensor], images: Tensor) -> float:
    answers(images)
    began = time.perf_counter()
    answers(images)
    return (time.perf_counter() - began) / len(images)


def evenly(part: Tensor, count: int) -> Tensor:
    """At most `count` of a part's indices, spread over it."""
    return part[torch.arange(min(count, len(part))) * len(part) // min(count, len(part))]


def _fresh(
    answers: Callable[[Tensor], Tensor],
    run: Callable[[Tensor], Tensor],
    images: Tensor,
    scoring: Scoring,
    search: Search,
    name: str,
) -> tuple[Judgement, tuple[float, float] | None]:
    """The judgement of the chosen variant on fresh images; the top-1 of the original and of it, if there are labels."""
    with search.progress(f"judging the choice on {len(images)} fresh images", 2 * len(images)) as step:
        belief = answers(images).cpu()
        step(len(images))
        given, _ = search.log.get(
            f"predictions and divergence of {name}, fresh {len(images)}",
            lambda: read_one(run, images, belief, name, step, scoring.read),
        )
    judged = scoring.judge(belief, given, labelled=True)
    before = scoring.top1(belief.argmax(-1)) if scoring.metric is None else None
    after = scoring.top1(torch.tensor(given)) if scoring.metric is None else None
    return judged, None if before is None or after is None else (before, after)
