"""Token reduction in models with rotary positions: their own layers run, on fewer tokens, each at its own place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attendless
from attendless import UserError
from attendless.convert import convert, convert_with_report, load, save
from attendless.export.trace import traced
from attendless.measure.macs import count_by_running, layer_costs

SMALL = {"depth": 4, "embed_dim": 96, "num_heads": 3, "num_classes": 5}
MODELS = {
    "vit_small_patch16_dinov3": (SMALL, (64, 96)),
    "eva02_tiny_patch14_224": ({**SMALL, "img_size": 84}, (84, 84)),
    "eva02_base_patch14_448": ({**SMALL, "img_size": 84}, (84, 84)),  # q, k and v apart, norms inside
    "vit_small_patch16_rope_mixed_224": ({**SMALL, "img_size": 64}, (64, 64)),  # a rotation per layer and head
    "vit_pe_core_tiny_patch16_384": ({**SMALL, "img_size": 64}, (64, 64)),  # AttentionRope
}
REDUCERS = [
    *("rank:r=3", "tome:r=3", "pitome:r=3", "soft:r=3", "atc:r=3", "zerotprune:r=3", "tome:r=3,until=3", "blank"),
    *("evit:keep=0.6,at=1/2", "evit:keep=0.6,at=1/2,fuse=false"),
]


def build(name: str) -> tuple[Any, Tensor]:
    arguments, size = MODELS[name]
    torch.manual_seed(0)
    model: Any = timm.create_model(name, **arguments)
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            nn.init.normal_(parameter, std=0.1)
    if model.patch_embed.img_size is not None:
        model.set_input_size(img_size=size)
    return model.eval(), torch.randn(2, 3, *size)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_token_removed_is_the_model_itself(name: str) -> None:
    model, x = build(name)
    ours = convert(model, tokens="rank:r=0/0/0/0", size=x.shape[-2:])
    assert torch.equal(ours(x), model(x))
    started = convert(model, tokens="evit:keep=1,at=1", size=x.shape[-2:])  # all blocks take and restore tokens
    torch.testing.assert_close(started(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", REDUCERS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_reducer_serves_every_model(name: str, tokens: str) -> None:
    model, x = build(name)
    ours, report = convert_with_report(model, tokens=tokens, size=x.shape[-2:])
    out = ours(x)
    assert torch.isfinite(out).all()
    assert not torch.allclose(out, model(x))
    assert report.reduction is not None
    assert report.reduction.tokens == tokens
    features = ours.forward_features(x)
    assert features.shape == model.forward_features(x).shape  # all tokens, as the model around expects
    grid, P = ours.blocks[-1].around.watch.context.grid, model.num_prefix_tokens
    few = torch.randn(2, grid.tokens, 7)  # restored and taken again, every token is the same
    cells = grid.places(few)[..., None].expand(-1, -1, 7)
    assert torch.equal(grid.restore(few)[:, P:].gather(1, cells), few[:, P:])
    single = torch.cat([ours(image[None]) for image in x])
    torch.testing.assert_close(single, out, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_remaining_tokens_keep_their_rotation() -> None:
    """By hand: drop patches after the first block, and rotate what is left at the places where it was."""
    model, x = build("vit_small_patch16_dinov3")
    ours = convert(model, tokens="evit:keep=0.5,at=0,fuse=false", size=x.shape[-2:])
    tokens, rope = model._pos_embed(model.patch_embed(x))
    caught: list[Tensor] = []
    seen = ours.blocks[1].attn.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append(kwargs["rope"]), with_kwargs=True
    )
    kept = ours.blocks[0].around.watch
    got = ours(x)
    seen.remove()
    cells = kept.context.grid.cells
    tokens = model.blocks[0](model.norm_pre(tokens), rope=rope)
    P = model.num_prefix_tokens
    tokens = torch.cat([tokens[:, :P], tokens[:, P:].gather(1, cells[..., None].expand(-1, -1, 96))], dim=1)
    places = rope[cells][:, None]
    assert torch.equal(caught[0], places)
    for block in model.blocks[1:]:
        tokens = block(tokens, rope=places)
    expected = model.forward_head(model.norm(tokens)) if model.global_pool == "token" else None
    if expected is not None:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_merged_token_keeps_the_place_of_the_patch_that_others_joined() -> None:
    model, x = build("vit_small_patch16_dinov3")
    ours = convert(model, tokens="rank:r=5,start=0", size=x.shape[-2:])
    ours(x)
    grid = ours.blocks[0].around.watch.context.grid
    assert grid.patches == 24 - 4 * 5
    for image in range(2):
        assert grid.owners[image, grid.cells[image]].tolist() == list(range(grid.patches))
        assert grid.sizes[image].sum() == 24


def test_costs_count_the_tokens_that_are_left() -> None:
    model, _ = build("vit_small_patch16_rope_mixed_224")
    ours, report = convert_with_report(model, tokens="rank:r=4,start=1")
    rows = layer_costs(ours)
    assert [row.grid.tokens for row in rows[:4]] == [17, 17, 13, 9]
    assert report.reduction is not None
    assert report.reduction.counts == (17, 17, 13, 9, 5)
    counted, executed = sum(row.macs.total for row in rows[:4]), count_by_running(ours).total
    assert counted <= executed < count_by_running(model).total


@torch.no_grad()
def test_together_with_foveal_attention_and_in_a_file(tmp_path: Path) -> None:
    model, x = timm.create_model("eva02_tiny_patch14_224", num_classes=5).eval(), torch.randn(2, 3, 56, 56)
    ours = convert(model, "foveal:keep=0.5", tokens="rank:r=1,start=1", below_breakeven="keep", size=56)
    save(ours, tmp_path / "fast.safetensors")
    again = load(tmp_path / "fast.safetensors")
    assert torch.equal(again(x), ours(x))
    none, whole = convert(ours, "full", tokens="none"), convert(model, "full", size=56)
    assert not any("reducer" in name for name, _ in none.named_modules())
    torch.testing.assert_close(none(x), whole(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_exported_graph_computes_the_same() -> None:
    for name in ("vit_small_patch16_dinov3", "eva02_tiny_patch14_224"):
        model, x = build(name)
        ours = convert(model, tokens="rank:r=3", size=x.shape[-2:])
        graph = traced(ours, 3, tuple(x.shape[-2:]), None, "torch").module()
        torch.testing.assert_close(graph(x), ours(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_compiled_model_computes_the_same() -> None:
    model, x = build("vit_small_patch16_rope_mixed_224")
    ours = convert(model, tokens="rank:r=3")
    torch._dynamo.reset()
    run = torch.compile(ours, backend="eager")
    torch.testing.assert_close(run(x), ours(x), atol=1e-4, rtol=1e-4)


def test_gradients_reach_every_weight() -> None:
    model, x = build("vit_small_patch16_rope_mixed_224")
    ours = convert(model, tokens="rank:r=3,start=1")
    ours(x).square().sum().backward()
    names = [name for name, value in ours.named_parameters() if value.grad is None]
    theirs = convert(model, tokens="none")
    theirs(x).square().sum().backward()
    assert names == [name for name, value in theirs.named_parameters() if value.grad is None]


def test_refusals() -> None:
    model, _ = build("vit_small_patch16_rope_mixed_224")
    with pytest.raises(UserError, match=r"window.*cannot serve grid 1\+4x4 reduced to"):
        convert(model, "window:size=2,bias=false", tokens="rank:r=3,start=0", below_breakeven="keep")
    with pytest.raises(UserError, match="not exact"):
        convert(model, tokens="blank:exact=true")
    with pytest.raises(UserError, match="require every token"):
        attendless.convert(timm.create_model("samvit_base_patch16", img_size=64, depth=2), tokens="rank:r=3")
