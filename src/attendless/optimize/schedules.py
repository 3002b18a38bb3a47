"""Token schedules: how many tokens each layer removes, searched from none to many.

1. `token_times` measures the time of a block for a few numbers of tokens, with and without the reducer. `TimeModel`
   predicts the time of any schedule from it.
2. `token_sensitivities` measures the divergence KL(baseline ‖ reduced) of the predictions if one layer alone removes
   some of its tokens. `DamageModel` predicts the divergence of any schedule from it.
3. `schedule_solver` finds the schedules with the lowest predicted divergence for their predicted time. A few are
   measured, and the model is fitted to them.
4. The search measures the best schedules and refines those that no other beats in both time and damage: tokens move
   from one layer to another, or a layer removes more or fewer.

Where tokens are removed matters as much as how many. The first layers save the most and damage the most. Where choosing
tokens is slow, a few layers that remove many are better than many layers that remove few.

The search works for every reducer that states a `search_space`.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..backbones import Backbone, is_backbone
from ..errors import UserError
from ..options import Spec
from ..tokens import SearchSpace, parse_tokens, reducers
from .block_times import TimeModel, block_rows, patches_after, repeat_to_batch, token_times
from .candidates import with_tokens
from .judge import logits
from .schedule_solver import LayerTime, front
from .search import Search
from .token_damage import DamageModel, token_sensitivities

#: Number of schedules that the search judges: of the solver's, and with their refinements.
SOLVED, TRIALS = 20, 32
#: Solved schedules to which the damage model is fitted.
_ANCHORS = 6
#: The schedule on which options of the reducer are compared: this share of the tokens, removed between these shares of
#: the depth.
_SPAN, _REMOVED = (1 / 6, 11 / 12), 0.65
#: A mutation moves one in so many of the patches that a layer has before any reduction, or a few times that.
_STEP = 40


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A token schedule and its predicted cost.

    removed: tokens that each layer removes.
    tokens: the spec of the reducer, as `convert` takes it; empty for the unchanged model.
    ms: predicted milliseconds of all blocks.
    divergence: mean KL(baseline ‖ reduced) on the images of the search, in nats.
    predicted: the divergence that the damage model predicted; 0 for schedules that were not solved.
    drop: expected accuracy drop on these images, in percentage points.
    """

    removed: tuple[int, ...]
    tokens: str
    ms: float
    divergence: float = 0.0
    drop: float = 0.0
    predicted: float = 0.0


def space_of(tokens: str) -> SearchSpace | None:
    """The search space of a reducer that is given by name alone; None if `tokens` is to be taken as it is."""
    spec = parse_tokens(tokens)
    return reducers()[spec.name].search_space if spec is not None and tokens.strip() == spec.name else None


def why_not(backbone: nn.Module, tokens: str) -> str:
    """Why `tokens` cannot reduce the tokens of a model; empty if it can."""
    if not is_backbone(backbone):
        return f"{type(backbone).__name__} keeps timm's own layers, which need every token"
    if backbone.tokens:
        return f"its tokens are already reduced by {backbone.tokens}"
    try:
        with_tokens(backbone, one_each(tokens, len(backbone.blocks)))
    except UserError as error:
        return str(error)
    return ""


def one_each(tokens: str, depth: int) -> Spec:
    """The reducer removing one token in every layer; if it is to be taken as it is, as it is."""
    spec, space = parse_tokens(tokens), space_of(tokens)
    assert spec is not None
    return spec if space is None else spec.replace(**{space.schedule: (1,) * depth})


@torch.inference_mode()
def schedules(backbone: Backbone, tokens: str, search: Search, max_drop: float) -> list[Schedule]:
    """The unchanged model, then the schedules for `tokens`.

    A reducer name with a search space gives schedules from few tokens to many, each faster than the one before by
    prediction, none with an expected drop of more than `max_drop` percentage points. Any other spec gives itself.
    """
    reducer = one_each(tokens, len(backbone.blocks))
    space = space_of(tokens)
    trials = Trials(backbone, reducer, space, search, time_model(backbone, tokens, search))
    if space is None:
        return [trials.unchanged, trials.judged(trials.timed(reducer))]
    choices = [(option, value) for option, values in space.options.items() for value in values]
    with search.progress("searching token schedules", len(choices) + TRIALS) as step:
        for option, values in space.options.items():
            trials.choose(option, values, step)
        return evolve(trials, max_drop, TRIALS, step, solved(trials, max_drop), search.expired)


def time_model(backbone: Backbone, tokens: str, search: Search) -> TimeModel:
    """The time of any schedule of a reducer, from the measured or logged times of single blocks."""
    reducer = one_each(tokens, len(backbone.blocks))
    batch = repeat_to_batch(search.images, search.batch)
    measured = search.log.get(
        f"milliseconds by tokens with {reducer}, batch {search.batch} {search.where.name}",
        partial(token_times, backbone, reducer, batch, search.budget, search.progress, search.where),
    )
    return TimeModel(measured)


class Judge(Protocol):
    """What `evolve` needs: the unchanged model, the patches of each layer, and the time and damage of a schedule."""

    unchanged: Schedule

    @property
    def patches(self) -> Sequence[int]: ...

    def removing(self, removed: Sequence[int]) -> Schedule: ...

    def judged(self, schedule: Schedule) -> Schedule: ...


class Trials:
    """Time and damage of token schedules, tried on views of a backbone."""

    def __init__(
        self, backbone: Backbone, reducer: Spec, space: SearchSpace | None, search: Search, time_model: TimeModel
    ) -> None:
        self.backbone, self.reducer, self.space, self.search = backbone, reducer, space, search
        self.time_model = time_model
        baseline = self.view("")
        self.baseline = logits(baseline, search.images, "the model")
        self.patches = [row.grid.patches for row in block_rows(baseline)]
        self.unchanged = Schedule((0,) * len(self.patches), "", time_model(baseline))

    def view(self, tokens: str | Spec) -> Any:
        """The backbone with reduced tokens, as conversion would return it."""
        view: Any = with_tokens(self.backbone, tokens)
        view.use_tail(True)
        return view

    def choose(self, option: str, values: Sequence[Any], step: Callable[[int], None]) -> None:
        """Set `option` to the value with which one schedule of medium strength damages the least."""
        best, least = self.reducer, math.inf
        for value in values:
            self.reducer = self.reducer.replace(**{option: value})
            try:
                found = self.judged(self.removing(_regular(self.patches))).divergence
            except UserError:  # an attention that does not provide what the reducer reads for this value
                found = math.inf
            if found < least:
                best, least = self.reducer, found
            step(1)
        self.reducer = best

    def removing(self, removed: Sequence[int]) -> Schedule:
        """The schedule that removes these numbers of tokens, or as many as the reducer can, with its time."""
        found = self.timed(self._spec(removed))
        return dataclasses.replace(found, tokens=str(self._spec(found.removed)))

    def timed(self, tokens: Spec) -> Schedule:
        """The schedule of a spec, with its time."""
        view = self.view(tokens)
        removed = tuple(row.grid.patches - patches_after(view, i, row) for i, row in enumerate(block_rows(view)))
        return Schedule(removed, str(tokens), self.time_model(view))

    def judged(self, schedule: Schedule) -> Schedule:
        """The schedule with its damage."""
        far, drop = self.search.log.get(f"damage of {schedule.tokens}", partial(self.damage, schedule.tokens))
        return dataclasses.replace(schedule, divergence=far, drop=drop)

    def damage(self, tokens: str) -> tuple[float, float]:
        """Divergence and drop, in points, on the images of the search."""
        changed = logits(self.view(tokens), self.search.images, tokens)
        return self.search.distance(self.baseline, changed), self.search.drop(self.baseline, changed)

    def damage_model(self) -> DamageModel:
        """A damage model from the sensitivities of the layers, not fitted yet."""

        def alone(layer: int, removed: int) -> Any:
            return with_tokens(
                self.backbone, self._spec([removed if i == layer else 0 for i in range(len(self.patches))])
            )

        baseline = self.view("")
        measured = self.search.log.get(
            f"damage by layer of {self.reducer}",
            partial(token_sensitivities, baseline, alone, self.patches, self.search),
        )
        return DamageModel(tuple(self.patches), tuple(map(tuple, measured)))

    def layer_times(self) -> Sequence[LayerTime]:
        return self.time_model.layers(self.view(""))

    def _spec(self, removed: Sequence[int]) -> Spec:
        assert self.space is not None
        return self.reducer.replace(**{self.space.schedule: tuple(removed)})


def solved(trials: Trials, max_drop: float) -> list[tuple[list[int], float]]:
    """The schedules that the solver finds, each with its predicted divergence, from few tokens removed to many.

    The damage model is fitted to a few measured schedules, and the schedules are solved again with it.
    """
    damage, times = trials.damage_model(), trials.layer_times()
    found = front(damage, times)
    # Neither the mildest nor the strongest: the fit should be best between them.
    anchors = _evenly(trials, found, _ANCHORS + 2)[1:-1] or found
    measured = [trials.judged(trials.removing(removed)) for removed in anchors]
    within = [one for one in measured if one.drop <= max_drop] or measured[:1]
    if not within:
        return []
    damage = damage.fitted([one.removed for one in within], [one.divergence for one in within])
    beyond = [one.divergence for one in measured if one not in within]
    most = min(beyond, default=math.inf)
    best = [removed for removed in front(damage, times) if damage(removed) < most]
    return [(list(removed), damage(removed)) for removed in _evenly(trials, best, SOLVED)]


def _evenly(trials: Trials, found: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    return evenly(found, [trials.removing(removed).ms for removed in found], count)


def evenly(found: Sequence[tuple[int, ...]], ms: Sequence[float], count: int) -> list[tuple[int, ...]]:
    """At most `count` of the schedules, at even steps of their milliseconds: a sweep of prices has many mild ones."""
    if not found:
        return []
    aims = [min(ms) + (max(ms) - min(ms)) * i / max(1, count - 1) for i in reversed(range(count))]
    return list(dict.fromkeys(found[min(range(len(found)), key=lambda i: abs(ms[i] - aim))] for aim in aims))


def evolve(
    judge: Judge,
    max_drop: float,
    trials: int,
    step: Callable[[int], None],
    starts: Sequence[tuple[list[int], float]] = (),
    expired: Callable[[], bool] = lambda: False,
) -> list[Schedule]:
    """The schedules that no other one tried beats in both time and damage, slowest first.

    The first is the unchanged model. None has an expected drop of more than `max_drop` percentage points. The search
    tries `starts`, schedules with their predicted divergence, before it mutates the best schedules. It ends early when
    `expired` returns true, but not before `starts` are tried.
    """
    draw, seen, best = random.Random(0), {judge.unchanged.removed}, list[Schedule]()
    waiting = list(starts)
    for _ in range(trials):
        if not waiting and expired():
            break
        for _ in range(100):  # a mutation may repeat a schedule, or be slower than the unchanged model
            parent = draw.choice([judge.unchanged, *best])
            removed, predicted = waiting.pop(0) if waiting else (_mutated(parent.removed, judge.patches, draw), 0.0)
            found = judge.removing(removed)
            if found.removed not in seen and found.ms < judge.unchanged.ms:
                break
        else:
            break
        seen.add(found.removed)
        found = dataclasses.replace(judge.judged(found), predicted=predicted)
        if found.drop <= max_drop and not any(o.ms <= found.ms and o.divergence <= found.divergence for o in best):
            best = [o for o in best if o.ms < found.ms or o.divergence < found.divergence] + [found]
        step(1)
    return [judge.unchanged, *sorted(best, key=lambda one: -one.ms)]


def _regular(patches: Sequence[int]) -> list[int]:
    """A share of the patches removed evenly in the layers of `_SPAN`, never in the last."""
    first, end = (round(part * len(patches)) for part in _SPAN)
    first = min(first, max(0, len(patches) - 2))
    layers = range(first, max(first + 1, min(end, len(patches) - 1)))
    return [round(_REMOVED * n / len(layers)) if i in layers else 0 for i, n in enumerate(patches)]


def _mutated(removed: Sequence[int], patches: Sequence[int], draw: random.Random) -> list[int]:
    """A schedule with some tokens moved from one layer to another, or with more or fewer tokens removed."""
    found = list(removed)
    giver, taker = draw.randrange(len(found)), draw.randrange(len(found))
    some = draw.choice([1, 2, 4, 8]) * max(1, patches[giver] // _STEP)
    amount = draw.choice([some, found[giver]]) if found[giver] else some
    what = draw.choice(["move", "move", "more", "fewer"])
    if what != "more":
        amount = min(amount, found[giver])
        found[giver] -= amount
    if what != "fewer":
        found[taker] += amount
    return found
