"""Specs: an attention and its options as one short text, the same in Python, on the command line and in reports.

    full                              a name alone: every option at its default
    bigbird:random=3,window=1         `,` between options, `=` before a value
    evit:keep=0.7,at=3/6/9,fuse       `/` between the items of a list; a bare word is true
    window/window/full/full           `/` between parts: one per stage of a hierarchical model, or per layer
    window:size=7+reduced:ratio=8     `+` alternates layer by layer, starting again in each stage or part
    2xfull/10xfoveal:keep=0.1         `NxPART`: the part for N layers (or stages)

Options are a frozen dataclass; the text is parsed by its annotations, and printing gives back the shortest text that
parses to the same options.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import UserError, unknown

O = TypeVar("O", bound="Options")
_PART = re.compile(r"(?:(?P<count>[0-9]{1,6})x)?(?P<name>[a-zA-Z_][\w.-]*)(?::(?P<options>.*))?$", re.DOTALL)


class Form(NamedTuple):
    """The text form of an option whose annotation does not determine it: a description, a reader and a writer."""

    expected: str
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = None, form: Form | None = None
) -> Any:
    """A field of an `Options` class.

    Args:
        default: The default value.
        help: One line of help.
        low: The smallest value allowed; default: no bound.
        high: The largest value allowed; default: no bound.
        form: How the text of the option is read and written, if its annotation does not determine it.
    """
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "form": form})


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of every mechanism's options. Subclasses are frozen dataclasses whose fields are made by `option`."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = cls.__dict__.get("__post_init__")
        if own is not None:  # check ranges even if the subclass does not call `super().__post_init__`

            @functools.wraps(own)
            def checked(self: Options) -> None:
                self._check_ranges()
                own(self)

            cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self._check_ranges()

    def _check_ranges(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low, high = field.metadata.get("low"), field.metadata.get("high")
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, bool) or not isinstance(item, int | float):
                    continue
                outside = (low is not None and not item >= low) or (high is not None and not item <= high)
                if outside or not math.isfinite(item):
                    expected = _range(low, high) or "a finite number"
                    raise UserError(f"option {field.name}={value_text(value)} is out of range: expected {expected}")

    def __str__(self) -> str:
        given = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                given.append(field.name if value is True else f"{field.name}={field_text(field, value)}")
        return ",".join(given)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A mechanism's name with its typed options; `str()` gives the text it is written as."""

    name: str
    options: Options

    def __str__(self) -> str:
        options = str(self.options)
        return f"{self.name}:{options}" if options else self.name

    def replace(self, **changes: Any) -> Spec:
        return Spec(self.name, dataclasses.replace(self.options, **changes))


def parse_options(text: str, kind: type[O], owner: str) -> O:
    """`"keep=0.1,fuse"` → `kind(keep=0.1, fuse=True)`; `owner` names the mechanism in errors."""
    pairs = [(name, value if equals else "true") for name, equals, value in _items(text)]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"option {name!r} of {owner} is given twice in {text!r}")
    return read_options(dict(pairs), kind, owner)


def read_options(texts: Mapping[str, str], kind: type[O], owner: str) -> O:
    """`{"keep": "0.1"}` → `kind(keep=0.1)`; `owner` names the mechanism in errors."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in fields:
            raise unknown(f"option of {owner}", name, fields)
        form = fields[name].metadata.get("form")
        values[name] = form.read(text) if form else _value(text, hints[name], f"{owner}:{name}")
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


def _items(text: str) -> list[tuple[str, str, str]]:
    return [item.partition("=") for item in text.split(",") if item]


def describe_options(kind: type[Options]) -> list[dict[str, Any]]:
    """Name, type, choices, default, range and help of each option, for `attendless list` and `attendless recipes`."""
    hints = typing.get_type_hints(kind)
    return [
        {
            "name": field.name,
            "type": form.expected if (form := field.metadata.get("form")) else _type_text(hints[field.name]),
            "choices": list(typing.get_args(hints[field.name])) if _is_choice(hints[field.name]) else None,
            "default": field.default,
            "range": _range(field.metadata.get("low"), field.metadata.get("high")),
            "help": field.metadata.get("help", ""),
        }
        for field in dataclasses.fields(kind)
    ]


def parse(text: str, kinds: Mapping[str, type[Options]], what: str = "attention") -> Spec:
    """One part, such as `foveal:keep=0.1`, into a `Spec`; `kinds` maps each existing name to its options."""
    match = _PART.match(as_text(text, what).strip())
    if not match or match["count"]:
        raise UserError(f"cannot read {what} {text!r}: expected NAME or NAME:OPTION=VALUE,…")
    if match["name"] not in kinds:
        raise unknown(what, match["name"], kinds)
    return Spec(match["name"], parse_options(match["options"] or "", kinds[match["name"]], match["name"]))


#: A text of each kind, for errors.
_EXAMPLES = {
    "attention": "'foveal:keep=0.1' for all layers, or '2xfull/10xfoveal:keep=0.1'",
    "token reducer": "'tome:r=8'",
}


def as_text(given: object, what: str = "attention") -> str:
    """`given`, if it is text; raise otherwise."""
    if isinstance(given, str):
        return given
    example = _EXAMPLES.get(what, "NAME:OPTION=VALUE")
    raise UserError(f"{what} was given as {type(given).__name__}, {str(given)[:60]}: expected a text such as {example}")


def split_parts(text: str, kinds: Mapping[str, type[Options]]) -> list[str]:
    """Cut a text at each `/` that is followed by a name (with or without a count); other `/` belong to a list."""
    parts: list[str] = []
    for piece in as_text(text).strip().split("/"):
        match = _PART.match(split_cycle(piece)[0])
        # An unknown word after a complete part is a misspelt name, not an item of a list.
        begins = match is not None and (match["name"] in kinds or not parts or "=" not in split_cycle(parts[-1])[-1])
        if begins or not parts:
            parts.append(piece)
        else:
            parts[-1] += "/" + piece
    return parts


def split_cycle(part: str) -> list[str]:
    """Cut a part at each `+` that a name follows; the `+` of a number such as 1e+06 stays."""
    return re.split(r"\+(?=[a-zA-Z_])", part)


def expand(text: str, count: int, kinds: Mapping[str, type[Options]], unit: str = "layers") -> list[Spec]:
    """The spec of each of `count` layers: one part for all, or several that add up to `count`."""
    runs = _runs(text, kinds)
    if len(runs) == 1 and runs[0][0] is None:
        return _repeat(runs[0][1], count)
    total = sum(n or 1 for n, _ in runs)
    if total != count:
        raise UserError(f"{text!r} names {total} {unit}, but the model has {count}")
    return [spec for n, cycle in runs for spec in _repeat(cycle, n or 1)]


def expand_stages(text: str, depths: Sequence[int], kinds: Mapping[str, type[Options]]) -> list[list[Spec]]:
    """The specs of each stage's layers: one part for all, one per stage, or one per layer."""
    runs = _runs(text, kinds)
    if len(runs) == 1 and runs[0][0] is None:
        return [_repeat(runs[0][1], depth) for depth in depths]
    total = sum(n or 1 for n, _ in runs)
    if total == len(depths):
        cycles = [cycle for n, cycle in runs for _ in range(n or 1)]
        return [_repeat(cycle, depth) for cycle, depth in zip(cycles, depths, strict=True)]
    if total == sum(depths):
        layers = iter(expand(text, total, kinds))
        return [[next(layers) for _ in range(depth)] for depth in depths]
    raise UserError(
        f"{text!r} names {total} parts, but the model has {len(depths)} stages with {sum(depths)} layers in all"
    )


def join(specs: Sequence[Spec]) -> str:
    """The inverse of `expand`: the shortest of runs such as `2xfull/foveal` and a cycle such as `window+full`."""
    return min(join_texts(list(map(str, specs))), _cycle(specs), key=len)


def join_stages(stages: Sequence[Sequence[Spec]]) -> str:
    """The inverse of `expand_stages`: the shortest of one part for all stages, one per stage and one per layer."""
    longest = max(stages, key=len, default=[])
    # A short stage may contain only the start of the cycle of the longest stage.
    if all(list(stage) == list(longest[: len(stage)]) for stage in stages):
        return _cycle(longest)
    by_stage = join_texts([_cycle(stage) for stage in stages])
    by_layer = join_texts([str(spec) for stage in stages for spec in stage])
    return min(by_stage, by_layer, key=len)


def named(text: str, kinds: Mapping[str, type[Options]]) -> list[Spec]:
    """Every spec in a text, for any number of layers."""
    return list(dict.fromkeys(spec for _, cycle in _runs(text, kinds) for spec in cycle))


def _runs(text: str, kinds: Mapping[str, type[Options]]) -> list[tuple[int | None, list[Spec]]]:
    """For each part, its count (None if absent) and the specs of its cycle."""
    runs = []
    for part in split_parts(text, kinds):
        match = _PART.match(split_cycle(part)[0])
        count = match["count"] if match else None
        rest = part if count is None else part[len(count) + 1 :]
        runs.append((None if count is None else int(count), [parse(item, kinds) for item in split_cycle(rest)]))
    return runs


def _repeat(cycle: Sequence[Spec], count: int) -> list[Spec]:
    return [cycle[i % len(cycle)] for i in range(count)]


def _cycle(specs: Sequence[Spec]) -> str:
    """The shortest cycle whose repetition gives `specs`."""
    texts = list(map(str, specs))
    period = next((p for p in range(1, len(texts)) if texts[p:] == texts[:-p]), len(texts))
    return "+".join(texts[:period])


def join_texts(texts: Sequence[str]) -> str:
    """Runs of equal texts become `NxTEXT`, a single run its text alone."""
    runs = [(text, len(list(group))) for text, group in itertools.groupby(texts)]
    if len(runs) == 1:
        return runs[0][0]
    return "/".join(text if count == 1 else f"{count}x{text}" for text, count in runs)


def _value(text: str, hint: Any, where: str) -> Any:
    """Parse `text` as the type `hint`; unions take the first alternative that fits."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for alternative in args:
            try:
                return _value(text, alternative, where)
            except UserError:
                continue
    elif origin is Literal:
        for value in args:
            if text == value_text(value):
                return value
    elif origin is tuple:
        return tuple(_value(item, args[0], where) for item in text.split("/")) if text else ()
    elif hint is type(None):
        if text == "none":
            return None
    elif hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif hint is str:
        return text
    else:
        try:
            return hint(plain_number(text))
        except ValueError:
            pass
    raise UserError(f"{where}={text!r} cannot be read: expected {_type_text(hint)}")


def plain_number(text: str) -> str:
    """`text`, unless it holds digits of other scripts or underscores, which `int` and `float` accept; then raise."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r}: expected a number in the digits 0 to 9")
    return text


def field_text(field: dataclasses.Field[Any], value: Any) -> str:
    """The text of a field's value, as `parse_options` reads it."""
    form = field.metadata.get("form")
    return form.write(value) if form and value else value_text(value)


def value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(value_text, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _is_choice(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal


def _type_text(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_text, args))
    if origin is Literal:
        return " or ".join(map(value_text, args))
    if origin is tuple:
        return f"{_type_text(args[0])}/…"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "none"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return f"at most {high:g}" if high is not None else ""
