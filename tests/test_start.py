"""Where weights start: as their authors have them in a model built for training, neutral in one that was pretrained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.twins import Twins
from torch import Tensor, nn

from attendless import convert
from attendless.backbones import Columnar, Pyramid
from attendless.backbones.weights import from_pyramids

COLUMN = {"img_size": 56, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
SHAPE = {"depths": (2, 1, 2, 1), "num_heads": (2, 2, 4, 8), "num_classes": 5}
DIMS = (32, 64, 96, 128)
REDUCED = "reduced:ratio=8/reduced:ratio=4/reduced/full"
OVERLAP = {"embedding": "overlap", "positions": "none", "stage_norms": True}
#: timm's model and the style that is ours.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "swin": (
        partial(SwinTransformer, img_size=224, embed_dim=32, **SHAPE),
        {"attention": "window+window:shift=3", "embed_dims": (32, 64, 128, 256), "positions": "none"},
    ),
    "pvt v2": (
        partial(PyramidVisionTransformerV2, embed_dims=DIMS, mlp_ratios=(4,) * 4, **SHAPE),
        {"attention": REDUCED, "embed_dims": DIMS, "mlp": "conv", **OVERLAP},
    ),
    "pvt v2 linear": (
        partial(PyramidVisionTransformerV2, embed_dims=DIMS, mlp_ratios=(4,) * 4, linear=True, **SHAPE),
        {"attention": "reduced:pool=7", "embed_dims": DIMS, "mlp": "conv_relu", **OVERLAP},
    ),
    "twins": (
        partial(Twins, img_size=224, embed_dims=DIMS, wss=(7,) * 4, **SHAPE),
        {
            "attention": "/".join(f"window:bias=false+{part}" for part in REDUCED.split("/")),
            "embed_dims": DIMS,
            "embedding": "patch",
            "positions": "conv",
        },
    ),
}


def assert_drawn(weight: Tensor, std: float, name: str = "") -> None:
    """The mean is zero and the deviation `std`, as far as so many draws can tell (five deviations of theirs)."""
    few = weight.numel() ** -0.5
    assert abs(weight.mean()) < 5 * std * few, name
    assert abs(weight.std() / std - 1) < 5 * few, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_family_starts_as_timms(family: str) -> None:
    theirs, style = FAMILIES[family]
    ours = Pyramid(**SHAPE, **style).state_dict()
    expected = from_pyramids(theirs().state_dict())
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        if weight.numel() > 1 and weight.std() > 0:
            # Theirs is a draw too: both within reach of the other.
            assert abs(ours[name].std() / weight.std() - 1) < 8 * weight.numel() ** -0.5, name
            assert abs(ours[name].mean() - weight.mean()) < 8 * weight.std() * weight.numel() ** -0.5, name
        else:
            assert torch.equal(ours[name], weight), name


def test_pvt_leaves_convolutions_to_pytorch() -> None:
    model = Pyramid(REDUCED, embedding="patch", positions="learned", class_token=True, embed_dims=DIMS, **SHAPE)
    sr = model.stages[0].blocks[0].attn.sr
    bound = (32 * 8 * 8) ** -0.5  # one over the root of the fan in
    assert_drawn(sr.weight, bound / 3**0.5)
    assert 0.99 * bound < sr.weight.abs().max() <= bound
    assert sr.bias.abs().max() > 0
    embed = model.patch_embed.proj.weight
    assert_drawn(embed, (3 * 4 * 4) ** -0.5 / 3**0.5)


HOSTS = pytest.mark.parametrize("host", ["column", "pyramid"])


def build(host: str, attention: str, **arguments: Any) -> Any:
    if host == "column":
        return Columnar(**COLUMN, attention=attention, **arguments)
    return Pyramid(attention, img_size=56, embed_dims=(32,), depths=(2,), num_heads=(4,), **arguments)


@HOSTS
def test_from_scratch_mechanisms_start_as_their_authors_do(host: str) -> None:
    window = build(host, "window").blocks[1].attn
    assert_drawn(window.relative_position_bias_table, 0.02)
    linformer = build(host, "linformer:keys=40,bias").blocks[1].attn
    assert_drawn(linformer.down, 0.02)
    assert not linformer.down_bias.any()
    reduced = build(host, "reduced:ratio=4").blocks[1].attn
    assert_drawn(reduced.sr.weight, (32 * 16) ** -0.5 / 3**0.5)


def assert_neutral(model: Any) -> None:
    """One layer each of window, linformer and reduced, as they come into a pretrained model."""
    window, linformer, reduced = (block.attn for block in model.blocks)
    assert not window.relative_position_bias_table.any()
    bound = linformer.down.shape[2] ** -0.5
    assert_drawn(linformer.down, bound / 3**0.5)
    assert linformer.down.abs().max() <= bound
    mean = torch.eye(reduced.dim)[:, :, None, None].expand_as(reduced.sr.weight) / 4
    assert torch.equal(reduced.sr.weight, mean)
    assert not reduced.sr.bias.any()


EACH = "window/linformer/reduced"


def test_converting_keeps_the_neutral_start() -> None:
    sizes = {**COLUMN, "depth": 3}
    for model in (timm.models.VisionTransformer(**sizes), Columnar(**sizes), Columnar(**sizes, attention="axial")):
        assert_neutral(convert(model, EACH, below_breakeven="keep"))
    row = Pyramid("full", img_size=56, embed_dims=(32,), depths=(3,), num_heads=(4,))
    assert_neutral(convert(row, EACH, below_breakeven="keep"))


def test_pretrained_weights_meet_neutral_attentions(tmp_path: Path) -> None:
    name, sizes = "columnar_micro_patch4_32", {"depth": 3}
    save_file(timm.create_model(name, **sizes).state_dict(), tmp_path / "weights.safetensors")
    found = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "weights.safetensors")}}
    assert_neutral(timm.create_model(name, attention=EACH, **sizes, **found))
    scratch = timm.create_model(name, attention=EACH, **sizes).blocks[0].attn
    assert_drawn(scratch.relative_position_bias_table, 0.02)


@HOSTS
def test_what_all_attentions_share_does_not_depend_on_them(host: str) -> None:
    """A seed gives full attention's weights as before: mechanisms draw after everything else, or draw nothing."""

    def drawn(attention: str, **arguments: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return build(host, attention, **arguments).state_dict()

    first, second = drawn("full"), drawn("full", scratch=False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # No draw in `setup`, so that what differs is only what `init_weights` draws.
    window, neutral = drawn("window"), drawn("window", scratch=False)
    own = {name for name in window if "relative_position" in name}
    assert own
    assert {name for name in window if not torch.equal(window[name], neutral[name])} == own


@HOSTS
def test_starting_over_starts_the_mechanisms_over(host: str) -> None:
    """`init_weights` of a model, as timm has it, reaches its attentions."""
    model = build(host, "window", scratch=False)
    assert not model.blocks[0].attn.relative_position_bias_table.any()
    model.init_weights()
    assert_drawn(model.blocks[0].attn.relative_position_bias_table, 0.02)
