"""Presets: convert(model, "fast") resolves to an attention and a token schedule by image size."""

from __future__ import annotations

import pytest
import timm

import attendless
from attendless import UserError
from attendless.attention import parse
from attendless.convert.presets import PRESETS, SPARSE, preset
from attendless.tokens import parse_tokens


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_it_stands_for(name: str) -> None:
    assert preset(name, (224, 224)) == (None, PRESETS[name])
    assert preset(name, (384, 384)) == (SPARSE, PRESETS[name])
    assert parse(SPARSE).name == "foveal"
    assert parse_tokens(PRESETS[name]) is not None
    model = timm.create_model("test_vit", img_size=96)
    fast = attendless.convert(model, name)
    assert (fast.attention, fast.tokens) == ("full", attendless.convert(model, tokens=PRESETS[name]).tokens)


def test_a_preset_has_its_own_tokens() -> None:
    with pytest.raises(UserError, match="'fast' is a preset, which has its own tokens"):
        attendless.convert(timm.create_model("test_vit"), "fast", tokens="tome:r=4")
    with pytest.raises(UserError, match="unknown preset 'fst'"):
        preset("fst", (224, 224))
