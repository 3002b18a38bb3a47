"""Towers of VLMs: several images of different sizes in one row of tokens, each attended to on its own grid."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import attendless
from attendless import UserError
from attendless.integrations.hf_interface import interface, towers

pytest.importorskip("transformers")

from packed_models import PACKED, PATCH, Image, draw
from test_huggingface_interface import furthest, gradient, outputs, run

QUICK = ("qwen2_5_vl", "qwen3_vl", "glm4v", "kimi_k25", "pixtral", "minicpmv4_6", "radio")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PACKED]


def case(name: str) -> tuple[Any, tuple[Image, ...]]:
    return PACKED[name].make(), PACKED[name].images


def patched(model: Any, attention: str) -> Any:
    attendless.patch(model, attention, below_breakeven="keep")
    return model


@pytest.mark.parametrize("name", EVERY)
def test_attending_to_everything_is_the_original(name: str) -> None:
    model, images = case(name)
    inputs = PACKED[name].inputs(images)
    then, slope = run(model, inputs), gradient(model, inputs)
    patched(model, "foveal:keep=1")
    assert furthest(then, run(model, inputs)) < 1e-4
    steepest = float(max(value.abs().max() for value in slope))
    assert furthest(slope, gradient(model, inputs), steepest) < 1e-4
    patched(model, "foveal:keep=0.1")
    assert furthest(then, run(model, inputs)) > 1e-4, "nothing attends less"
    attendless.unpatch(model)
    assert all(map(torch.equal, then, run(model, inputs)))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", EVERY)
def test_packed_images_equal_single_runs(name: str) -> None:
    model, images = case(name)
    patched(model, "foveal:keep=0.2,cell=2,tile=2")
    tower, pixels = PACKED[name], draw(images)
    together = last(run_tower(model, tower.inputs(images, pixels)))
    alone = [last(run_tower(model, tower.inputs([i], [x]))) for i, x in zip(images, pixels, strict=True)]
    assert furthest([torch.cat(alone)], [together]) < 1e-5


def run_tower(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**inputs)


def last(answer: Any) -> Tensor:
    return answer.last_hidden_state.flatten(0, -2)


@pytest.mark.parametrize("name", EVERY)
def test_a_changed_pixel_changes_the_token_of_its_patch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that changes before anything is mixed has, in the grid that the attention uses, the patch's place."""
    model, images = case(name)
    patched(model, "foveal:keep=1")
    layer = next(layer for layer in towers.find(model).layers if not layer.fixed)
    first = next(layer for layer in towers.find(model).layers)
    segments, seen = [], []
    attend = interface._attend_segment

    def spy(attention: Any, segment: Any, *qkv: Tensor) -> Tensor:
        segments.append(segment)
        return attend(attention, segment, *qkv)

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach().flatten(0, -2))

    first.module.register_forward_pre_hook(keep, with_kwargs=True)
    pixels = draw(images)
    for which, (_, height, width) in enumerate(images):
        row, column = height - 2, 5
        before = [x.clone() for x in pixels]
        pixels[which][0, :, PATCH * row + 1, PATCH * column + 2] += 5
        segments.clear(), seen.clear()
        run_tower(model, PACKED[name].inputs(images, before))
        with monkeypatch.context() as patch:
            patch.setattr(interface, "_attend_segment", spy)
            run_tower(model, PACKED[name].inputs(images, pixels))
        (changed,) = (seen[0] - seen[-1]).abs().amax(1).nonzero().flatten().tolist()
        start = sum(each.tokens for each in segments[:which])
        segment = segments[which]
        place = segment.grid.prefix + row * width + column
        held = place if segment.order is None else int(segment.order[place])
        assert (segment.grid.height, segment.grid.width) == (height, width)
        assert changed == start + held
    assert layer.module in [m for m in model.modules() if interface.seat_of(m)]


def test_windowed_layers_are_left_alone_and_named() -> None:
    model, _ = case("qwen2_5_vl")
    report = attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    assert [row.decision for row in report.layers] == ["kept", "converted", "kept"]
    assert report.layers[0].reason == "it attends in windows of 4x4 already"
    model, _ = case("minicpmv4_6")
    report = attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep", size=16 * PATCH)
    assert {row.name: (row.decision, row.grid) for row in report.layers} == {
        "encoder.layers.0": ("converted", "16x16"),
        "encoder.layers.1": ("converted", "16x16"),
        "encoder.layers.2": ("converted", "8x8"),
        "vit_merger": ("kept", "2x2"),
    }


@pytest.mark.parametrize("name", ["qwen3_vl", "pixtral"])
def test_gradient_checkpointing_finds_the_images_again(name: str) -> None:
    model, images = case(name)
    patched(model, "foveal:keep=0.2,cell=2,tile=2")
    inputs = PACKED[name].inputs(images)
    plain = gradient(model, inputs)
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.zero_grad()
    once = outputs(model(**inputs))
    run(model, PACKED[name].inputs(images[:1]))  # another call in between
    sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in once).backward()
    found = [value.grad for value in model.parameters() if value.grad is not None]
    assert furthest(plain, found) < 1e-5


def test_calls_that_do_not_fit_are_refused() -> None:
    model, images = case("qwen3_vl")
    patched(model, "foveal:keep=0.1")
    attention = model.blocks[0].attn
    x, turn = torch.randn(32, 32), (torch.ones(32, 16), torch.zeros(32, 16))
    with pytest.raises(UserError, match="received images of no images patches, and 32 tokens arrive"):
        attention(x, cu_seqlens=torch.tensor([0, 32]), position_embeddings=turn)
    run(model, PACKED["qwen3_vl"].inputs(images))
    with pytest.raises(UserError, match="images of 8x12, 4x8, 12x8, 4x8, 4x8 patches, and 32 tokens arrive"):
        attention(x, cu_seqlens=torch.tensor([0, 32]), position_embeddings=turn)


def test_a_copy_is_on_its_own() -> None:
    model, images = case("qwen3_vl")
    patched(model, "foveal:keep=0.1")
    inputs = PACKED["qwen3_vl"].inputs(images)
    ours = run(model, inputs)
    twin = copy.deepcopy(model)
    attendless.unpatch(model)
    assert furthest(ours, run(twin, inputs)) == 0
    assert furthest(ours, run(model, inputs)) > 1e-4


def test_a_whole_vlm_keeps_its_text_tower() -> None:
    import transformers

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3VLConfig(
        vision_config=PACKED["qwen3_vl"].make().config.to_dict(),
        text_config={**text, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99},
    )
    model = transformers.Qwen3VLModel(config)
    report = attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    assert [row.name for row in report.layers] == [f"visual.blocks.{i}" for i in range(3)]
    assert [why for _, why in report.unserved] == ["Qwen3VLTextAttention: not a supported vision attention"]
