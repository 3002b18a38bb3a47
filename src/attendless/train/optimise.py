"""Optimiser, learning rate schedule and averaged weights, all from timm, by the settings of a recipe."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..attention.selection import HasPredictor
from ..errors import UserError, unknown
from ..tokens import Reducer
from .learning import Learning


def choose_trained(model: nn.Module, patterns: Sequence[str]) -> int:
    """Train only parameters whose names match a pattern (`*`, `blocks.*.attn.predictor.*`); returns their number."""
    chosen = 0
    for name, parameter in model.named_parameters():
        learns = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        parameter.requires_grad_(learns)
        chosen += parameter.numel() * learns
    if not chosen:
        names = [name for name, _ in model.named_parameters()]
        raise UserError(f"no parameter matches {', '.join(patterns)}. There are: {', '.join(names[:8])}, …")
    return chosen


def make_optimizer(model: nn.Module, recipe: Learning) -> Optimizer:
    known = [str(name) for name in list_optimizers()]
    if recipe.optimizer not in known:
        raise unknown("optimizer", recipe.optimizer, known)
    adam: dict[str, Any] = {"betas": recipe.betas, "eps": recipe.eps} if "adam" in recipe.optimizer else {}
    made = create_optimizer_v2(
        model,
        recipe.optimizer,
        lr=recipe.rate(),
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay if recipe.layer_decay < 1 else None,
        **adam,
    )
    if recipe.backbone_lr != 1:
        slow_backbone(made, model, recipe.backbone_lr)
    return made


def slow_backbone(optimizer: Optimizer, model: nn.Module, factor: float) -> None:
    """Multiply the learning rate of all parameters except token reducers and predictors by `factor`."""
    own: set[int] = set()
    for module in model.modules():
        if isinstance(module, Reducer):
            own |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, HasPredictor):
            own |= {id(parameter) for parameter in module.predictor().values()}
    for group in list(optimizer.param_groups):
        mine = [parameter for parameter in group["params"] if id(parameter) in own]
        others = [parameter for parameter in group["params"] if id(parameter) not in own]
        slow = group.get("lr_scale", 1.0) * factor
        if not mine:
            group["lr_scale"] = slow
        elif others:
            group["params"] = mine
            optimizer.add_param_group({**group, "params": others, "lr_scale": slow})


class Schedule:
    """The learning rate: a function of the step, or of the validation loss (plateau)."""

    def __init__(self, optimizer: Optimizer, recipe: Learning, per_epoch: int) -> None:
        self.optimizer = optimizer
        self.plateau = None
        stepped = recipe.schedule not in ("plateau", "constant")
        for group in optimizer.param_groups:
            # timm's schedulers multiply by the factor of the group, so the initial rate must not include it.
            group["lr"] = recipe.rate() * (1.0 if stepped else group.get("lr_scale", 1.0))
        self.by_step = scheduler(optimizer, recipe, per_epoch) if stepped else None
        if recipe.schedule == "plateau":
            self.plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=recipe.patience, min_lr=recipe.min_lr)

    def before(self, step: int) -> None:
        if self.by_step is not None:
            self.by_step.step_update(step)

    def after_epoch(self, validation_loss: float | None) -> None:
        if self.plateau is not None and validation_loss is not None:
            self.plateau.step(validation_loss)

    def rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def state(self) -> dict[str, Any]:
        # timm's plateau scheduler does not save its count of bad epochs; PyTorch's does.
        return {} if self.plateau is None else dict(self.plateau.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        if self.plateau is not None:
            self.plateau.load_state_dict(state)


def scheduler(optimizer: Optimizer, recipe: Learning, per_epoch: int) -> Scheduler:
    """timm's scheduler for a learning rate that is a function of the step."""
    steps, schedule = recipe.falling(per_epoch), str(recipe.schedule)
    rising: dict[str, Any] = {
        "warmup_t": min(steps, recipe.rising(per_epoch)),
        "warmup_lr_init": recipe.warmup_lr,
        "t_in_epochs": False,
    }
    if schedule == "step":
        ends = [round(share * steps) for share in recipe.milestones]  # type: ignore[attr-defined]
        return MultiStepLRScheduler(optimizer, decay_t=ends, decay_rate=0.1, **rising)
    length: dict[str, Any] = {"t_initial": max(1, steps), "lr_min": min(recipe.min_lr, recipe.rate()), "cycle_limit": 1}
    if schedule == "poly":
        return PolyLRScheduler(optimizer, power=0.9, **length, **rising)
    return CosineLRScheduler(optimizer, **length, **rising)


class Average:
    """Exponential moving average of the weights, or the model itself with a decay of 0."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        from timm.utils import ModelEmaV3

        self.own = model
        self.ema = ModelEmaV3(model, decay=decay, use_warmup=True) if decay else None

    @property
    def model(self) -> nn.Module:
        """The weights to evaluate and to save."""
        return self.own if self.ema is None else self.ema.module

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.ema is not None:
            self.ema.update(self.own, step=step)

    def state(self) -> dict[str, Any]:
        return {} if self.ema is None else self.ema.module.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        if self.ema is not None:
            self.ema.module.load_state_dict(state)
