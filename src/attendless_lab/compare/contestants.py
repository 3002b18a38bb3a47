"""What is compared: the product of every list that was given, each combination in a folder of its own.

    DIR/<model, size, data, recipe>/<attention>/cost.json       what it costs, measured once
    DIR/<model, size, data, recipe>/<attention>/seed-0/…        one training run, which resumes

A folder's name is made of what stands in it, so a run that was finished is found again, whoever asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attendless.errors import UserError
from attendless.train.recipe import Recipe
from attendless.train.training import settle

#: What `attendless compare` compares if nothing is said: one attention of every kind.
ATTENTIONS = (
    "full",
    "window:size=4",
    "bigbird:form=1d,block=8,random=1",
    "foveal:keep=0.1,cell=2",
    "efficient",
    "linformer",
)
MODEL = "columnar_micro_patch4_32"
#: Scenes with things in the way, so that attentions differ in how well they answer.
PICTURES = "scenes:colours=5,shade=25,clutter=4,grain=4"
#: So few that all of it takes minutes on two cores.
DATA = f"{PICTURES},train=7000,val=1000"
RECIPE = "scenes:epochs=3,lr=3e-3"
SEEDS = (0, 1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What contestants share: they are compared with those of the same setting only."""

    model: str
    data: str
    recipe: Recipe
    patch: int | None = None
    #: The recipe as it was asked for. What counts is what it amounts to.
    recipe_name: str = dataclasses.field(default="", compare=False)

    def as_dict(self) -> dict[str, Any]:
        """As JSON. The seed is each run's own."""
        found = json.loads(json.dumps(dataclasses.asdict(self)))
        del found["recipe"]["seed"]
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Setting:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found["recipe"].items()}
        return cls(**{**found, "recipe": Recipe(**fields)})

    @property
    def folder(self) -> str:
        patch = f"-patch{self.patch}" if self.patch else ""
        data = Path(self.data).name or self.data
        meaning = {name: value for name, value in self.as_dict().items() if name != "recipe_name"}
        return slug(f"{Path(self.model).stem}{patch}-{data}-{self.recipe_name.partition(':')[0]}", meaning)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An attention in a setting: one row of the results."""

    setting: Setting
    attention: str

    @property
    def folder(self) -> str:
        return f"{self.setting.folder}/{slug(self.attention, self.attention)}"

    def as_dict(self) -> dict[str, Any]:
        return {"setting": self.setting.as_dict(), "attention": self.attention}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Contestant:
        return cls(Setting.from_dict(found["setting"]), str(found["attention"]))


def slug(text: str, meaning: Any) -> str:
    """A folder name one can read, with a few digits of what it means so that no two are the same."""
    digits = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=3).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', text).strip('-.')[:60]}-{digits}"


def combinations(
    models: Sequence[str],
    attentions: Sequence[str],
    patches: Sequence[int | None],
    data: Sequence[str],
    recipes: Sequence[str],
    fields: Mapping[str, Any],
) -> list[Contestant]:
    """Every combination, each once, in the order given. `fields` replace fields of every recipe."""
    if not attentions:
        raise UserError("compare needs attentions to compare: give at least one")
    given = itertools.product(models, patches or (None,), data, recipes)
    settings = [Setting(m, d, settle(r, {**fields, "seed": 0}), p, r) for m, p, d, r in given]
    return list(dict.fromkeys(Contestant(s, a) for s in settings for a in attentions))


def remember(out: Path, contestants: Sequence[Contestant], command: str) -> None:
    """Note who takes part in `out`; those noted before stay, so a later call adds rows to the same results."""
    from attendless.storage import atomic

    known, commands = recall(out)
    every = list(dict.fromkeys([*known, *contestants]))
    commands = list(dict.fromkeys([*commands, *([command] if command else [])]))
    payload = {"commands": commands, "contestants": [contestant.as_dict() for contestant in every]}
    with atomic(out / "contest.json") as temporary:
        temporary.write_text(json.dumps(payload, indent=1) + "\n")


def recall(out: Path) -> tuple[list[Contestant], list[str]]:
    """Who takes part in `out`, and the commands that said so."""
    path = out / "contest.json"
    if not path.is_file():
        return [], []
    try:
        found = json.loads(path.read_text())
        return [Contestant.from_dict(c) for c in found["contestants"]], list(map(str, found["commands"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}): remove it, and give the command again; no run is lost"
        ) from None
