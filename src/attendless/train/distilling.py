"""`distill`: recipes as lists of phases, and the run over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..convert import convert, open_model
from ..convert.fit import fit, fits
from ..convert.predictor import predicts, save_predictor
from ..data.labels import NO_LABELS, class_names, match_labels
from ..data.opening import open_splits
from ..errors import UserError, unknown
from ..integrations.discovery import find_slots
from ..measure.accuracy import load_images, preprocessing
from ..options import Options, option, parse_options
from ..randomness import WEIGHTS, randomness
from ..sizes import input_size
from .disk import goes_on_later
from .distill_losses import Distillation
from .objective import answers_patches
from .recipe import RANDAUG, Recipe, Run, replace_fields
from .state import Phase
from .training import (
    Begin,
    Result,
    as_model_wants,
    finish,
    model_text,
    set_drop,
)

#: Images to which an attention is fitted before training, if it can be fitted.
FITTED_TO = 32
#: In `Phase.trained`: parameters that the teacher lacks, and those that it has.
NEW, OLD = "new", "old"


@dataclasses.dataclass(frozen=True)
class Losses(Options):
    """The weight of each loss term; `distill_losses` defines the terms."""

    label: float = option(0.0, "cross-entropy with the labels", low=0)
    logits: float = option(0.0, "KL divergence from the teacher's logits", low=0)
    tokens: float = option(0.0, "squared difference of the last layer's tokens", low=0)
    maps: float = option(0.0, "squared difference of the attention maps", low=0)
    patches: float = option(0.0, "cross-entropy of each patch's prediction with the teacher's, for LV-ViT", low=0)
    extra: float = option(1.0, "losses that attentions and reducers define", low=0)
    temperature: float = option(1.0, "temperature of both softmaxes in the logits term", low=0.01)
    mixtoken: float = option(0.0, "MixToken's alpha: patches of two images in one; 0 for none, 1 in LV-ViT", low=0)


_STUDENT = Recipe(weight_decay=0.05, warmup_lr=0.0, crop_scale=(0.35, 1.0), crop_pct=0.9, eval_every=1)


def imitate() -> list[Phase]:
    """Trains on the teacher's logits and last-layer tokens, without labels. If the attention has new parameters, they
    are trained alone first.

    attendless distill deit_tiny_patch16_224 --weights F --attention sparsifiner:keep=0.25 --data DIR
    Expected: about 1.4 points below the teacher (docs/results/sparsifiner.md, where the first phase used keep=0.1).
    Time: 40 minutes on one core for 1,800 images.
    """
    new = dataclasses.replace(_STUDENT, epochs=2, batch=16, lr=1e-3, min_lr=1e-5, warmup=0.1)
    whole = dataclasses.replace(_STUDENT, epochs=3, batch=32, lr=1e-4, min_lr=1e-6, warmup=0.5, clip=1.0)
    return [
        Phase(NEW, new, dataclasses.asdict(Losses(logits=1.0, tokens=1.0)), (NEW,)),
        Phase("all", whole, dataclasses.asdict(Losses(logits=1.0, tokens=0.2))),
    ]


def sparsifiner() -> list[Phase]:
    """Sparsifiner's two phases: predictors on the teacher's maps, then all parameters on labels and teacher.

    attendless distill deit_small_patch16_224 --weights F --attention sparsifiner:keep=0.1 --recipe sparsifiner …
    Expected: 79.42 top-1 (from the paper, not re-run). Time: not measured; requires GPUs.
    """
    both = Recipe(
        batch=1344, warmup=3, warmup_lr=0.0, weight_decay=0.05, ema=0.9999, smoothing=0.1, mixup=0.8, cutmix=1.0,
        augment="rand-m9-mstd0.5-inc1", jitter=0.4, erase=0.25, crop_pct=0.875,
    )  # fmt: skip
    return [
        Phase(
            NEW, dataclasses.replace(both, epochs=5, lr=3e-4, min_lr=2e-4), dataclasses.asdict(Losses(maps=1.0)), (NEW,)
        ),
        Phase(
            "all",
            dataclasses.replace(both, epochs=45, lr=8e-5, min_lr=2e-6),
            dataclasses.asdict(Losses(label=1.0, logits=0.5, tokens=0.5)),
        ),
    ]


_IMAGENET = Recipe(
    batch=1024, warmup_lr=1e-6, smoothing=0.1, mixup=0.8, cutmix=1.0, augment=RANDAUG, jitter=0.4, erase=0.25
)  # fmt: skip


def evit() -> list[Phase]:
    """EViT's fine-tuning: 30 epochs with gradually stronger token pruning. The authors use labels alone; this recipe
    adds the teacher's logits and, for LV-ViT, its patch predictions.

    attendless distill deit_small_patch16_224 --weights F --tokens evit:keep=0.7 --recipe evit …
    Expected: 79.5 top-1 (from Sparsifiner's paper, not re-run). Time: not measured; requires GPUs.
    """
    recipe = dataclasses.replace(_IMAGENET, epochs=30, lr=2e-5, min_lr=2e-6, weight_decay=1e-6, reduce=(1.0, 10.0))
    return [Phase("all", recipe, dataclasses.asdict(Losses(label=1.0, logits=0.5, patches=0.5)))]


def dynamicvit() -> list[Phase]:
    """DynamicViT: 5 epochs of the predictors alone, then 25 of all parameters, with the backbone's lr divided by 100.

    attendless distill deit_small_patch16_224 --weights F --tokens dynamicvit:keep=0.7 --recipe dynamicvit …
    Expected: 79.3 top-1 (from Sparsifiner's paper, not re-run). Time: not measured; requires GPUs.
    """
    losses = dataclasses.asdict(Losses(label=1.0, logits=0.5, tokens=0.5, patches=0.5))
    recipe = dataclasses.replace(_IMAGENET, lr=1e-3, min_lr=1e-5)
    return [
        Phase(NEW, dataclasses.replace(recipe, epochs=5, schedule="constant"), losses, (NEW,)),
        Phase("all", dataclasses.replace(recipe, epochs=25, backbone_lr=0.01), losses),
    ]


PHASES: dict[str, Callable[[], list[Phase]]] = {
    make.__name__: make for make in (imitate, sparsifiner, evit, dynamicvit)
}


def distill(
    model: str | Path | nn.Module,
    data: str | Path,
    *,
    attention: str | None = None,
    tokens: str | None = None,
    weights: str | Path | None = None,
    pretrained: bool = False,
    recipe: str | Sequence[Phase] = "imitate",
    change: Mapping[str, str] | None = None,
    predictor: str | Path | None = None,
    out: str | Path = "attendless-out/distill",
    run: Run | None = None,
    **fields: Any,
) -> Result:
    """Train a converted copy of `model` to reproduce the outputs of `model`. The same call with the same `out` resumes.

    Args:
        model: The teacher: a model name, the path of a saved file, or a module.
        data: Images to train on; labels are optional.
        attention: Attention spec of the student (default: full attention).
        tokens: Token reducer spec of the student (default: none).
        weights: File with the teacher's weights.
        pretrained: Download timm's pretrained weights for the teacher.
        recipe: Name of a distillation recipe, or a list of phases.
        change: Changes of phases by name, such as `{"all": "epochs=3,loss.tokens=1"}`.
        predictor: Trained key predictor to start from. A predictor that is trained here is also saved, as
            `predictor.safetensors`.
        out: Folder for weights and metrics.
        run: Settings that do not change the weights: workers, device, cache, checkpoints.
        fields: Fields to replace in the recipe of every phase.

    Raises:
        UserError: Neither `attention` nor `tokens` is given, a name is unknown, or `out` holds a different run.
    """
    if attention is None and tokens is None:
        raise UserError("nothing to distil: give an attention, such as foveal:keep=0.1, or tokens, such as tome:r=8")
    phases = edit(recipe, change or {}, fields)
    size = phases[-1].recipe.height_width
    if isinstance(model, nn.Module):
        teacher: Any = convert(model, "full", tokens="none", size=size)
    else:
        teacher = open_model(
            model,
            attention="full",
            tokens="none",
            weights=weights,
            pretrained=pretrained,
            size=size,
            below_breakeven="keep",
        )
    train, val, note = open_splits(data)
    labelled, remark = own_classes(train.classes, teacher)
    with randomness(WEIGHTS, phases[0].recipe.seed):
        student: Any = convert(teacher, attention, tokens=tokens, below_breakeven="keep", predictor=predictor)
        if fits(find_slots(student)):  # start closer to the teacher
            fit(student, teacher, load_images(train, preprocessing(teacher, input_size(teacher)), FITTED_TO))
    phases = fit_to(phases, student, teacher, labelled=labelled)
    set_drop(student, phases[-1].recipe)
    teacher = teacher.eval().requires_grad_(False)
    begin = Begin(student, model_text(model), data, attention, Path(out), run or Run(), note, [remark])
    names = class_names(teacher)
    pictures = as_model_wants(student, train, val, phases[-1].recipe, names=names, labelled=labelled)
    with goes_on_later(begin.out):
        session = begin.session(functools.partial(Distillation, teacher=teacher), phases, pictures, teacher)
        session.after_phase = functools.partial(leave_predictor, student, begin)
        return finish(session)


def own_classes(given: Sequence[str], teacher: nn.Module) -> tuple[bool, str]:
    """Whether the labels are the teacher's classes, and a remark if they are not or if this is an assumption.

    Images with other labels are used without their labels.
    """
    if not given:
        return False, ""
    try:
        found = match_labels(given, teacher)
    except UserError:
        found = NO_LABELS
    if found.classes != tuple(range(getattr(teacher, "num_classes", 0))):
        return False, "the labels are not the teacher's classes: training ignores them, and the score is the agreement"
    taken = "the teacher has no class names: folders are matched to classes in sorted order"
    return True, taken if found.how == "in sorted order" else ""


def leave_predictor(student: nn.Module, begin: Begin, phase: Phase) -> None:
    """After a phase that trains only predictors: save them, for use with the unchanged weights."""
    slots = find_slots(student)
    learned = {f"{slot.name}.attn.{name}" for slot in slots if predicts(slot.attn) for name in _predictor(slot.attn)}
    if set(phase.trained) == learned:
        card = {"data": Path(begin.data).name, "attention": begin.attention, "recipe": dataclasses.asdict(phase.recipe)}
        save_predictor(slots, begin.name, begin.out / "predictor.safetensors", card)


def _predictor(attention: Any) -> Mapping[str, Any]:
    return attention.predictor()


def edit(recipe: str | Sequence[Phase], change: Mapping[str, str], fields: Mapping[str, Any]) -> list[Phase]:
    """The phases with changed recipes and loss weights; an unknown name raises an error that lists the valid ones."""
    if isinstance(recipe, str) and recipe not in PHASES:
        raise unknown("distillation recipe", recipe, PHASES)
    phases = PHASES[recipe]() if isinstance(recipe, str) else list(recipe)
    for name in change:
        if name not in [phase.name for phase in phases]:
            raise unknown("phase", name, (phase.name for phase in phases))
    return [_edit_phase(phase, change.get(phase.name, ""), fields) for phase in phases]


#: Prefix of a loss weight in the text of a phase: `tokens` alone means the token reducer everywhere else.
LOSS = "loss."


def _edit_phase(phase: Phase, text: str, fields: Mapping[str, Any]) -> Phase:
    """`phase` with `fields` of its recipe replaced, then changed by `text`: `epochs=3,loss.tokens=1,trained=old`."""
    owner = f"phase {phase.name}"
    items = [item for item in text.split(",") if item]
    for name in (item.partition("=")[0] for item in items):
        if name in {field.name for field in dataclasses.fields(Losses)}:
            raise UserError(f"{owner}: write the weight of a loss as {LOSS}{name}=…")
    of_losses = [item.removeprefix(LOSS) for item in items if item.startswith(LOSS)]
    of_phase = [item.partition("=")[2] for item in items if item.startswith("trained=")]
    of_recipe = [item for item in items if not item.startswith((LOSS, "trained="))]
    given = dataclasses.asdict(parse_options(",".join(of_losses), Losses, f"the losses of {owner}"))
    weights = dict(phase.losses) | {n: given[n] for n in (i.partition("=")[0] for i in of_losses)}
    recipe = replace_fields(dataclasses.replace(phase.recipe, **fields), ",".join(of_recipe), owner)
    trained = tuple(of_phase[-1].split("/")) if of_phase else phase.trained
    return dataclasses.replace(phase, recipe=recipe, losses=weights, trained=trained)


def fit_to(phases: Sequence[Phase], student: nn.Module, teacher: nn.Module, *, labelled: bool) -> list[Phase]:
    """Replace `new` and `old` by parameter names; remove phases without parameters or epochs, the label loss without
    labels, and the patches loss without a patch head."""
    known = {name for name, _ in teacher.named_parameters()}
    names = [name for name, _ in student.named_parameters()]
    meant = {NEW: [name for name in names if name not in known], OLD: [name for name in names if name in known]}
    there = {"label": labelled, "patches": answers_patches(student)}
    fitted = []
    for phase in phases:
        trained = tuple(name for pattern in phase.trained for name in meant.get(pattern, [pattern]))
        losses = {name: weight for name, weight in phase.losses.items() if there.get(name, True)}
        if trained and phase.recipe.total_epochs:
            fitted.append(dataclasses.replace(phase, trained=trained, losses=losses))
    if not fitted:
        raise UserError("nothing to train: every phase is empty for this attention")
    return fitted
