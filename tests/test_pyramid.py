"""The pyramid backbone: timm's outputs from timm's weights, the published sizes, any image, any mix of attentions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.twins import Twins
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from attendless import UserError
from attendless.backbones import MODELS, Pyramid
from attendless.backbones.weights import from_pyramids

SMALL = {"embed_dims": (16, 32, 48, 64), "depths": (2, 1, 3, 2), "num_heads": (1, 2, 3, 4), "num_classes": 5}
REDUCED = "reduced:ratio=8/reduced:ratio=4/reduced/full"
STYLES: dict[str, dict[str, Any]] = {
    "fair": {},
    "pvt": {"attention": REDUCED, "embedding": "patch", "positions": "learned", "class_token": True},
    "pvt v2": {
        "attention": REDUCED,
        "embedding": "overlap",
        "positions": "none",
        "mlp": "conv",
        "stage_norms": True,
        "embed_eps": 1e-5,
    },
    "pvt v2 linear": {
        "attention": "reduced:pool=7",
        "embedding": "overlap",
        "positions": "none",
        "mlp": "conv_relu",
        "stage_norms": True,
        "embed_eps": 1e-5,
    },
    "swin": {
        "attention": "window:size=4+window:size=4,shift=2",
        "positions": "none",
        "norm_eps": 1e-5,
        "embed_eps": 1e-5,
    },
    "twins": {
        "attention": "/".join(f"window:size=4,bias=false+{part}" for part in REDUCED.split("/")),
        "embedding": "patch",
        "positions": "conv",
        "embed_eps": 1e-5,
    },
    "stem": {"attention": "xca:lpi", "embedding": "halving"},
}
STYLE = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def moved(model: nn.Module) -> nn.Module:
    """The model in evaluation with every weight moved off its neutral start."""
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return model.eval()


def small(style: dict[str, Any], **changes: Any) -> Any:
    return moved(Pyramid(**{"img_size": 64, **SMALL, **style, **changes}))


# timm's models from timm's weights ---------------------------------------------------------------------------------


def timms(style: str) -> nn.Module:
    shape = {name: SMALL[name] for name in ("depths", "num_heads", "num_classes")}
    if style.startswith("pvt v2"):
        linear = style.endswith("linear")
        return PyramidVisionTransformerV2(embed_dims=SMALL["embed_dims"], mlp_ratios=(4,) * 4, linear=linear, **shape)
    if style == "swin":
        return SwinTransformer(img_size=128, window_size=4, embed_dim=16, **{**shape, "num_heads": (1, 2, 4, 8)})
    return Twins(img_size=128, embed_dims=SMALL["embed_dims"], wss=(4,) * 4, **shape)


@pytest.mark.parametrize("name", ["pvt v2", "pvt v2 linear", "swin", "twins"])
def test_gives_timms_output(name: str) -> None:
    theirs = moved(timms(name))
    changes = {"embed_dims": (16, 32, 64, 128), "num_heads": (1, 2, 4, 8)} if name == "swin" else {}
    ours = small(STYLES[name], **changes)
    ours.load_state_dict(from_pyramids(theirs.state_dict()))
    for size in [(128, 128)] if name == "swin" else [(128, 128), (128, 256)]:
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
        maps = theirs.forward_intermediates(x, intermediates_only=True)
        torch.testing.assert_close(ours.forward_intermediates(x, intermediates_only=True), maps, atol=1e-5, rtol=0)


FULL_SIZE = ["pyramid_pvt_v2_b0", "pyramid_swin_tiny", "columnar_tiny_patch16_224"]
LARGE = [name for name, model in MODELS.items() if model.weights and name not in FULL_SIZE]


@pytest.mark.parametrize("name", [*FULL_SIZE, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_registered_models_give_timms_output(name: str) -> None:
    theirs, ours = moved(timm.create_model(MODELS[name].weights)), timm.create_model(name).eval()
    ours.load_state_dict(MODELS[name].adapt(theirs.state_dict(), ours))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in LARGE if name.endswith(("b2", "small", "small_patch16_224"))])
def test_registered_models_take_every_weight_of_timms(name: str) -> None:
    with torch.device("meta"):
        theirs, ours = timm.create_model(MODELS[name].weights), timm.create_model(name)
    weights = from_pyramids(theirs.state_dict()) if isinstance(ours, Pyramid) else theirs.state_dict()
    assert {n: v.shape for n, v in weights.items()} == {n: v.shape for n, v in ours.state_dict().items()}


def test_pretrained_weights_load_under_any_attention(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="attendless")  # other packages change the root logger's level in this process
    theirs = moved(timm.create_model("pvt_v2_b0"))
    save_file(theirs.state_dict(), tmp_path / "b0.safetensors")
    found = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "b0.safetensors")}}
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        ours = timm.create_model("pyramid_pvt_v2_b0", **found).eval()
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=0)
        maps = timm.create_model("pyramid_pvt_v2_b0", features_only=True, **found).eval()(x)
        torch.testing.assert_close(maps, theirs.forward_intermediates(x, intermediates_only=True), atol=1e-4, rtol=0)
        assert not caplog.records
        other = timm.create_model("pyramid_pvt_v2_b0", attention="window/full/xca/full", num_classes=3, **found)
        assert other.eval()(x).shape == (1, 3)
    assert torch.equal(other.stages[0].blocks[0].attn.qkv.weight, ours.stages[0].blocks[0].attn.qkv.weight)
    assert "relative_position_bias_table" in caplog.text


@pytest.mark.data
def test_real_weights_load_by_name(data_dir: Path) -> None:
    file = data_dir / "weights" / "deit_tiny_patch16_224.safetensors"
    found = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file)}, "img_size": (160, 192)}
    theirs = timm.create_model("deit_tiny_patch16_224", **found).eval()
    ours = timm.create_model("columnar_tiny_patch16_224", attention="window:size=12,bias=false", **found).eval()
    x = torch.randn(1, 3, 160, 192)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=0)


def test_reads_the_authors_names_of_pvt() -> None:
    ours = small(STYLES["pvt"])
    linear = ["norm1", "attn.q", "attn.kv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    names = ["cls_token", *(f"pos_embed{i}" for i in range(1, 5))]
    layers = ["norm", "head", *(f"patch_embed{i}.{part}" for i in range(1, 5) for part in ("proj", "norm"))]
    for stage, depth in enumerate(SMALL["depths"], start=1):
        parts = linear + (["attn.sr", "attn.norm"] if stage < 4 else [])
        layers += [f"block{stage}.{i}.{part}" for i in range(depth) for part in parts]
    names += [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert set(from_pyramids({name: torch.zeros(1) for name in names})) == set(ours.state_dict())
    assert set(from_pyramids(ours.state_dict())) == set(ours.state_dict())


# What the skeletons compute, written out ---------------------------------------------------------------------------


def slow_block(block: Any, x: Tensor, height: int, width: int) -> Tensor:
    """One pre-norm block on x [B, N, C], from its weights, with keys from a strided convolution where there is one."""
    y, attn = block.norm1(x), block.attn
    z = y
    if hasattr(attn, "sr"):
        z = F.conv2d(y.transpose(1, 2).reshape(len(y), -1, height, width), attn.sr.weight, attn.sr.bias, attn.sr.stride)
        z = attn.sr_norm(z.flatten(2).transpose(1, 2))
    q, k, v = attn.qkv(y).chunk(3, 2)[0], *attn.qkv(z).chunk(3, 2)[1:]
    heads = []
    for a, b, c in zip(*(t.chunk(attn.num_heads, 2) for t in (q, k, v)), strict=True):
        heads.append(torch.softmax(a @ b.transpose(1, 2) / a.shape[2] ** 0.5, -1) @ c)
    x = x + attn.proj(torch.cat(heads, 2))
    return x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))


def test_pvt_by_hand() -> None:
    """A class token joins in the last stage, every stage adds its positions, and the head sees the class token."""
    model = small(STYLES["pvt"])
    images = x = torch.randn(2, 3, 64, 64)
    for i, stage in enumerate(model.stages):
        embed = model.patch_embed if i == 0 else stage.downsample
        x = F.conv2d(x, embed.proj.weight, embed.proj.bias, stride=4 if i == 0 else 2)
        side = x.shape[2]
        x = embed.norm(x.flatten(2).transpose(1, 2))
        if i == 3:
            x = torch.cat([stage.positions.cls_token.repeat(2, 1, 1), x], 1)
        x = x + stage.positions.pos_embed
        for block in stage.blocks:
            x = slow_block(block, x, side, side)
        if i < 3:
            x = x.transpose(1, 2).reshape(2, -1, side, side)
    torch.testing.assert_close(model(images), model.head(model.norm(x)[:, 0]), atol=1e-5, rtol=0)


def test_the_fair_pyramid_by_hand() -> None:
    """Fourier positions once, 2 × 2 merging (columns before rows), and the mean of all tokens."""
    model = small({})
    images = torch.randn(2, 3, 64, 64)
    x = model.patch_embed.norm(model.patch_embed.proj(images).flatten(2).transpose(1, 2))
    side = 16
    cells = 2 * torch.pi * torch.arange(1, side + 1) / (side + 1e-6)
    waves = cells[:, None] / 10000 ** (2 * (torch.arange(32) // 2) / 32)
    waves = torch.where(torch.arange(32) % 2 == 0, waves.sin(), waves.cos())
    table = torch.cat([waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)], 2).reshape(-1, 64)
    mix = model.stages[0].positions.encoding.token_projection
    x = x + F.linear(table, mix.weight[:, :, 0, 0], mix.bias)
    for i, stage in enumerate(model.stages):
        if i:
            x = x.reshape(2, side, side, -1)
            corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            side //= 2
            x = torch.cat(corners, 3).reshape(2, side**2, -1)
            x = stage.downsample.reduction(stage.downsample.norm(x))
        for block in stage.blocks:
            x = slow_block(block, x, side, side)
    torch.testing.assert_close(model(images), model.head(model.norm(x).mean(1)), atol=1e-5, rtol=0)


# Sizes -------------------------------------------------------------------------------------------------------------


def pvt_by_hand(depths: tuple[int, ...], v2: bool, dims: tuple[int, ...], ratios: tuple[int, ...]) -> tuple[int, int]:
    params, macs, side, before = 0, 0, 224, 3
    for i, (depth, dim, ratio, shrink) in enumerate(zip(depths, dims, ratios, (8, 4, 2, 1), strict=True)):
        kernel = ((7, 3) if v2 else (4, 2))[i > 0]
        side //= 2 if i else 4
        tokens, keys = side**2, (side // shrink) ** 2
        params += before * dim * kernel**2 + 3 * dim
        macs += tokens * before * dim * kernel**2
        if not v2:
            params += tokens * dim
            if i == 3:
                params, tokens, keys = params + 2 * dim, tokens + 1, keys + 1
        hidden = ratio * dim
        params += depth * (4 * dim**2 + 8 * dim + 2 * dim * hidden + hidden + dim)
        macs += depth * (2 * (tokens + keys) * dim**2 + 2 * tokens * keys * dim + 2 * tokens * dim * hidden)
        if shrink > 1:
            params += depth * (shrink**2 * dim**2 + 3 * dim)
            macs += depth * keys * shrink**2 * dim**2
        if v2:
            params += depth * 10 * hidden + 2 * dim
            macs += depth * 9 * tokens * hidden
        before = dim
    return params + (0 if v2 else 2 * before) + 1000 * (before + 1), macs + 1000 * before


def swin_by_hand(dim: int, depths: tuple[int, ...], heads: int) -> tuple[int, int]:
    params, macs, tokens = 51 * dim, 56**2 * 48 * dim, 56**2
    for i, depth in enumerate(depths):
        params += depth * (12 * dim**2 + 13 * dim + 169 * heads * 2**i)
        macs += depth * (12 * tokens * dim**2 + 2 * 49 * tokens * dim)
        if i < 3:
            params += 8 * dim + 8 * dim**2
            tokens //= 4
            macs += tokens * 8 * dim**2
            dim *= 2
    return params + 2 * dim + 1000 * (dim + 1), macs + 1000 * dim


WIDE, WIDE_MLP = (64, 128, 320, 512), (8, 8, 4, 4)
PUBLISHED: dict[str, tuple[tuple[int, int], str, str]] = {
    "pyramid_pvt_tiny": (pvt_by_hand((2, 2, 2, 2), False, WIDE, WIDE_MLP), "13.2", "1.9"),
    "pyramid_pvt_small": (pvt_by_hand((3, 4, 6, 3), False, WIDE, WIDE_MLP), "24.5", "3.8"),
    "pyramid_pvt_medium": (pvt_by_hand((3, 4, 18, 3), False, WIDE, WIDE_MLP), "44.2", "6.7"),
    "pyramid_pvt_large": (pvt_by_hand((3, 8, 27, 3), False, WIDE, WIDE_MLP), "61.4", "9.8"),
    "pyramid_pvt_v2_b0": (pvt_by_hand((2, 2, 2, 2), True, (32, 64, 160, 256), WIDE_MLP), "", ""),
    "pyramid_pvt_v2_b1": (pvt_by_hand((2, 2, 2, 2), True, WIDE, WIDE_MLP), "14.0", "2.1"),
    "pyramid_pvt_v2_b2": (pvt_by_hand((3, 4, 6, 3), True, WIDE, WIDE_MLP), "25.4", "4.0"),
    "pyramid_pvt_v2_b3": (pvt_by_hand((3, 4, 18, 3), True, WIDE, WIDE_MLP), "45.2", "6.9"),
    "pyramid_pvt_v2_b4": (pvt_by_hand((3, 8, 27, 3), True, WIDE, WIDE_MLP), "", ""),
    "pyramid_pvt_v2_b5": (pvt_by_hand((3, 6, 40, 3), True, WIDE, (4, 4, 4, 4)), "", ""),
    "pyramid_swin_tiny": (swin_by_hand(96, (2, 2, 6, 2), 3), "28.3", "4.5"),
    "pyramid_swin_small": (swin_by_hand(96, (2, 2, 18, 2), 3), "49.6", "8.7"),
    "pyramid_swin_base": (swin_by_hand(128, (2, 2, 18, 2), 4), "87.8", "15.4"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_macs(name: str) -> None:
    by_hand, params, gmacs = PUBLISHED[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    layers = model.costs()
    ours = sum(p.numel() for p in model.parameters()), sum(layer.macs.total for layer in layers)
    assert ours == by_hand
    assert sum(layer.params for layer in layers) == ours[0]
    if params:
        assert (f"{ours[0] / 1e6:.1f}", f"{ours[1] / 1e9:.1f}") == (params, gmacs)


@STYLE
@pytest.mark.parametrize("size", [(64, 64), (96, 64)], ids=str)
def test_layers_count_what_is_executed(style: dict[str, Any], size: tuple[int, int]) -> None:
    model = small(style)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *size))
    assert counter.get_total_flops() == 2 * sum(layer.macs.total for layer in model.costs(size))
    assert sum(layer.params for layer in model.costs(size)) == sum(p.numel() for p in model.parameters())


# Any image, any mix ------------------------------------------------------------------------------------------------


@STYLE
def test_any_image_size(style: dict[str, Any]) -> None:
    model = small(style)
    for height, width in ((64, 64), (33, 70), (128, 48)):
        maps = model.forward_intermediates(torch.randn(1, 3, height, width), intermediates_only=True)
        sides = [(-(-height // s), -(-width // s)) for s in (4, 8, 16, 32)]
        assert [tuple(m.shape[1:]) for m in maps] == [
            (dim, *side) for dim, side in zip(SMALL["embed_dims"], sides, strict=True)
        ]
        assert [(g.height, g.width) for g in model.grids((height, width))] == sides
        assert model(torch.randn(2, 3, height, width)).shape == (2, 5)


@pytest.mark.parametrize("attention", [REDUCED, "linformer:ratio=4"])
def test_set_input_size_keeps_the_function(attention: str) -> None:
    model = small(STYLES["pvt"], attention=attention)
    x = torch.randn(1, 3, 96, 64)
    before = model(x)
    model.set_input_size(img_size=(96, 64))
    assert model.stages[3].positions.pos_embed.shape == (1, 1 + 3 * 2, 64)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="patch_size=8"):
        model.set_input_size(patch_size=8)


@pytest.mark.parametrize(
    "attention",
    ["full", "2xwindow/2xfull", "window+reduced", "window/xca/2xfull", "full/7xwindow", "efficient+window:shift=3"],
)
def test_attentions_by_stage_and_layer(attention: str) -> None:
    model = small({}, attention=attention)
    assert model.attention == attention
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()


def test_twins_alternates_within_each_stage() -> None:
    names = [[spec.name for spec in stage.specs] for stage in small(STYLES["twins"]).stages]
    assert names == [["window", "reduced"], ["window"], ["window", "reduced", "window"], ["window", "full"]]


# timm's API --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [None, (1, 3), (0, 2), 2])
def test_features_only(out: Any) -> None:
    arguments = {} if out is None else {"out_indices": out}
    net = timm.create_model("pyramid_pvt_tiny", features_only=True, class_token=False, **arguments).eval()
    taken = {None: (0, 1, 2, 3), 2: (2, 3)}.get(out, out)
    assert net.feature_info.reduction() == [4 * 2**i for i in taken]
    with torch.no_grad():
        maps = net(torch.randn(1, 3, 96, 72))
    channels = net.feature_info.channels()
    assert [tuple(m.shape) for m in maps] == [
        (1, c, -(-96 // s), -(-72 // s)) for c, s in zip(channels, net.feature_info.reduction(), strict=True)
    ]


def test_forward_intermediates_stops_and_norms() -> None:
    model = small({})
    x = torch.randn(1, 3, 64, 64)
    features, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(features, model.forward_features(x))
    torch.testing.assert_close(maps[3].flatten(2).transpose(1, 2), features)
    early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early, maps[:2])
    with pytest.raises(UserError, match="expected NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")


@STYLE
def test_gradient_checkpointing_changes_nothing(style: dict[str, Any]) -> None:
    model = small(style).train()
    x = torch.randn(2, 3, 64, 64)

    def gradients(checkpointing: bool) -> list[Tensor]:
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), atol=0, rtol=0)


@STYLE
def test_weight_groups(style: dict[str, Any]) -> None:
    model = small(style)
    names = {name for name, _ in model.named_parameters()}
    positions = {name for name in names if ".positions.pos" in name or "cls_token" in name or "conv_positions" in name}
    assert model.no_weight_decay() & {name for name in names if ".attn." not in name} == positions
    assert model.no_weight_decay() <= names
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(names)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    first, last = model.stages[0].blocks[0].mlp.fc1.weight, model.stages[3].blocks[1].mlp.fc1.weight
    assert scale[id(model.patch_embed.proj.weight)] < scale[id(first)] < scale[id(last)] < scale[id(model.head.weight)]


def test_classifier_and_pooling() -> None:
    model = small(STYLES["pvt"])
    x = torch.randn(2, 3, 64, 64)
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 1 + 4, 64)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    model.reset_classifier(9, "avg")
    assert model(x).shape == (2, 9)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), tokens[:, 1:].mean(1))
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), tokens)


def test_stochastic_depth_grows_with_depth() -> None:
    model = Pyramid(**SMALL, drop_path_rate=0.7)
    rates = [block.drop_path1.drop_prob for block in model.blocks]
    assert rates == pytest.approx([0.1 * i for i in range(8)])


@pytest.mark.parametrize("name", ["pvt", "pvt v2", "twins"])
def test_compiles_whole(name: str) -> None:
    shape = {"embed_dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "attention": "reduced/window:shift=3+full"}
    model = small({**STYLES[name], **shape})
    x = torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"attention": "window/full"}, "names 2 parts, but the model has 4 stages with 8 layers"),
        ({"attention": "wimdow"}, "Did you mean 'window'"),
        ({"attention": [[]] * 4}, "expected \\[2, 1, 3, 2\\]"),
        ({"depths": (1, 2)}, "must have the same length"),
        ({"positions": "fourrier"}, "Did you mean 'fourier'"),
        ({"embedding": "conv"}, "merge, overlap, patch"),
        ({"class_token": True}, "needs learned positions"),
        ({"global_pool": "token"}, "expected one of 'avg', ''"),
    ],
)
def test_refusals_say_why(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Pyramid(**{**SMALL, **arguments})


def test_every_model_is_in_timm() -> None:
    assert set(MODELS) <= set(timm.list_models())
    assert {name for name, model in MODELS.items() if model.weights} <= set(timm.list_models(pretrained=True)) | {
        name.split(".")[0] for name in timm.list_models(pretrained=True)
    }
