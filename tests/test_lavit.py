"""LaViT's parts on the backbones: scores carried between stages, its backbones, and seven others with `lavit`."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import attendless
from attendless import (
    Context,
    Grid,
    UserError,
    convert,
    create,
)
from attendless.backbones import MODELS, CeiT, DeepViT, Pyramid, Stemmed
from attendless.backbones.carry import Carry, key_grid
from attendless.backbones.ceit import LocalMlp
from attendless.backbones.cost import parameters
from attendless.backbones.plugins import PLUGINS, with_less
from attendless.backbones.stem import ConvEmbed, LinePool
from attendless.measure.macs import count, count_by_running
from attendless.train.objective import Supervised

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
STAGES = {"img_size": 64, "embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


# Scores between stages -----------------------------------------------------------------------------------------------


def carry(kind: str, before: str, first: str, old: Grid, new: Grid, heads: tuple[int, int] = (2, 2)) -> Carry:
    last = create(before, 16, heads[0], grid=old)
    return Carry(kind, last, create(first, 16, heads[1], grid=new), ConvEmbed(16, 16, 2))


def peak_of(row: Tensor, grid: Grid) -> tuple[int, int]:
    return divmod(int(row.argmax()), grid.width)


@pytest.mark.parametrize("kind", ["grid", "conv", "interp"])
@pytest.mark.parametrize("sides", [(8, 8), (4, 10), (7, 5)])
@torch.no_grad()
def test_a_querys_peak_stays_where_it_was(kind: str, sides: tuple[int, int]) -> None:
    """Each patch looks at one patch far from it; a cell of the new stage must look at the cell that one is in."""
    old, new = Grid(*sides), Grid(-(-sides[0] // 2), -(-sides[1] // 2))
    made, down = carry(kind, "full", "full", old, new), ConvEmbed(16, 16, 2)
    for y, x in ((0, 0), (1, 2), (3, 4)):
        ty, tx = (y + 3) % old.height, (x + 1) % old.width
        scores = torch.zeros(1, 2, old.tokens, old.tokens)
        for qy in range(y // 2 * 2, min(y // 2 * 2 + 2, old.height)):
            for qx in range(x // 2 * 2, min(x // 2 * 2 + 2, old.width)):
                for ky in range(ty // 2 * 2, min(ty // 2 * 2 + 2, old.height)):
                    for kx in range(tx // 2 * 2, min(tx // 2 * 2 + 2, old.width)):
                        scores[0, :, qy * old.width + qx, ky * old.width + kx] = 9
        found = made(scores, old, new, new.tokens, down)
        query = y // 2 * new.width + x // 2
        assert peak_of(found[0, 0, query], new) == (ty // 2, tx // 2)


@torch.no_grad()
def test_the_grid_is_averaged_over_all_four_axes() -> None:
    old, new = Grid(4, 6), Grid(2, 3)
    made = carry("grid", "full", "lavit", old, new)  # taken as they are: nothing but the pooling
    scores = torch.randn(2, 2, 24, 24)
    found = made(scores, old, new, 6, ConvEmbed(16, 16, 2))
    slow = scores.view(2, 2, 2, 2, 3, 2, 2, 2, 3, 2).mean((3, 5, 7, 9)).reshape(2, 2, 6, 6)
    torch.testing.assert_close(found, slow)
    learned = carry("conv", "full", "lavit", old, new)
    torch.testing.assert_close(learned(scores, old, new, 6, ConvEmbed(16, 16, 2)), slow)  # it starts as the mean


@torch.no_grad()
def test_keys_that_do_not_become_fewer_are_left_and_heads_are_mapped() -> None:
    old, new = Grid(8, 8), Grid(4, 4)
    for kind in ("grid", "conv", "interp"):
        made = carry(kind, "reduced:ratio=4", "reduced:ratio=2", old, new, heads=(1, 4))
        scores = torch.randn(2, 1, 64, 4)
        found = made(scores, old, new, 4, ConvEmbed(16, 16, 2))
        assert found.shape == (2, 4, 16, 4)
        if kind != "interp":
            pooled = scores.view(2, 1, 4, 2, 4, 2, 4).mean((3, 5)).reshape(2, 1, 16, 4)
            expected = (pooled - pooled.mean(-1, keepdim=True)) / (pooled.var(-1, correction=0) + 1e-5).sqrt()[
                ..., None
            ]
            torch.testing.assert_close(found, expected.expand(-1, 4, -1, -1), atol=1e-4, rtol=1e-4)
    with_class = Grid(4, 4, 1)
    found = carry("grid", "full", "full", old, with_class)(
        torch.randn(1, 2, 64, 64), old, with_class, 17, ConvEmbed(16, 16, 2)
    )
    assert found.shape == (1, 2, 17, 17)
    assert found[:, :, 0].abs().sum() == found[..., 0].abs().sum() == 0


def test_how_many_keys_there_are_tells_where_they_stand() -> None:
    assert key_grid(Grid(56, 56), 49) == Grid(7, 7)
    assert key_grid(Grid(12, 4), 3) == Grid(3, 1)
    assert key_grid(Grid(7, 7, 1), 50) == Grid(7, 7, 1)
    with pytest.raises(UserError, match="5 keys are not made of blocks"):
        key_grid(Grid(8, 8), 5)


@torch.no_grad()
def test_what_is_carried_is_added_to_the_first_layers_scores() -> None:
    torch.manual_seed(0)
    model = Pyramid("full", **STAGES, carry="grid").eval()
    seen = {step.number: step for step in model.walk(*model.embed(IMAGES))}
    assert seen[1].context.wants == {"scores"}  # the last of the first stage leaves them
    _, entered = model.stages[1].enter(seen[2].x, seen[2].context)
    block, x = model.stages[1].blocks[0], model.stages[1].enter(seen[2].x, seen[2].context)[0]
    q, k, v = block.attn.project(block.norm1(x))
    scores = block.attn.scale * q @ k.mT + entered.residual
    out, _ = block.attn(block.norm1(x), entered)
    torch.testing.assert_close(out, block.attn.merge(scores.softmax(-1) @ v), atol=1e-5, rtol=1e-4)
    assert seen[3].context.residual is None
    assert seen[3].context.scores is None


def test_stages_that_cannot_carry_are_refused() -> None:
    with pytest.raises(UserError, match="window ends a stage, but provides no scores of its tokens"):
        Pyramid("window/full", **STAGES, carry="grid")
    with pytest.raises(UserError, match="foveal begins a stage, but does not read scores"):
        Pyramid("full/foveal", **STAGES, carry="grid")
    with pytest.raises(UserError, match="unknown carry 'mean'"):
        Pyramid("full", **STAGES, carry="mean")
    with pytest.raises(UserError, match="reads 1"):
        Pyramid("full/lavit", **STAGES, carry="grid")
    model = Pyramid("full", **STAGES, carry="conv")
    with pytest.raises(UserError, match="built for other attentions"):
        convert(model, "full/reduced/full/full", below_breakeven="keep")


def test_gradients_flow_through_the_carry_the_same_with_checkpointing() -> None:
    model = Pyramid("full", **STAGES, carry="conv").train()
    found = []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        model.zero_grad()
        model(IMAGES).square().sum().backward()
        found.append({name: value.grad.clone() for name, value in model.named_parameters()})
    assert found[0]["stages.1.carry.pool.weight"].abs().sum() > 0
    assert found[0]["stages.1.carry.heads.weight"].abs().sum() > 0
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], msg=name)


# The other backbones -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_lines_are_pooled_and_so_are_their_scores() -> None:
    pool, grid = LinePool(), Grid(4, 5)
    x = torch.randn(2, 3, 4, 5)
    slow = torch.stack([x.flatten(2)[..., 2 * i : 2 * i + 3].amax(-1) for i in range(9)], dim=1)
    assert torch.equal(pool(x), slow)
    assert pool.shrunk(grid) == Grid(1, 9)
    model = Pyramid("full/lavit", img_size=64, patch_size=16, embed_dims=(16, 16), depths=(1, 1), num_heads=(2, 2),
                    num_classes=5, embedding="pool", positions="learned", carry="grid").eval()  # fmt: skip
    last = next(step for step in model.walk(*model.embed(IMAGES)) if step.number == 1)
    _, entered = model.stages[1].enter(last.x, last.context)
    rows = torch.stack([last.context.scores[:, :, 2 * i : 2 * i + 3].mean(2) for i in range(7)], dim=2)
    expected = torch.stack([rows[..., 2 * i : 2 * i + 3].mean(-1) for i in range(7)], dim=-1)
    torch.testing.assert_close(entered.scores, expected)
    with torch.device("meta"):
        sizes = [parameters(timm.create_model(f"columnar_hvt_{size}")) for size in ("tiny", "small")]
    assert sizes == [22118632, 22049896]


@torch.no_grad()
def test_ceits_mlp_and_its_last_attention_against_the_equations() -> None:
    torch.manual_seed(0)
    mlp = LocalMlp(6, 12).eval()
    for part in (mlp.bn1, mlp.bn2, mlp.bn3):
        part.running_mean.normal_()
        part.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 13, 6)
    norm = lambda y, bn: (y - bn.running_mean) / (bn.running_var + 1e-5).sqrt()  # noqa: E731
    y = F.gelu(norm(x[:, 1:] @ mlp.fc1.weight.T + mlp.fc1.bias, mlp.bn1)).view(2, 3, 4, 12)
    padded = F.pad(y, (0, 0, 1, 1, 1, 1))
    z = mlp.dwconv.bias + sum(
        padded[:, i : i + 3, j : j + 4] * mlp.dwconv.weight[:, 0, i, j] for i in range(3) for j in range(3)
    )
    z = norm(F.gelu(norm(z, mlp.bn2)).view(2, 12, 12) @ mlp.fc2.weight.T + mlp.fc2.bias, mlp.bn3)
    out = mlp(x, [3, 4])
    torch.testing.assert_close(out[:, 1:], z, atol=1e-5, rtol=1e-4)
    assert torch.equal(out[:, 0], x[:, 0]), "the normed class token passes"
    model = CeiT(**SMALL, stem=8).eval()
    classes = []
    x, context = model.embed(IMAGES)
    for block in model.blocks:
        x, _ = block(x, Context(context.grid))
        classes.append(x[:, :1])
    expected = model.layer_attention(torch.cat(classes, 1))
    found, left = model.forward_context(IMAGES)
    torch.testing.assert_close(found[:, :1], model.norm(expected))
    assert left.trail == ()
    alone = model.layer_attention(torch.cat([classes[-1]] * 3, 1))  # it does attend to the others
    assert (alone - expected).abs().max() > 1e-5


@torch.no_grad()
def test_reattention_mixes_heads_after_the_softmax() -> None:
    grid = Grid(3, 3)
    torch.manual_seed(0)
    layer = create("reattention", 16, 2, grid=grid).eval()
    layer.init_weights()
    x = torch.randn(2, 9, 16)
    q, k, v = layer.project(x)
    maps = torch.softmax(layer.scale * q @ k.mT, -1)
    mixed = torch.einsum("hg,bgnm->bhnm", layer.reattn.conv.weight[:, :, 0, 0], maps)
    mixed = (mixed + layer.reattn.conv.bias[:, None, None]) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(layer(x, Context(grid))[0], layer.merge(mixed @ v), atol=1e-5, rtol=1e-4)
    _, left = layer(x, Context(grid, frozenset({"scores"})))
    torch.testing.assert_close(left.scores, layer.scale * q @ k.mT)  # handed on as they were before


@pytest.mark.parametrize(
    "model",
    [
        lambda: CeiT(**SMALL, stem=8),
        lambda: Stemmed(**SMALL, stem=8, kernels=(7, 3), skip=2.0, attention="2xfull/reattention"),
        lambda: DeepViT(**SMALL, stem=8, kernels=(7, 3), skip=0.5, attention="2xfull/reattention:scale"),
        lambda: Pyramid("full/lavit", img_size=64, patch_size=16, embed_dims=(16, 16), depths=(2, 1), num_heads=(2, 2),
                        num_classes=5, embedding="pool", positions="learned", carry="interp"),
    ],
)  # fmt: skip
def test_the_new_hosts_are_saved_and_opened(model: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = model().eval()
    attendless.save(made, tmp_path / "model.safetensors")
    again = attendless.load(tmp_path / "model.safetensors")
    assert type(again) is type(made)
    assert torch.equal(again(IMAGES), made(IMAGES))
    assert count(made).total == count_by_running(made).total


# The models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_lavits_are_in_timm_and_give_a_feature_pyramid(size: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"lavit_{size}")
    less = [block.attn.spec.name == "lavit" for block in model.blocks]
    assert sum(less) == {"tiny": 2, "small": 6, "base": 18}[size]
    assert all(stage.carry is not None for stage in model.stages[1:])
    if size == "tiny":
        maps = timm.create_model("lavit_tiny", img_size=64, features_only=True)(IMAGES)
        assert [tuple(m.shape[1:]) for m in maps] == [(64, 16, 16), (128, 8, 8), (320, 4, 4), (512, 2, 2)]


def _narrow(name: str) -> dict[str, object]:
    """A model's layers, heads and grids at a fraction of its width."""
    given = MODELS[name].arguments
    if "embed_dims" not in given:
        return {"embed_dim": 8 * given["num_heads"]}
    return {"embed_dims": tuple(8 * heads for heads in given["num_heads"])}


def _learns_and_counts(name: str, less: bool, **changes: object) -> None:
    side = 96 if "hvt" in name else 64  # lines are halved four times
    torch.manual_seed(0)
    given = {**(with_less(name) if less else {}), **changes}
    model = timm.create_model(name, num_classes=3, img_size=side, **given)
    assert any(block.attn.spec.name == "lavit" for block in model.blocks) == less
    before = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = torch.randn(2, 3, side, side)
    sum(Supervised(model.train(), {})(images, torch.eye(3)[[0, 2]]).values()).backward()
    optimizer.step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    for part in ("theta", "psi", "mixing") if less else ("attn.qkv",):
        assert any(part in key for key in moved), part
    model.eval()
    with torch.no_grad():
        assert model(images).isfinite().all()
    assert count(model).total == count_by_running(model).total
    model.set_input_size(img_size=(side + 32, side))
    with torch.no_grad():
        assert model(torch.randn(1, 3, side + 32, side)).isfinite().all()


NAMES = sorted({name for pair in PLUGINS.values() for name in pair})


@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_backbone_builds_learns_a_step_counts_and_takes_two_sizes(name: str, less: bool) -> None:
    _learns_and_counts(name, less, **_narrow(name))


@pytest.mark.slow
@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_backbone_does_so_at_its_full_width(name: str, less: bool) -> None:
    _learns_and_counts(name, less)


def test_reading_layers_are_where_the_poster_has_them() -> None:
    """The first four of twelve keep their own attention; in stages the first of each does."""
    assert with_less("columnar_small_patch16_224")["attention"].split("/") == ["full"] * 4 + ["lavit"] * 8
    deep = with_less("columnar_deepvit_small")["attention"].split("/")
    assert deep == ["full"] * 4 + ["lavit"] * 7 + ["lavit:reattend"] * 5
    assert with_less("columnar_hvt_tiny")["carry"] == "grid"
    assert with_less("pyramid_swin_tiny")["attention"].count("lavit") == 2 + 6
    dense = with_less("columnar_tiny_patch16_224", "map=dense,mix=false")["attention"]
    assert dense.endswith("lavit:map=dense,mix=false")
