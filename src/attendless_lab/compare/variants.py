"""The variants of a comparison: the product of all lists given, each combination in its own folder.

    DIR/<model, size, data, recipe>/<attention>/cost.json       its cost, measured once
    DIR/<model, size, data, recipe>/<attention>/seed-0/…        one training run, which resumes

The name of a folder is derived from its content, so that another command finds a finished run again.
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

from attendless.attention import attentions as registered
from attendless.attention import parse
from attendless.errors import UserError
from attendless.train.recipe import Recipe
from attendless.train.training import settle

#: Stands for one spec of every registered attention in `attendless compare --attention`.
ALL = "all"
#: The default attentions of `attendless compare`: one of every kind.
ATTENTIONS = (
    "full",
    "window:size=4",
    "bigbird:form=1d,block=8,random=1",
    "foveal:keep=0.1,cell=2",
    "efficient",
    "linformer",
)
#: Less attention reads the scores of the layer before, so it alternates with full attention.
_LESS = "full+lavit"
MODEL = "columnar_micro_patch4_32"
#: Scenes with clutter, so that attentions differ in accuracy.
PICTURES = "scenes:colours=5,shade=25,clutter=4,grain=4"
#: So few images that the comparison takes minutes on two cores.
DATA = f"{PICTURES},train=7000,val=1000"
RECIPE = "scenes:epochs=3,lr=3e-3"
SEEDS = (0, 1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What variants share; a variant is compared only with those of the same setting."""

    model: str
    data: str
    recipe: Recipe
    patch: int | None = None
    #: The recipe as it was given. Equality and folder depend on its fields alone.
    recipe_name: str = dataclasses.field(default="", compare=False)

    def as_dict(self) -> dict[str, Any]:
        """As JSON, without the seed, which belongs to each run."""
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
class Variant:
    """An attention in a setting: one row of the results."""

    setting: Setting
    attention: str

    @property
    def folder(self) -> str:
        return f"{self.setting.folder}/{slug(self.attention, self.attention)}"

    def as_dict(self) -> dict[str, Any]:
        return {"setting": self.setting.as_dict(), "attention": self.attention}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Variant:
        return cls(Setting.from_dict(found["setting"]), str(found["attention"]))


def slug(text: str, meaning: Any) -> str:
    """A readable folder name with a few digits of a hash of `meaning`, so that no two are equal."""
    digits = hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=3).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', text).strip('-.')[:60]}-{digits}"


def every_attention() -> tuple[str, ...]:
    """The specs that `all` stands for: one of each registered attention, also of plug-ins.

    The spec is the one of the default comparison, or else the attention with its default options.
    """
    chosen = {parse(spec).name: spec for spec in ATTENTIONS} | {"lavit": _LESS}
    return tuple(dict.fromkeys([*ATTENTIONS, *(chosen.get(name, name) for name in registered())]))


def combinations(
    models: Sequence[str],
    attentions: Sequence[str],
    patches: Sequence[int | None],
    data: Sequence[str],
    recipes: Sequence[str],
    fields: Mapping[str, Any],
) -> list[Variant]:
    """Every combination, each once, in the order given, with `all` replaced by `every_attention`.

    `fields` replace fields of every recipe.
    """
    if not attentions:
        raise UserError("compare needs attentions to compare: give at least one")
    expanded = [spec for given in attentions for spec in (every_attention() if given == ALL else (given,))]
    given = itertools.product(models, patches or (None,), data, recipes)
    settings = [Setting(m, d, settle(r, {**fields, "seed": 0}), p, r) for m, p, d, r in given]
    return list(dict.fromkeys(Variant(s, a) for s in settings for a in expanded))


def remember(out: Path, variants: Sequence[Variant], command: str) -> None:
    """Record the variants of `out`; earlier ones stay, so a later call adds rows to the same results."""
    from attendless.storage import atomic

    known, commands = recall(out)
    every = list(dict.fromkeys([*known, *variants]))
    commands = list(dict.fromkeys([*commands, *([command] if command else [])]))
    payload = {"commands": commands, "contestants": [variant.as_dict() for variant in every]}
    with atomic(out / "contest.json") as temporary:
        temporary.write_text(json.dumps(payload, indent=1) + "\n")


def recall(out: Path) -> tuple[list[Variant], list[str]]:
    """The recorded variants of `out`, and the commands that added them."""
    path = out / "contest.json"
    if not path.is_file():
        return [], []
    try:
        found = json.loads(path.read_text())
        return [Variant.from_dict(c) for c in found["contestants"]], list(map(str, found["commands"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}): remove it and give the command again; no run is lost"
        ) from None
