"""What an exported file says of itself, as JSON in whatever place its format has for it: enough to feed it images and
to read its answers, with nothing but the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from ..data.labels import class_names
from ..errors import UserError, printable
from ..measure.subject import attention_of, tokens_of
from ..preparation import absurd, is_count
from ..sizes import channels, input_size, model_name

#: The key under which it is found.
KEY = "attendless"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Description:
    """A model, its input and its output.

    `batch` None: any number of images. `features`: the output is maps [B, C, h, w] in place of logits.
    `kernels`: it needs attendless's kernels beside the runtime. `int8`: its linear layers are quantised. `floats`: the
    precision of all other arithmetic, fp32 or bf16. `report` is what the check at its export found.
    """

    model: str
    attention: str
    tokens: str
    size: tuple[int, int]
    channels: int
    batch: int | None
    classes: int
    class_names: tuple[str, ...]
    features: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    crop_mode: str
    interpolation: str
    kernels: bool = False
    int8: bool = False
    floats: str = "fp32"
    digest: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def precision(self) -> str:
        """fp32, bf16 or int8."""
        return "int8" if self.int8 else self.floats

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, allow_nan=False)

    def data_config(self) -> dict[str, Any]:
        """As `timm.data.create_transform` takes it."""
        return {
            "input_size": (self.channels, *self.size),
            "mean": self.mean,
            "std": self.std,
            "crop_pct": self.crop_pct,
            "crop_mode": self.crop_mode,
            "interpolation": self.interpolation,
        }


def describe(
    model: nn.Module, *, name: str | None = None, batch: int | None = None, features: bool = False
) -> Description:
    """A model as it stands in memory."""
    config = resolve_model_data_config(model)
    return Description(
        model=name or model_name(model),
        attention=attention_of(model),
        tokens=tokens_of(model),
        size=input_size(model),
        channels=channels(model),
        batch=batch,
        classes=int(getattr(model, "num_classes", 0) or 0),
        class_names=class_names(model),
        features=features,
        mean=tuple(map(float, config["mean"])),
        std=tuple(map(float, config["std"])),
        crop_pct=float(config["crop_pct"]),
        crop_mode=str(config["crop_mode"]),
        interpolation=str(config["interpolation"]),
    )


def read(text: str | None, path: str | Path) -> Description:
    """The description in a file, or the error that says why there is none."""
    if not text:
        raise UserError(f"{str(path)!r} was not exported by attendless: it has no description")
    try:
        found = printable(json.loads(text))
        version = int(found.pop("format"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{str(path)!r} is damaged: what it says of itself cannot be read") from None
    if version > FORMAT:
        raise UserError(f"{str(path)!r} is of format {version}; this attendless reads up to {FORMAT}")
    known = {field.name for field in dataclasses.fields(Description)}
    try:
        given: dict[str, Any] = {
            key: tuple(x) if isinstance(x, list) else x for key, x in found.items() if key in known
        }
        made = Description(**given)
        why = _wrong(made)
    except TypeError:
        raise UserError(f"{str(path)!r} is damaged: what it says of itself does not describe a model") from None
    if why:
        raise UserError(f"{str(path)!r} is damaged: what it says of itself does not describe a model: {why}")
    return made


def _wrong(found: Description) -> str:
    """Which value cannot be a model's; empty if all can. Programs allocate memory by them and print them."""
    preparation = {**found.data_config(), "num_classes": found.classes}
    if absent := [name for name, value in preparation.items() if value is None]:
        return f"{absent[0]} is missing"
    if why := absurd(preparation | {"label_names": found.class_names or None}):
        return why
    for name in ("model", "attention", "tokens", "digest"):
        if not isinstance(getattr(found, name), str):
            return f"{name} is no text"
    for name in ("features", "kernels", "int8"):
        if not isinstance(getattr(found, name), bool):
            return f"{name} is neither true nor false"
    if found.floats not in ("fp32", "bf16"):
        return f"floats={str(found.floats)[:60]}"
    if found.batch is not None and not is_count(found.batch, 2**16):
        return f"batch={str(found.batch)[:60]}"
    if len(found.mean) not in (1, found.channels):
        return f"{len(found.mean)} numbers in mean for {found.channels} channels"
    if not isinstance(found.class_names, tuple) or len(found.class_names) not in (0, found.classes):
        return f"{str(found.class_names)[:60]} as names for {found.classes} classes"
    if not isinstance(found.report, Mapping) or not isinstance(found.versions, Mapping):
        return "no report or versions"
    return ""
