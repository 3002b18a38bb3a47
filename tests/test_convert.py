"""Conversion: the same function where the attention is exact, the given model untouched, every decision told."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from attendless import UserError
from attendless.attention import Attention, Context, Grid, registry
from attendless.backbones import Columnar
from attendless.convert import (
    convert,
    convert_with_report,
    load,
    open_model,
    save,
)
from attendless.convert.breakeven import breakeven
from attendless.convert.exchange import select_layers
from attendless.integrations.rebuild.architecture import describe
from attendless.integrations.resize import resize
from attendless_cli.main import main

EXACT = ("full", "foveal:keep=1")
SPARSE = "foveal:keep=0.3,cell=2"
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
#: Tiny versions of the configurations people have: name, what is made smaller or otherwise.
KINDS = {
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 70, "init_values": 0.5}),
    "dinov2 with swiglu": ("vit_giant_patch14_reg4_dinov2", {"img_size": 56, "mlp_ratio": 2.5}),
    "deit3": ("deit3_small_patch16_224", {"img_size": 64, "init_values": 0.5}),
    "clip": ("vit_base_patch16_clip_224", {"img_size": 64}),
    "openai clip": ("vit_base_patch16_clip_quickgelu_224", {"img_size": 64}),
    "siglip": ("vit_base_patch16_siglip_224", {"img_size": 64}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", {"img_size": (64, 80)}),
    "augreg": ("vit_tiny_patch16_224", {"img_size": (48, 96)}),
    "qk norm, scaled norms": (
        "vit_tiny_patch16_224",
        {"img_size": 64, "qk_norm": True, "scale_attn_norm": True, "norm_layer": "rmsnorm", "reg_tokens": 2},
    ),
    "no class token": ("vit_tiny_patch16_224", {"img_size": 64, "class_token": False, "global_pool": "avg"}),
    "max pooling": ("vit_tiny_patch16_224", {"img_size": 64, "global_pool": "avgmax", "pool_include_prefix": True}),
    "no pooling": ("vit_tiny_patch16_224", {"img_size": 64, "global_pool": "", "num_classes": 0}),
    "any size, no biases": (
        "vit_tiny_patch16_224",
        {
            "img_size": 64,
            "dynamic_img_size": True,
            "qkv_bias": False,
            "proj_bias": False,
            "embed_norm_layer": "layernorm",
        },
    ),
}


def build(name: str, **arguments: object) -> nn.Module:
    return scramble(timm.create_model(name, **{**SMALL, **arguments})).eval()


def scramble(model: nn.Module) -> nn.Module:
    """Weights of which none is zero or one, so that each shows in the output."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return model


def images(model: nn.Module, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *model.patch_embed.img_size)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    name, arguments = KINDS[request.param]
    return build(name, **arguments)


@torch.no_grad()
def test_an_exact_attention_reproduces_the_original(model: nn.Module) -> None:
    x = images(model)
    for exact in EXACT:
        ours = convert(model, exact, below_breakeven="keep")
        assert ours.attention == exact
        torch.testing.assert_close(ours(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_sparse_one_runs_trains_a_step_saves_and_loads(model: nn.Module, tmp_path) -> None:
    ours = convert(model, SPARSE, below_breakeven="keep").train()
    x = images(model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    ours(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
    before = ours.blocks[0].attn.qkv.weight.clone()
    optimizer.step()
    assert not torch.equal(before, ours.blocks[0].attn.qkv.weight)
    save(ours, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    assert type(loaded) is type(ours)
    assert loaded.attention == ours.attention
    with torch.no_grad():
        assert torch.equal(loaded(x), ours.eval()(x))


def test_the_given_model_is_untouched() -> None:
    model = build("vit_tiny_patch16_224", img_size=64)
    before, modules = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    ours = convert(model, SPARSE, size=(96, 64), below_breakeven="keep")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    assert [type(m) for m in model.modules()] == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_travels_with_a_model() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.2, drop_rate=0.1).double().train()
    model.set_grad_checkpointing()
    model.patch_embed.requires_grad_(False)
    model.blocks[1].attn.requires_grad_(False)
    ours = convert(model, "linformer:keys=4", below_breakeven="keep")
    assert ours.training
    assert ours.grad_checkpointing
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    frozen = {name for name, value in ours.named_parameters() if not value.requires_grad}
    assert frozen == {name for name, value in model.named_parameters() if not value.requires_grad}
    assert ours.head_drop.p == 0.1
    assert ours.blocks[1].drop_path1.drop_prob == model.blocks[1].drop_path1.drop_prob > 0
    assert ours.pretrained_cfg["mean"] == model.pretrained_cfg["mean"]


def test_layers_and_parts_choose_where() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, depth=4)
    keep = {"below_breakeven": "keep"}
    assert convert(model, "window:size=2", layers="1:3", **keep).attention == "full/2xwindow:size=2/full"
    assert (
        convert(model, "2xfull/window:size=2/window:size=3", **keep).attention == "2xfull/window:size=2/window:size=3"
    )
    twice = convert(convert(model, "window:size=2", layers=[0], **keep), "window:size=3", layers="-1", **keep)
    assert twice.attention == "window:size=2/2xfull/window:size=3"
    with pytest.raises(UserError, match="names 3 layers, but the model has 4"):
        convert(model, "3xfull")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [(None, {0, 1, 2, 3, 4}), ("2:", {2, 3, 4}), (":2", {0, 1}), ("-2:", {3, 4}), ("0,2-3", {0, 2, 3}), ("-1", {4})],
)
def test_selecting_layers(text: str | None, chosen: set[int]) -> None:
    assert select_layers(text, 5) == chosen


@pytest.mark.parametrize("text", ["5", "2-7", "-6", "x", "3:3", "", "1;2"])
def test_layers_that_do_not_exist(text: str) -> None:
    with pytest.raises(UserError, match="layers"):
        select_layers(text, 5)


def test_below_break_even_a_layer_stays_full_unless_kept() -> None:
    model = build("vit_tiny_patch16_224", img_size=64)
    spec = "linformer:keys=65"  # more averages than there are tokens
    left, report = convert_with_report(model, spec)
    assert left.attention == "full"
    assert {(row.asked, row.attention, row.decision) for row in report.layers} == {(spec, "full", "left full")}
    assert "× the MACs of full attention" in report.layers[0].reason
    assert report.before == report.after
    kept, report = convert_with_report(model, spec, below_breakeven="keep")
    assert kept.attention == spec
    assert report.layers[0].decision == "converted"
    assert report.layers[0].reason.endswith("kept as asked")
    with pytest.raises(UserError, match="unknown below_breakeven 'maybe'"):
        convert(model, spec, below_breakeven="maybe")


def test_the_break_even_rule_counts_everything_the_attention_adds() -> None:
    grid = Grid(8, 8)
    full, lean = (registry.create(s, 32, 2, grid=grid) for s in ("full", "window:size=2,bias=false"))
    assert breakeven(full, grid).keep
    assert breakeven(lean, grid).keep
    assert not breakeven(lean, grid, current=lean.macs(grid)).keep


def test_costs_and_order_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of each attention once for its slot, or for the decision, and once by its backbone."""
    counted: Counter[object] = Counter()
    orders: list[object] = []
    plain, check = Attention.macs, Columnar.check_order

    def macs(self: Attention, *args: object) -> object:
        counted[self] += 1
        return plain(self, *args)

    model = convert(build("vit_tiny_patch16_224"), "full")
    monkeypatch.setattr(Attention, "macs", macs)
    monkeypatch.setattr(Columnar, "check_order", lambda self: (orders.append(self), check(self)))
    convert(model, "axial", below_breakeven="keep")
    assert max(counted.values()) == 2
    convert(model, "full", tokens="tome:r=1")
    assert len(orders) == 2


def test_the_report_adds_up() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, depth=3)
    x = images(model, 3)
    ours, report = convert_with_report(model, "linformer:keys=2", layers="1:", below_breakeven="keep", check=x)
    first, second, _ = report.layers
    assert (first.decision, first.new, first.dropped) == ("not chosen", (), ())
    assert second.copied == ("proj.bias", "proj.weight", "qkv.bias", "qkv.weight")
    assert second.new == ("down",)
    assert report.elsewhere + sum(len(row.copied) for row in report.layers) == len(model.state_dict())
    # The core's share of a block is N / (N + 6C): qkv and proj are 4NC², the MLP 8NC², the core 2N²C.
    tokens, width = 17, 48
    assert first.before.share == pytest.approx(tokens / (tokens + 6 * width))
    assert first.before.cap == pytest.approx(1 / (1 - first.before.share))
    rows = [row for row in ours.costs() if row.spec is not None]
    assert [row.after for row in report.layers] == [row.macs for row in rows]
    with torch.no_grad():
        gap = (ours(x) - model(x)).abs().max().item()
    assert report.difference is not None
    assert report.difference.largest == pytest.approx(gap, rel=1e-4)
    found = json.loads(json.dumps(report.as_dict()))
    assert [row["attention"] for row in found["layers"]] == ["full", "linformer:keys=2", "linformer:keys=2"]
    text = str(report)
    assert "2 of 3 layers converted" in text
    assert "2 weights are new and untrained" in text
    assert text.count("not chosen") == 1


@torch.no_grad()
@pytest.mark.parametrize("size", [(96, 64), (32, 128), (64, 64)], ids=str)
def test_sizes_of_any_aspect_resample_positions_as_timm_does(size: tuple[int, int]) -> None:
    model = build("vit_tiny_patch16_224", img_size=64)
    ours = convert(model, "full", size=size)
    grid = (size[0] // 16, size[1] // 16)
    expected = resample_abs_pos_embed(model.pos_embed, new_size=grid, old_size=(4, 4), num_prefix_tokens=1)
    torch.testing.assert_close(ours.pos_embed, expected)
    assert ours(torch.randn(1, 3, *size)).shape == (1, 7)
    assert tuple(ours.pretrained_cfg["input_size"]) == (3, *size)


def test_only_what_was_trained_counts_as_lost() -> None:
    model = convert(build("vit_tiny_patch16_224", img_size=64), "bigbird", layers="0", below_breakeven="keep")
    assert dict(model.blocks[0].attn.named_buffers())  # the drawn pattern is no weight
    _, report = convert_with_report(convert(model, "linformer:keys=4", layers="1", below_breakeven="keep"), "full")
    assert [row.dropped for row in report.layers] == [(), ("down",)]


def test_an_attentions_own_weights_follow_the_size() -> None:
    model = convert(build("vit_tiny_patch16_224", img_size=64), "linformer:keys=4", below_breakeven="keep")
    larger = convert(model, "linformer:keys=4", size=(96, 64), below_breakeven="keep")
    assert larger.blocks[0].attn.down.shape[-1] == 1 + 6 * 4
    assert larger(torch.randn(1, 3, 96, 64)).shape == (1, 7)


def test_sizes_that_cannot_be() -> None:
    model = build("vit_tiny_patch16_224", img_size=64)
    with pytest.raises(UserError, match="65x64 is not a whole number of 16x16 patches"):
        convert(model, "full", size=(65, 64))
    with pytest.raises(UserError, match="8x8"):
        resize(model, (8, 8))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("vit_base_patch16_xp_224", {}, "blocks.0 is a ParallelScalingBlock"),
        ("vit_base_patch16_rpn_224", {}, "blocks.0 is a ResPostBlock"),
        ("vit_tiny_r_s16_p8_224", {"img_size": 64}, "HybridEmbed is not supported.*; attendless.patch exchanges"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "blocks.0.attn is a DiffAttention"),
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5}, "patch_drop is PatchDropout"),
        (
            "test_resnet",
            {},
            "ResNet is not supported: it holds no attention of a known class. There are: ",
        ),
        ("test_convnext", {}, "ConvNeXt is not supported: it holds no attention"),  # as DINOv3 has some
        ("beit_base_patch16_224", {}, "Beit is not supported: blocks.0.attn: its relative position bias"),
        ("vit_relpos_small_patch16_224", {}, "RelPos is not supported: blocks.0.attn: its relative position bias"),
        ("hiera_tiny_224", {}, "Hiera is not supported: blocks.0.attn: its tokens are ordered by the unit"),
        ("naflexvit_base_patch16_gap", {}, "NaFlexVit is not supported: .* have a grid each"),
    ],
)
def test_what_is_not_supported_is_named(name: str, arguments: dict[str, object], says: str) -> None:
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    small = {} if any(kind in name for kind in ("resnet", "convnext", "hiera")) else SMALL
    model = timm.create_model(name, **{**small, **arguments})
    with pytest.raises(UserError, match=says):
        convert(model, "full")


def test_a_part_that_was_changed_by_hand_is_noticed() -> None:
    model = build("vit_tiny_patch16_224", img_size=64)
    model.blocks[1].mlp.act = nn.ReLU()
    with pytest.raises(UserError, match=r"cannot be rebuilt: blocks.1.mlp.act is ReLU\(\), rebuilt as GELU"):
        describe(model)
    model = build(*KINDS["dinov2 with swiglu"][:1], **KINDS["dinov2 with swiglu"][1])
    model.blocks[1].mlp.gate_last = True  # shows neither in a weight's shape nor in print
    with pytest.raises(UserError, match=r"blocks.1.mlp.gate_last=True, rebuilt as False"):
        describe(model)


def test_attentions_that_read_another_layer_need_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader(Attention):
        name = "reader"
        reads = provides = frozenset({"scores"})

        def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
            assert context.scores is not None
            return context.scores.softmax(-1) @ v, context

        def core_macs(self, grid: Grid) -> int:
            return grid.tokens**2 * self.attn_dim

    monkeypatch.setitem(registry._ATTENTIONS, "reader", Reader)
    model = build("vit_tiny_patch16_224", img_size=64)
    assert convert(model, "reader", layers="1:")(images(model)).shape == (2, 7)
    with pytest.raises(
        UserError, match=r"reader in blocks.0 reads the scores of the layer before, but it is the first layer"
    ):
        convert(model, "reader")
    with pytest.raises(UserError, match="Xcit does not pass on the scores it reads"):
        convert(timm.create_model("xcit_nano_12_p16_224", depth=2), "reader", layers="1:")


def test_opening_by_name_with_weights_of_another_size_and_classifier(tmp_path) -> None:
    source = build("vit_tiny_patch16_224", img_size=64, num_classes=5)
    save(source, tmp_path / "w.safetensors")
    torch.save({"state_dict": source.state_dict()}, tmp_path / "w.pth")
    small = {key: value for key, value in SMALL.items() if key != "num_classes"}
    name = "attendless_test_small"
    timm.models.register_model(_entry(name, {**small, "img_size": 64}))
    x = images(source)
    with torch.no_grad():
        for file in ("w.safetensors", "w.pth"):
            opened = open_model(name, weights=tmp_path / file)
            assert opened.num_classes == 5
            assert torch.equal(opened(x), source(x))
        wide = open_model(
            name, weights=tmp_path / "w.pth", size="64x96", attention="window:size=2", below_breakeven="keep"
        )
        assert wide.attention == "window:size=2"
        expected = convert(source, "window:size=2", size=(64, 96), below_breakeven="keep")
        assert torch.equal(wide(torch.ones(1, 3, 64, 96)), expected(torch.ones(1, 3, 64, 96)))
    fresh = open_model(name, weights=tmp_path / "w.pth", num_classes=3)
    assert fresh.head.weight.shape[0] == 3
    assert torch.equal(fresh.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    again = open_model(tmp_path / "w.safetensors", num_classes=3)
    assert again.head.weight.shape[0] == 3
    ours = open_model("pyramid_pvt_v2_b0", attention="full", num_classes=2)
    assert ours.attention == "full"
    some = open_model("pyramid_pvt_v2_b0", attention="window", layers="0", num_classes=2)
    assert some.attention.startswith("window+reduced:ratio=8/")
    with pytest.raises(UserError, match=r"do not fit the model: .* \(and \d+ more\)"):
        open_model("vit_tiny_patch16_224", weights=tmp_path / "w.pth")


def _entry(name: str, arguments: dict[str, object]):
    def entry(pretrained: bool = False, **kwargs: object) -> nn.Module:
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith("pretrained") and k != "cache_dir"}
        return timm.create_model("vit_tiny_patch16_224", **{**arguments, **kwargs})

    entry.__name__, entry.__module__ = name, "timm.models.vision_transformer"
    return entry


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deit_tiny_patch16_225", "Did you mean 'deit_tiny_patch16_224'"),
        ("nowhere/m.safetensors", "no such file"),
        ("qqqq", "neither a file nor a name timm knows"),
    ],
)
def test_opening_what_does_not_exist(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_model(name)


def test_the_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = str(tmp_path / "fast.safetensors"), str(tmp_path / "report.json")
    words = ["convert", "deit_tiny_patch16_224", "--size", "64x96", "--attention", "window:size=2", "--layers", "1:"]
    assert main([*words, "--check", "--out", out, "--json", report]) == 0
    printed = capsys.readouterr().out
    assert "11 of 12 layers converted" in printed
    assert "outputs on 4 images" in printed
    found = json.loads((tmp_path / "report.json").read_text())
    assert {"stamp", "model", "size", "macs", "cap", "rows"} <= found.keys()
    assert [row["decision"] for row in found["rows"]] == ["not chosen"] + ["converted"] * 11
    again = str(tmp_path / "dense.safetensors")
    assert main(["convert", out, "--attention", "full", "--out", again]) == 0
    with torch.no_grad():
        x = torch.randn(1, 3, 64, 96)
        assert torch.equal(load(again)(x), convert(load(out), "full")(x))
    with pytest.raises(SystemExit):
        main([*words, "--out", "fast.onnx"])
    assert "expected a name that ends in .safetensors" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.data
def test_pretrained_weights_answer_the_same(data_dir) -> None:
    weights = data_dir / "weights" / "deit_tiny_patch16_224.safetensors"
    for size in (224, (160, 256)):
        model = open_model("deit_tiny_patch16_224", weights=weights, size=size)
        x = torch.rand(2, 3, *((size, size) if isinstance(size, int) else size))
        for exact in EXACT:
            ours = convert(model, exact, below_breakeven="keep")
            torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch14_reg4_dinov2",
        "deit3_small_patch16_224",
        "vit_base_patch16_clip_224",
        "vit_base_patch16_siglip_224",
        "deit_tiny_distilled_patch16_224",
    ],
)
def test_the_models_people_have_at_their_own_size(name: str, tmp_path) -> None:
    model = timm.create_model(name).eval()
    x = torch.randn(1, 3, 224, 224)
    if "dinov2" in name:
        resize(model, (224, 224))
    exact = convert(model, "foveal:keep=1", below_breakeven="keep")
    torch.testing.assert_close(exact(x), model(x), atol=1e-4, rtol=1e-4)
    sparse = convert(model, "foveal:keep=0.1", below_breakeven="keep")
    save(sparse, tmp_path / "m.safetensors")
    assert torch.equal(load(tmp_path / "m.safetensors")(x), sparse(x))


@pytest.mark.slow
def test_every_vision_transformer_of_timm_is_described_or_refused_by_name() -> None:
    homes = [f"timm.models.{name}" for name in ("vision_transformer", "deit", "vision_transformer_hybrid")]
    refused = {}
    names = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__ in homes]
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name)
        try:
            describe(model)
        except UserError as error:
            refused[name] = str(error)
    reasons = ("HybridEmbed", "ParallelScalingBlock", "ParallelThingsBlock", "ResPostBlock", "DiffAttention")
    assert all(any(reason in text for reason in (*reasons, "DiffParallel")) for text in refused.values()), refused
    assert len(names) > 150
    assert len(refused) < 30
