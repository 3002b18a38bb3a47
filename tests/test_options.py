"""Specs: text ↔ typed options, and errors that say what exists."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

import pytest

from attendless import options as specs
from attendless.errors import UserError
from attendless.options import (
    Options,
    Spec,
    describe_options,
    expand,
    expand_stages,
    join,
    join_stages,
    option,
    parse,
    split_parts,
)


@dataclasses.dataclass(frozen=True)
class Reducing(Options):
    keep: float = option(0.7, "share kept", low=0, high=1)
    at: tuple[int, ...] = option((3, 6, 9), "layers", low=0)
    fuse: bool = option(False, "fuse the rest")
    cell: int | Literal["auto"] = option("auto", "cell side", low=1)
    form: Literal["1d", "2d"] = option("2d", "layout")


KINDS = {"evit": Reducing, "full": Options, "window": Options}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("evit", Reducing()),
        ("evit:keep=0.5", Reducing(keep=0.5)),
        ("evit:keep=0.25,at=4/8/12,fuse", Reducing(0.25, (4, 8, 12), True)),
        ("evit:cell=2,form=1d", Reducing(cell=2, form="1d")),
        ("evit:at=5", Reducing(at=(5,))),
        ("evit:fuse=false", Reducing()),
    ],
)
def test_text_to_options_and_back(text: str, options: Reducing) -> None:
    parsed = parse(text, KINDS)
    assert parsed == Spec("evit", options)
    assert parse(str(parsed), KINDS) == parsed


def test_printing_leaves_out_defaults() -> None:
    assert str(parse("evit:keep=0.7,fuse=true", KINDS)) == "evit:fuse"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("evitt", ["unknown attention 'evitt'", "'evit'", "window"]),
        ("evit:kep=1", ["unknown option of evit 'kep'", "Did you mean 'keep'", "fuse"]),
        ("evit:keep=2", ["keep=2", "0 to 1"]),
        ("evit:keep=nan", ["keep=nan", "0 to 1"]),
        ("evit:keep=lots", ["evit:keep='lots'", "a number"]),
        ("evit:cell=0", ["cell=0", "at least 1"]),
        ("evit:cell=big", ["evit:cell='big'", "auto"]),
        ("evit:form=3d", ["1d or 2d"]),
        ("evit:at=3/x", ["evit:at='x'", "a whole number"]),
        ("evit:keep=0.5,keep=0.5", ["twice"]),
        ("", ["cannot read"]),
        (":keep=1", ["cannot read"]),
    ],
)
def test_mistakes_are_explained(text: str, says: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(text, KINDS)
    for words in says:
        assert words in str(error.value)


def test_parts() -> None:
    assert split_parts("evit:at=3/6/window/2xfull", KINDS) == ["evit:at=3/6", "window", "2xfull"]
    layers = expand("window/2xevit:at=3/6/full", 4, KINDS)
    assert [str(layer) for layer in layers] == ["window", "evit:at=3/6", "evit:at=3/6", "full"]
    assert join(layers) == "window/2xevit:at=3/6/full"
    assert expand(join(layers), 4, KINDS) == layers
    assert join(expand("full", 12, KINDS)) == "full"


def test_parts_that_do_not_add_up() -> None:
    with pytest.raises(UserError, match="names 3 stages, but the model has 4"):
        expand("window/2xfull", 3 + 1, KINDS, unit="stages")
    with pytest.raises(UserError, match="unknown attention 'widnow'"):
        expand("full/widnow/full/full", 4, KINDS)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("window+full", "window full window full window full"),
        ("window+evit:at=3/6+full", "window evit:at=3/6 full window evit:at=3/6 full"),
        ("2xfull/4xwindow+evit:fuse", "full full window evit:fuse window evit:fuse"),
        ("3xwindow+full/3xfull", "window full window full full full"),
        ("evit:keep=1e-06+window", "evit:keep=1e-06 window evit:keep=1e-06 window evit:keep=1e-06 window"),
    ],
)
def test_cycles(text: str, layers: str) -> None:
    specs = expand(text, 6, KINDS)
    assert " ".join(map(str, specs)) == layers
    assert expand(join(specs), 6, KINDS) == specs


def test_the_shortest_text_is_printed() -> None:
    def again(text: str) -> str:
        return join(expand(text, 6, KINDS))

    assert again("window/full/window/full/window/full") == "window+full"
    assert again("window+window") == "window"
    assert again("5xwindow/full") == "5xwindow/full"
    assert again("window+full+window+full") == "window+full"
    assert join([]) == ""


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("full", "full full | full full | full full full full | full"),
        ("window+full", "window full | window full | window full window full | window"),
        ("window/window/full/full", "window window | window window | full full full full | full"),
        ("3xwindow+full/evit:at=1/2", "window full | window full | window full window full | evit:at=1/2"),
        ("9xwindow+full", "window full | window full | window full window full | window"),
        ("3xwindow/6xfull", "window window | window full | full full full full | full"),
        ("window/8xevit+full", "window evit | full evit | full evit full evit | full"),
    ],
)
def test_stages(text: str, stages: str) -> None:
    found = expand_stages(text, (2, 2, 4, 1), KINDS)
    assert " | ".join(" ".join(map(str, stage)) for stage in found) == stages
    assert expand_stages(join_stages(found), (2, 2, 4, 1), KINDS) == found


def test_stages_print_the_shortest_text() -> None:
    def again(text: str) -> str:
        return join_stages(expand_stages(text, (2, 2, 4, 1), KINDS))

    assert again("4xwindow") == "window"
    assert again("window+full") == "window+full"
    assert again("window/window/full/full") == "2xwindow/2xfull"
    assert again("window+full/window+full/window+full/full") == "3xwindow+full/full"
    assert again("8xwindow/full") == "3xwindow/full"
    assert again("3xfull/window/5xfull") == "3xfull/window/5xfull"


@pytest.mark.parametrize("text", ["full/full", "5xwindow+full", "3xfull"])
def test_stages_that_do_not_add_up(text: str) -> None:
    with pytest.raises(UserError, match="but the model has 4 stages with 9 layers in all"):
        expand_stages(text, (2, 2, 4, 1), KINDS)


def test_any_layers_survive_printing() -> None:
    generator = random.Random(0)
    choice = [parse(text, KINDS) for text in ("full", "window", "evit:at=3/6", "evit:keep=0.5")]
    for _ in range(300):
        depths = [generator.randint(1, 5) for _ in range(generator.randint(1, 5))]
        stages = [generator.choices(choice[: generator.randint(1, 4)], k=depth) for depth in depths]
        assert expand_stages(join_stages(stages), depths, KINDS) == stages
        layers = [spec for stage in stages for spec in stage]
        assert expand(join(layers), len(layers), KINDS) == layers


@pytest.mark.parametrize("text", ["full+", "+full", "2xfull+2xfull", "full++full"])
def test_cycles_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError):
        expand(text, 4, KINDS)
    with pytest.raises(UserError, match="unknown attention 'widnow'"):
        expand("full+widnow", 4, KINDS)


def test_options_describe_themselves() -> None:
    keep = next(o for o in describe_options(Reducing) if o["name"] == "keep")
    assert keep == {
        "name": "keep",
        "type": "a number",
        "choices": None,
        "default": 0.7,
        "range": "0 to 1",
        "help": "share kept",
    }


def test_replace_checks_again() -> None:
    with pytest.raises(UserError, match="out of range"):
        parse("evit", KINDS).replace(keep=-1.0)
    assert specs.parse("evit", KINDS).replace(keep=0.1).options == Reducing(keep=0.1)
