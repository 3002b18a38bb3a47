"""Token reduction: which tokens leave, what stands for them, and that costs, files and gradients know it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import attendless
from attendless import Context, Grid, UserError
from attendless.backbones import Columnar, Pyramid
from attendless.convert import convert_with_report
from attendless.convert.files import read_header
from attendless.tokens import create_reducers, parse_tokens, reducers
from attendless_cli.main import main

SMALL = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}
EXAMPLES = [spec for cls in reducers().values() for spec in cls.examples]


def column(attention: str = "full", tokens: str = "", **changes: object) -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**{**SMALL, **changes}, attention=attention, tokens=tokens).eval()
    for parameter in model.parameters():  # so that the class token looks at some patches more than at others
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def counts(model: Columnar, images: Tensor) -> list[int]:
    return [step.x.shape[1] for step in model.walk(*model.embed(images))]


# What every reducer keeps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", EXAMPLES)
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_a_reducer_in_a_model_follows_the_interface(spec: str, prefix: int) -> None:
    pool = {"class_token": False, "global_pool": "avg"} if prefix == 0 else {"reg_tokens": prefix - 1}
    model = column(tokens=spec, **pool)
    assert model.tokens == str(parse_tokens(spec))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        steps = list(model.walk(*model.embed(images)))
        rows = model.costs()
    left = [step.x.shape[1] for step in steps]  # by the embedding, and by each layer
    first = [block.reducer is not None and block.reducer.first for block in model.blocks]
    attended = [left[i + 1] if before else left[i] for i, before in enumerate(first)]
    assert [row.grid.tokens for row in rows[1:-1]] == attended, "each layer's cost is that of the tokens it attends to"
    assert steps[-1].x.shape[1] == rows[-1].grid.tokens < 64 + prefix, "tokens leave, and the head knows how many"
    grid = steps[-1].context.grid
    assert grid.prefix == prefix
    assert grid.cells.shape == (2, grid.patches)
    for b in range(2):
        assert len(set(grid.cells[b].tolist())) == grid.patches, "no two tokens stand in one cell"
        stood = grid.owners[b]
        assert stood.max() < grid.patches
        for number, cell in enumerate(grid.cells[b].tolist()):
            assert stood[cell] == number, "a token stands for its own cell"
        if grid.sizes is not None:
            assert grid.sizes[b].sum() == pytest.approx(64)
            spreads = reducers()[spec.partition(":")[0]].spreads
            assert spreads or (torch.bincount(stood, minlength=grid.patches) == grid.sizes[b]).all()
    restored = grid.restore(steps[-1].x)
    assert restored.shape == (2, prefix + 64, 32)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_macs_are_those_counted_by_running(spec: str) -> None:
    model = column(tokens=spec)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 64, 64))
    assert counter.get_total_flops() == 2 * sum(row.macs.total for row in model.costs())


@pytest.mark.parametrize("spec", ["tome:r=0", "evit:keep=1", "dynamicvit:keep=1", "none"])
def test_keeping_everything_is_the_plain_model_bit_for_bit(spec: str) -> None:
    plain, model = column(), column(tokens=spec)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(plain(images), model(images))
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("spec", EXAMPLES)
def test_gradients_pass_and_are_the_same_with_checkpointing(spec: str) -> None:
    images, found = torch.randn(2, 3, 64, 64), []
    for checkpointing in (False, True):
        model = column(tokens=spec).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        x, context = model.forward_context(images)
        loss = model.forward_head(x).square().sum() + sum(value for _, value in context.losses)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert plain is not None
        assert torch.isfinite(plain).all()
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("attention", ["full", "foveal:keep=0.3", "efficient", "performer:features=8"])
def test_attentions_that_take_reduced_sets_compose(attention: str) -> None:
    model = column(attention, "tome:r=4")
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(2, 3, 64, 64))).all()


def test_what_cannot_compose_says_why() -> None:
    with pytest.raises(UserError, match=r"window.*cannot serve grid 1\+8x8 reduced to 61"):
        column("window:size=4", "tome:r=4")
    with pytest.raises(UserError, match=r"evit .* reads the class_attention of efficient, which does not provide it"):
        column("efficient", "evit:keep=0.5,at=1")
    with pytest.raises(UserError, match=r"there is no layer 6, the model's are 0 to 3"):
        column(tokens="evit")
    with pytest.raises(UserError, match=r"unknown token reducer 'tom'. Did you mean 'tome'"):
        column(tokens="tom:r=3")
    with pytest.raises(UserError, match=r"names 3 layers, but the model has 4: expected 1, 2 or 4"):
        column(tokens="tome:r=3/4/5")
    with pytest.raises(UserError, match="drops patches, but the model's pool 'map' needs every patch"):
        column(tokens="evit:keep=0.5,at=1,fuse=false", global_pool="map", class_token=False)


def test_a_refused_reducer_leaves_the_model_as_it_was() -> None:
    model = column("window:size=4")
    with pytest.raises(UserError):
        model.set_tokens("tome:r=4")
    assert model.tokens == ""
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))


def test_compiled_once_for_every_batch_of_a_size() -> None:
    model = column(tokens="tome:r=4")
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(model, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            images = torch.randn(2, 3, 64, 64)
            torch.testing.assert_close(run(images), model(images))
    assert counter.frame_count == 1


# Each on its own -----------------------------------------------------------------------------------------------------


def test_evit_leaves_as_many_tokens_as_its_authors() -> None:
    """197 → 140 → 100 → 72 with fusing at 0.7, and 100 → 52 → 28 at 0.5."""
    for keep, expected in ((0.7, [140, 100, 72]), (0.5, [100, 52, 28])):
        made = create_reducers(parse_tokens(f"evit:keep={keep}"), 192, 64, 12)
        grid, seen = Grid(14, 14, 1), []
        for reducer in made.values():
            grid = reducer.reduced(grid)
            seen.append(grid.tokens)
        assert list(made) == [3, 6, 9]
        assert seen == expected


def test_dynamicvit_leaves_as_many_tokens_as_its_authors() -> None:
    made = create_reducers(parse_tokens("dynamicvit:keep=0.7"), 192, 64, 12)
    grid, seen = Grid(14, 14, 1), []
    for reducer in made.values():
        grid = reducer.reduced(grid)
        seen.append(grid.patches)
    assert seen == [int(196 * 0.7), int(196 * 0.7**2), int(196 * 0.7**3)]


@pytest.mark.parametrize("fuse", [True, False])
def test_evit_against_loops(fuse: bool) -> None:
    torch.manual_seed(0)
    reducer = create_reducers(parse_tokens(f"evit:keep=0.4,at=0,fuse={str(fuse).lower()}"), 6, 3, 1)[0]
    x, attention = torch.randn(3, 2 + 10, 6), torch.rand(3, 2, 2 + 10)
    out, context = reducer(x, Context(Grid(2, 5, 2), class_attention=attention))
    for b in range(3):
        score = [float(attention[b, :, 2 + i].mean()) for i in range(10)]
        kept = sorted(sorted(range(10), key=lambda i: -score[i])[: math.ceil(0.4 * 10)])
        gone = [i for i in range(10) if i not in kept]
        expected = [x[b, 0], x[b, 1], *(x[b, 2 + i] for i in kept)]
        if fuse:
            expected.append(sum(score[i] * x[b, 2 + i] for i in gone))
        torch.testing.assert_close(out[b], torch.stack(expected))
        owners = [kept.index(i) if i in kept else (4 if fuse else -1) for i in range(10)]
        assert context.grid.owners[b].tolist() == owners


def test_merged_tokens_count_for_what_they_stand_for() -> None:
    """Tokens that are copies of one another may be merged without any change in what the class token sees."""
    model = column(tokens="tome:r=8")
    x, context = model.embed(torch.randn(1, 3, 64, 64))
    x = torch.cat([x[:, :1], x[:, 1:33].repeat_interleave(2, dim=1)], dim=1)
    with torch.no_grad():
        merged, left = model.blocks[0](x, context.replace(wants=frozenset()))
        model.set_tokens("none")
        plain, _ = model.blocks[0](x, context)
        torch.testing.assert_close(left.grid.restore(merged), plain, atol=1e-4, rtol=1e-4)
        after, _ = model.blocks[1](merged, left)
        torch.testing.assert_close(after[:, 0], model.blocks[1](plain, context)[0][:, 0], atol=1e-4, rtol=1e-4)


def test_a_mean_over_merged_patches_counts_them_all() -> None:
    x = torch.tensor([[[7.0], [1.0], [4.0]]])
    grid = Grid(2, 2, 1, cells=torch.tensor([[0, 3]]), sizes=torch.tensor([[3.0, 1.0]]))
    assert grid.balanced(x)[0, 1:].mean().item() == pytest.approx((1 + 1 + 1 + 4) / 4)
    assert grid.balanced(x)[0, 0].item() == 7


def test_schedules_of_tome() -> None:
    def gone(spec: str, depth: int = 4, patches: int = 64) -> list[int]:
        made = create_reducers(parse_tokens(spec), 32, 16, depth)
        grid, seen = Grid(8, 8, 1), []
        for layer in range(depth):
            before = grid.patches
            grid = made[layer].reduced(grid) if layer in made else grid
            seen.append(before - grid.patches)
        return seen

    assert gone("tome:r=5") == [5, 5, 5, 5]
    assert gone("tome:r=2/8") == [2, 4, 6, 8]
    assert gone("tome:r=0/5") == [0, 1, 3, 5], "rounded down, as in the authors' code"
    assert gone("tome:r=2/8,start=1") == [0, 2, 5, 8]
    assert gone("tome:r=0/9/0/3") == [0, 9, 0, 3]
    assert gone("tome:r=60") == [32, 16, 8, 4], "each that goes needs a partner"
    assert sum(gone("tome:keep=0.25")) == 48
    assert gone("tome:keep=0.25,start=2")[:2] == [0, 0]
    assert gone("tome:keep=0.25,until=2") == [32, 16, -48, 0]
    assert gone("tome:r=2/8,until=3") == [2, 5, 8, -15], "the line ends where merging does"


def test_merged_tokens_can_be_put_back_before_a_layer() -> None:
    model, plain = column(tokens="tome:r=6,until=2", depth=4), column(depth=4)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        steps = [*model.walk(*model.embed(x))]
        merged = steps[2].context.grid
        expected, _ = plain.run_layers(merged.restore(steps[2].x), Context(Grid(8, 8, 1)), start=2)
    assert [step.x.shape[1] for step in steps] == [65, 59, 53, 65, 65]
    assert [row.grid.tokens for row in model.costs()[1:]] == [65, 59, 65, 65, 65], "that layer attends on every token"
    assert steps[-1].context.grid == Grid(8, 8, 1)
    torch.testing.assert_close(steps[-1].x, expected, rtol=0, atol=0)
    for until in (4, 1):
        with pytest.raises(UserError, match="does not fit the model"):
            column(tokens=f"tome:r=6,start=1,until={until}", depth=4)


def test_protected_patches_stay() -> None:
    torch.manual_seed(0)
    keys = torch.randn(1, 9, 4)
    keys[0, 1:] = keys[0, 1]  # every patch is like every other
    importance = torch.tensor([[[0.1, 0.01, 0.5, 0.01, 0.5, 0.01, 0.02, 0.01, 0.5]]])
    reducer = create_reducers(parse_tokens("tome:r=1,protect=1"), 4, 4, 1)[0]
    _, context = reducer(keys, Context(Grid(2, 4, 1), keys=keys, class_attention=importance))
    assert 5 not in context.grid.cells[0].tolist(), "of the patches 1, 3, 5 and 7 only the sixth is looked at little"


def test_dynamicvit_masks_in_training_and_gathers_at_test() -> None:
    model = column(tokens="dynamicvit:keep=0.5,at=1/2").train()
    x, context = model.forward_context(torch.randn(4, 3, 64, 64))
    assert x.shape[1] == 65, "in training every token is there"
    assert [name for name, _ in context.losses] == ["ratio", "ratio"]
    sizes = context.grid.sizes
    assert ((sizes == 1) | (sizes == 0)).all()
    assert counts(model.eval(), torch.randn(4, 3, 64, 64)) == [65, 65, 33, 17, 17]
    names = [name for name in model.state_dict() if "reducer" in name]
    assert "blocks.1.reducer.in_conv.0.weight" in names
    assert "blocks.2.reducer.out_conv.4.bias" in names


def test_pyramids_merge_within_a_stage_and_go_on_with_the_whole_grid() -> None:
    shape = {"img_size": 64, "embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5}
    model = Pyramid("full", **shape).eval()
    model.set_tokens("tome:r=3")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert [step.x.shape[1] for step in model.walk(*model.embed(images))] == [256, 253, 250, 61, 58]
        assert model(images).shape == (2, 5)
        maps = model.forward_intermediates(images, intermediates_only=True)
    assert [tuple(m.shape) for m in maps] == [(2, 16, 16, 16), (2, 32, 8, 8)]


# In pretrained models, and in files ----------------------------------------------------------------------------------


def test_a_converted_model_keeps_its_reducer_in_a_copy_and_in_a_file(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=3, num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    fast, report = convert_with_report(model, "foveal:keep=0.5", tokens="tome:r=5", below_breakeven="keep")
    assert fast.tokens == "tome:r=5"
    assert report.as_dict()["tokens"] == [65, 60, 55]  # and of the last layer the class token alone is read
    assert "tome:r=5 leaves 55 of 65 tokens: 65 60 55" in str(report)
    assert report.after.mlp < report.before.mlp
    again = attendless.convert(fast, "full")
    assert again.tokens == "tome:r=5", "another attention leaves the tokens as they are"
    assert attendless.convert(again, tokens="none").tokens == ""
    attendless.save(fast, tmp_path / "fast.safetensors")
    loaded = attendless.load(tmp_path / "fast.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(images), fast(images))
        plain = attendless.convert(attendless.convert(fast, "full"), tokens="none")
        torch.testing.assert_close(plain(images), model(images), atol=1e-5, rtol=1e-5)
    assert read_header(tmp_path / "fast.safetensors")["format"] == 3, (
        "an older reader must not take it for another model"
    )
    attendless.save(plain, tmp_path / "plain.safetensors")
    assert read_header(tmp_path / "plain.safetensors")["format"] == 1


def test_new_weights_of_a_reducer_are_said_and_saved(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=16, depth=2, num_classes=5).eval()
    fast, report = convert_with_report(model, tokens="dynamicvit:keep=0.5,at=1")
    assert "10 weights are new and untrained" in str(report)
    attendless.save(fast, tmp_path / "fast.safetensors")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(attendless.load(tmp_path / "fast.safetensors")(images), fast(images))


def test_another_size_needs_no_other_spec() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=2, num_classes=5).eval()
    fast = attendless.convert(model, tokens="tome:keep=0.5", size=(96, 64))
    with torch.no_grad():
        assert fast.forward_features(torch.randn(1, 3, 96, 64)).shape[1] == 1 + 48


def test_models_that_keep_timms_layers_refuse() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 1, 1))
    with pytest.raises(UserError, match=r"SwinTransformer keeps its own layers, which need every token"):
        attendless.convert(model, tokens="tome:r=4")


def test_convert_wants_something_to_convert_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", "columnar_micro_patch4_32"])
    assert left.value.code == 2
    assert "nothing to convert to: give --attention" in capsys.readouterr().err


def test_rows_of_the_command_line_name_tokens(tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    words = ["--attention", "full", "foveal:keep=0.5", "--tokens", "none", "tome:r=4"]
    assert main(["info", "columnar_micro_patch4_32", *words, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    made = [(row["attention"], row["tokens_spec"]) for row in rows]
    assert made == [(a, t) for a in ("full", "foveal:keep=0.5") for t in (None, "tome:r=4")]
    assert rows[1]["layers"][2]["tokens"] == 60
    clock = ["--quick", "--budget", "0.05", "--below-breakeven", "keep"]
    assert main(["bench", "columnar_micro_patch4_32", *words, *clock, "--json", str(out)]) == 0
    assert [(row["attention"], row["tokens_spec"]) for row in json.loads(out.read_text())["rows"]] == made
