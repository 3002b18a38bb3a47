"""Backbones under dense heads against references from the authors' code: PVT's maps, and UperNet of mmsegmentation."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import attendless
from attendless.backbones.plugins import with_less
from attendless.dense import build, load_mmseg
from attendless.dense.features import Features
from attendless.errors import UserError
from attendless.integrations.weights import load_weights
from official_layers import CLASSES, PVT_DIMS, PVT_HEADS, Weights, pvt_stage, pvt_weights

DIMS, HEADS, WIDTH, WINDOW = (8, 16, 32, 64), (1, 2, 4, 8), 16, 2


# PVT -----------------------------------------------------------------------------------------------------------------


def pvt(**changes: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model("pyramid_pvt_tiny", num_classes=CLASSES, img_size=64, embed_dims=PVT_DIMS, **changes)


@pytest.mark.parametrize("size", [(64, 64), (96, 128)])
@torch.no_grad()
def test_pvts_maps_are_those_of_its_detection_code(size: tuple[int, int]) -> None:
    """No class token, no norms, and positions interpolated bilinearly."""
    w, images = pvt_weights(PVT_DIMS, 64), torch.randn(2, 3, *size)
    model = pvt()
    load_weights(model, dict(w))
    found = Features(model).eval()(images).levels
    x = images
    for s in range(1, 5):
        positions, sides = w[f"pos_embed{s}"], [side >> (s + 1) for side in size]
        positions = positions[:, 1:] if s == 4 else positions
        square = positions.mT.unflatten(2, (64 >> (s + 1),) * 2)
        positions = F.interpolate(square, sides, mode="bilinear").flatten(2).mT
        x = pvt_stage(w, s, x, positions, PVT_HEADS[s - 1])
        torch.testing.assert_close(found[s - 1], x, atol=3e-5, rtol=0)


def test_a_pvt_under_a_head_is_saved_without_its_class_token(tmp_path: Any) -> None:
    model, images = build(pvt(), "semantic_fpn:channels=8", 3).eval(), torch.randn(1, 3, 64, 64)
    assert not any("cls_token" in name or "features.make" in name for name in model.state_dict())
    attendless.save(model, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(attendless.load(tmp_path / "model.safetensors")(images), model(images))


def test_less_attention_in_pvt_also_goes_without_the_class_token() -> None:
    features = Features(pvt(**with_less("pyramid_pvt_tiny"))).eval()
    with torch.no_grad():
        assert features(torch.randn(1, 3, 96, 64)).levels[3].shape == (1, PVT_DIMS[3], 3, 2)


# mmsegmentation ------------------------------------------------------------------------------------------------------


def convs(w: Weights, name: str, out: int, into: int, kernel: int) -> None:
    w.conv(f"{name}.conv", out, into, kernel, bias=False)
    w.batch_norm(f"{name}.bn", out)


def mmseg_weights() -> Weights:
    w = Weights()
    w.conv("backbone.patch_embed.projection", DIMS[0], 3, 4)
    w.norm("backbone.patch_embed.norm", DIMS[0])
    for s, dim in enumerate(DIMS):
        for j in range(2):
            name = f"backbone.stages.{s}.blocks.{j}"
            w.norm(f"{name}.norm1", dim)
            w.draw(f"{name}.attn.w_msa.relative_position_bias_table", (2 * WINDOW - 1) ** 2, HEADS[s])
            w[f"{name}.attn.w_msa.relative_position_index"] = torch.zeros(WINDOW**2, WINDOW**2, dtype=torch.long)
            w.linear(f"{name}.attn.w_msa.qkv", 3 * dim, dim)
            w.linear(f"{name}.attn.w_msa.proj", dim, dim)
            w.norm(f"{name}.norm2", dim)
            w.linear(f"{name}.ffn.layers.0.0", 4 * dim, dim)
            w.linear(f"{name}.ffn.layers.1", dim, 4 * dim)
        if s < 3:
            w.norm(f"backbone.stages.{s}.downsample.norm", 4 * dim)
            w.linear(f"backbone.stages.{s}.downsample.reduction", 2 * dim, 4 * dim, bias=False)
        w.norm(f"backbone.norm{s}", dim)
    for i in range(4):
        convs(w, f"decode_head.psp_modules.{i}.1", WIDTH, DIMS[3], 1)
    convs(w, "decode_head.bottleneck", WIDTH, DIMS[3] + 4 * WIDTH, 3)
    for i in range(3):
        convs(w, f"decode_head.lateral_convs.{i}", WIDTH, DIMS[i], 1)
        convs(w, f"decode_head.fpn_convs.{i}", WIDTH, WIDTH, 3)
    convs(w, "decode_head.fpn_bottleneck", WIDTH, 4 * WIDTH, 3)
    w.conv("decode_head.conv_seg", CLASSES, WIDTH, 1)
    convs(w, "auxiliary_head.convs.0", WIDTH // 2, DIMS[2], 3)
    w.conv("auxiliary_head.conv_seg", CLASSES, WIDTH // 2, 1)
    return w


def windows(w: Weights, name: str, x: Tensor, sides: tuple[int, int], heads: int, shift: int) -> Tensor:
    """Shifted windows as a mask over all pairs of patches."""
    y, z = (at.flatten() for at in torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij"))
    cut = torch.stack([torch.div(at - shift, WINDOW, rounding_mode="floor") for at in (y, z)])
    allowed = (cut[:, :, None] == cut[:, None, :]).all(0)
    rows, columns = y[:, None] - y, z[:, None] - z
    index = ((rows + WINDOW - 1) * (2 * WINDOW - 1) + columns + WINDOW - 1).clamp(0, (2 * WINDOW - 1) ** 2 - 1)
    bias = w[f"{name}.relative_position_bias_table"][index].permute(2, 0, 1)
    q, k, v = w.lin(f"{name}.qkv", x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(~allowed, -torch.inf)
    return w.lin(f"{name}.proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def mmseg_swin(w: Weights, images: Tensor) -> list[Tensor]:
    x = w.convolved("backbone.patch_embed.projection", images, 4)
    sides, maps = (x.shape[2], x.shape[3]), []
    x = w.ln("backbone.patch_embed.norm", x.flatten(2).mT, 1e-5)
    for s in range(4):
        for j in range(2):
            name = f"backbone.stages.{s}.blocks.{j}"
            out = windows(w, f"{name}.attn.w_msa", w.ln(f"{name}.norm1", x, 1e-5), sides, HEADS[s], j)
            x = x + out
            hidden = F.gelu(w.lin(f"{name}.ffn.layers.0.0", w.ln(f"{name}.norm2", x, 1e-5)))
            x = x + w.lin(f"{name}.ffn.layers.1", hidden)
        maps.append(w.ln(f"backbone.norm{s}", x, 1e-5).mT.unflatten(2, sides))
        if s < 3:
            name = f"backbone.stages.{s}.downsample"
            x = F.unfold(x.mT.unflatten(2, sides), 2, stride=2).mT
            x = w.lin(f"{name}.reduction", w.ln(f"{name}.norm", x, 1e-5))
            sides = (sides[0] // 2, sides[1] // 2)
    return maps


def conv_module(w: Weights, name: str, x: Tensor, training: bool) -> Tensor:
    padding = w[f"{name}.conv.weight"].shape[-1] // 2
    return F.relu(w.bn(f"{name}.bn", w.convolved(f"{name}.conv", x, 1, padding), training))


def uper_head(w: Weights, maps: list[Tensor], training: bool) -> dict[str, Tensor]:
    def fine(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)

    top = maps[-1]
    pooled = [
        fine(conv_module(w, f"decode_head.psp_modules.{i}.1", F.adaptive_avg_pool2d(top, side), training), top)
        for i, side in enumerate((1, 2, 3, 6))
    ]
    laterals = [conv_module(w, f"decode_head.lateral_convs.{i}", maps[i], training) for i in range(3)]
    laterals.append(conv_module(w, "decode_head.bottleneck", torch.cat([top, *pooled], dim=1), training))
    for i in (3, 2, 1):
        laterals[i - 1] = laterals[i - 1] + fine(laterals[i], laterals[i - 1])
    outs = [conv_module(w, f"decode_head.fpn_convs.{i}", laterals[i], training) for i in range(3)]
    outs = [outs[0], *(fine(out, outs[0]) for out in (*outs[1:], laterals[3]))]
    fused = conv_module(w, "decode_head.fpn_bottleneck", torch.cat(outs, dim=1), training)
    aux = conv_module(w, "auxiliary_head.convs.0", maps[2], training)
    return {
        "pixels": w.convolved("decode_head.conv_seg", fused),
        "aux": w.convolved("auxiliary_head.conv_seg", aux),
    }


def upernet(head: str = f"upernet:channels={WIDTH},drop=0") -> Any:
    torch.manual_seed(0)
    attention = f"window:size={WINDOW}+window:size={WINDOW},shift=1"
    shape = {"embed_dims": DIMS, "depths": (2, 2, 2, 2), "num_heads": HEADS, "img_size": 128}
    return build(timm.create_model("pyramid_swin_tiny", attention=attention, **shape), head, CLASSES)


NAMES = {
    ".w_msa": "",
    "ffn.layers.0.0": "mlp.fc1",
    "ffn.layers.1": "mlp.fc2",
    "patch_embed.projection": "patch_embed.proj",
    "backbone.stages": "backbone.layers",
}


def as_its_authors_name_it(w: Weights) -> dict[str, Tensor]:
    """The same weights as Swin's own authors store them, where merged patches are [column, row, channel]."""
    found = {}
    for name, value in w.items():
        if ".downsample." in name:
            C = value.shape[-1] // 4
            order = [c * 4 + row * 2 + column for column in (0, 1) for row in (0, 1) for c in range(C)]
            value = value[..., order]
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = value
    return found


@pytest.mark.parametrize("named_by", ["mmsegmentation", "swin"])
@torch.no_grad()
def test_an_upernet_checkpoint_loads_and_computes_the_same(named_by: str) -> None:
    w, images = mmseg_weights(), torch.randn(2, 3, 128, 128)
    model = upernet()
    load_mmseg(model, w if named_by == "mmsegmentation" else as_its_authors_name_it(w))
    maps = mmseg_swin(w, images)
    expected = F.interpolate(uper_head(w, maps, False)["pixels"], (128, 128), mode="bilinear", align_corners=False)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.eval()(images), expected, atol=3e-5, rtol=0)


def test_upernets_head_trains_like_mmsegmentations() -> None:
    w, model = mmseg_weights(), upernet()
    load_mmseg(model, w)
    for name, value in w.items():
        w[name] = value.double() if value.is_floating_point() else value
    head = ("decode_head.lateral_convs.0.conv.weight", "decode_head.psp_modules.0.1.bn.weight")
    for name in head:
        w[name].requires_grad_()
    draws = torch.Generator().manual_seed(3)
    maps = [torch.randn(2, dim, 32 >> s, 32 >> s, dtype=torch.float64, generator=draws) for s, dim in enumerate(DIMS)]
    expected = uper_head(w, maps, True)
    model.double().train()
    found = model.decode(maps)
    for name, (logits, _) in found.items():
        torch.testing.assert_close(logits, expected[name], rtol=1e-9, atol=1e-9)
    ours = model.decoder.fpn_lateral_blocks[2].conv_norm_relu[0].weight, model.decoder.psp.blocks[0][1][1].weight
    weight = torch.randn_like(expected["pixels"])
    theirs = torch.autograd.grad((expected["pixels"] * weight).sum(), [w[name] for name in head])
    for a, b in zip(torch.autograd.grad((found["pixels"][0] * weight).sum(), ours), theirs, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    w = mmseg_weights()
    del w["decode_head.fpn_convs.1.conv.weight"]
    with pytest.raises(UserError, match=r"decoder.fpn_conv_blocks.1.0.weight is missing"):
        load_mmseg(upernet(), w)
    with pytest.raises(UserError, match=r"does not fit the head 'semantic_fpn': expected 'upernet'"):
        load_mmseg(upernet("semantic_fpn:channels=8"), w)
