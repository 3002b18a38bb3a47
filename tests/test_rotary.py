"""Models with rotary positions: at keep=1 they compute what timm's compute, at any size, whatever else is in them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attendless
from attendless.convert import convert, convert_with_report, load, save
from attendless.integrations.discovery import find_slots
from attendless.measure.subject import attention_of, original

SMALL = {"depth": 2, "embed_dim": 96, "num_heads": 3, "num_classes": 5}
#: Name, arguments, two sizes of image; a model of fixed size is resized.
DINOV3 = ("vit_small_patch16_dinov3", SMALL, ((96, 96), (64, 128)))
MODELS = [
    DINOV3,
    ("vit_small_patch16_dinov3_qkvb", SMALL, ((96, 96), (64, 128))),
    ("eva02_tiny_patch14_224", {**SMALL, "img_size": 84}, ((84, 84), (56, 112))),
    ("eva02_base_patch14_448", {**SMALL, "img_size": 84}, ((84, 84), (56, 112))),  # q, k and v apart, norms inside
    ("vit_small_patch16_rope_mixed_224", {**SMALL, "img_size": 64}, ((64, 64), (48, 80))),  # a rotation per layer
    ("vit_pe_core_tiny_patch16_384", {**SMALL, "img_size": 64}, ((64, 64), (48, 80))),  # AttentionRope
    ("eva_giant_patch14_224", {**SMALL, "img_size": 56}, ((56, 56), (42, 70))),  # no rotation at all
]
if "num_kv_heads" in inspect.signature(timm.models.eva.Eva).parameters:  # newer than the oldest timm supported
    MODELS += [
        ("vit_small_patch16_dinov3", {**SMALL, "attn_type": "rope", "num_kv_heads": 1, "qkv_fused": False}, ((64, 96),))
    ]


def build(name: str, arguments: dict[str, Any]) -> nn.Module:
    model = timm.create_model(name, **arguments)
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def at(model: Any, size: tuple[int, int]) -> Any:
    model = copy.deepcopy(model)
    model.set_input_size(img_size=size)
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(("name", "arguments", "sizes"), MODELS, ids=lambda value: value if type(value) is str else "")
def test_keep_one_is_the_model_itself(name: str, arguments: dict, sizes: tuple) -> None:
    whole = build(name, arguments)
    for size in sizes:
        model = at(whole, size)
        ours = convert(model, "foveal:keep=1", below_breakeven="keep")
        assert all(str(slot.spec) == "foveal:keep=1" for slot in find_slots(ours))
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
        mine, theirs = gradients(ours, x), gradients(model, x)
        assert mine.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_vit_88m", "qwen3_vit_88m_enc", "deepseek_vit_412m", "deepseek_vit_412m_enc"])
def test_towers_of_language_models_share_these_classes(name: str) -> None:
    """They take any size, so that converted they take any too."""
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    patch = 14 if "deepseek" in name else 16
    model = build(name, {"depth": 2, "embed_dim": 64, "num_heads": 2})
    ours, report = convert_with_report(model, "foveal:keep=1", below_breakeven="keep", size=6 * patch)
    assert [row.grid for row in report.layers] == ["6x6", "6x6"]
    for size in ((4, 4), (2, 6)):
        x = torch.randn(2, 3, *(patch * side for side in size))
        torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
        if not name.endswith("_enc"):  # behind the classifier's norm gradients are hardly more than rounding
            continue
        mine, theirs = gradients(ours, x), gradients(model, x)
        steepest = max(float(value.abs().max()) for value in theirs.values())  # some are 0 but for rounding
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], atol=1e-4 * steepest, rtol=0)
    core: Any = find_slots(ours)[0].attn
    assert core.turn == pytest.approx(1.0, abs=1e-3)  # integer positions


@torch.no_grad()
def test_the_core_sees_rotated_queries_and_keys() -> None:
    """One layer by hand: timm's own q and k, rotated, through full attention in windows of our own making."""
    model: Any = build(*DINOV3[:2])
    ours = convert(at(model, (64, 64)), "window:size=4,bias=false", below_breakeven="keep")
    caught: list[Tensor] = []
    core: Any = find_slots(ours)[0].attn
    core.attend, attend = lambda q, k, v, context: (caught.extend((q, k, v)), attend(q, k, v, context))[1], core.attend
    ours(torch.randn(1, 3, 64, 64))
    q, k, _ = caught
    block = ours.blocks[0].attn
    sin, cos = model.rope.get_embed(shape=(4, 4)).chunk(2, dim=-1)
    assert block.num_prefix_tokens == 5
    # A rotation keeps lengths, and patches at one place turn alike: undone, q and k are as projected.
    half = torch.cat([-q[:, :, 5:, 16:], q[:, :, 5:, :16]], dim=-1)
    undone = q[:, :, 5:] * cos - half * sin
    assert torch.allclose(undone.norm(dim=-1), q[:, :, 5:].norm(dim=-1), atol=1e-4)
    assert not torch.allclose(undone, q[:, :, 5:], atol=1e-2)
    assert k.shape == q.shape == (1, 3, 21, 32)


def test_a_layer_attends_less_where_it_pays_and_the_report_says_where() -> None:
    model = build(*DINOV3[:2])
    _, small = convert_with_report(model, "foveal:keep=0.1", size=64)
    assert {row.decision for row in small.layers} <= {"left full", "converted"}
    ours, large = convert_with_report(model, "foveal:keep=0.1", size=512)
    assert [row.attention for row in large.layers] == ["foveal:keep=0.1"] * 2
    assert large.layers[0].grid == "5+32x32"
    assert large.after.core < large.before.core / 2
    assert all(not row.new and not row.dropped and row.copied for row in large.layers)
    assert ours.state_dict().keys() == model.state_dict().keys()


@torch.no_grad()
def test_saved_and_loaded_it_computes_the_same(tmp_path) -> None:
    given = timm.create_model("eva02_tiny_patch14_224", num_classes=3)
    model = convert(given, "foveal:keep=0.2", size=112, layers="2:", below_breakeven="keep")
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert attention_of(again) == attention_of(model)
    x = torch.randn(1, 3, 112, 112)
    torch.testing.assert_close(again(x), model.eval()(x), atol=0, rtol=0)
    dense = original(model)
    assert not any(isinstance(module, attendless.Attention) for module in dense.modules())


@torch.no_grad()
def test_maps_are_those_of_the_rotated() -> None:
    model = convert(build(*DINOV3[:2]), "foveal:keep=1", below_breakeven="keep", size=64)
    full = convert(model, "full", below_breakeven="keep")
    x = torch.randn(1, 3, 64, 64)
    found, exact = (attendless.maps(one, x, 1)[0].weights for one in (model, full))
    assert found.shape == (1, 3, 21, 21)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 3, 21))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("vit_small_patch16_dinov3", 2 * torch.pi * 2 / 64),  # normalised, as on a grid of 64 × 64
        ("vit_pe_core_tiny_patch16_384", 1.0),  # integer positions
        ("eva02_tiny_patch14_336", 16 / 24),  # 16 across, whatever the grid
        ("eva_giant_patch14_224", 0.0),
    ],
)
def test_auto_knows_how_far_keys_turn(name: str, step: float) -> None:
    model: Any = timm.create_model(name, depth=1, num_classes=0)
    core: Any = find_slots(convert(model, "foveal", below_breakeven="keep"))[0].attn
    assert core.turn == pytest.approx(step, abs=1e-3)
    plain = attendless.create("foveal", 64, 1, grid=attendless.Grid(64, 64))
    coarse = core.layout(attendless.Grid(64, 64)).coarse
    assert coarse == (0 if step > 0.5 else plain.layout(plain.grid).coarse)


@pytest.mark.parametrize(
    "sizes", [((64, 64),), pytest.param(((64, 64), (32, 128), (48, 48)), marks=pytest.mark.slow)], ids=len
)
@torch.no_grad()
def test_compiles_into_one_graph(sizes: tuple) -> None:
    model = convert(build(DINOV3[0], {**SMALL, "depth": 1}), "foveal:keep=0.3", below_breakeven="keep", size=64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in sizes:  # as many tokens on another grid, and fewer
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", timm.list_models(module="eva"))
@torch.no_grad()
def test_every_eva_converts(name: str) -> None:
    arguments = {"depth": 1, "num_classes": 0}
    try:
        model = timm.create_model(name, img_size=64, **arguments)
    except AssertionError:  # a patch of 14, or heads per layer
        patch = "14" in name
        model = timm.create_model(
            name, img_size=56 if patch else 64, **arguments, **({} if patch else {"num_kv_heads": 2})
        )
    ours = convert(model.eval(), "foveal:keep=1", below_breakeven="keep")
    x = torch.randn(1, 3, *model.patch_embed.img_size)
    torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
    assert str(find_slots(ours)[0].spec) == "foveal:keep=1"
