"""Less attention: its equation written out, what it saves, where its scores come from, and how it is fitted."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor

import attendless
from attendless import (
    Context,
    Grid,
    UserError,
    convert,
    create,
)
from attendless.attention.diagonality import diagonality
from attendless.attention.lavit import LaViTAttention
from attendless.attention.window import partition
from attendless.backbones import Columnar, Pyramid
from attendless.convert import convert_with_report
from attendless.measure.macs import count
from attendless.train import Run, distill
from attendless_cli.main import main
from train_toys import toy_folder, toy_vit

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
GRID = Grid(3, 4, 1)
IMAGES = torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def layer(spec: str, grid: Grid = GRID, *, moved: bool = True) -> LaViTAttention:
    """A layer whose weights are off their start."""
    torch.manual_seed(0)
    made = create(spec, 16, 2, grid=grid).eval()
    for value in made.parameters():
        value.data.add_(0.3 * torch.randn_like(value) if moved else 0)
    return made


def column(attention: str, depth: int = 4, **changes: object) -> Columnar:
    torch.manual_seed(0)
    return Columnar(**{**SMALL, **changes}, depth=depth, attention=attention).eval()


# What it computes ----------------------------------------------------------------------------------------------------


def by_hand(less: LaViTAttention, a: Tensor, theta: Tensor, psi: Tensor) -> Tensor:
    """A'_ij = Σ_kl Ψ_ik (Σ_g m_hg A^g_kl) Θ_jl, one sum at a time."""
    mixed = torch.einsum("hg,bgkl->bhkl", less.mixing, a) if less.mixing is not None else a
    out = torch.zeros_like(a)
    for h in range(a.shape[1]):
        T, P = theta[h % len(theta)], psi[h % len(psi)]
        for i in range(a.shape[2]):
            for j in range(a.shape[3]):
                out[:, h, i, j] = (P[i][None, :, None] * mixed[:, h] * T[j][None, None, :]).sum((1, 2))
    return out


@pytest.mark.parametrize("spec", ["lavit:map=dense", "lavit:map=dense,shared=false,mix=false", "lavit", "lavit:rank=3"])
@torch.no_grad()
def test_the_equation(spec: str) -> None:
    less, x, a = layer(spec), torch.randn(2, 13, 16), torch.randn(2, 2, 13, 13)
    delta = [m.delta if hasattr(m, "delta") else m.up @ m.down for m in (less.theta, less.psi)]
    expected = by_hand(less, a, *(torch.eye(13) + d for d in delta))
    out, context = less(x, Context(GRID, frozenset({"scores"}), scores=a))
    torch.testing.assert_close(context.scores, expected, atol=1e-4, rtol=1e-4)
    v = (x @ less.qkv.weight.T + less.qkv.bias).view(2, 13, 2, 8).transpose(1, 2)
    mixed = (expected.softmax(-1) @ v).transpose(1, 2).reshape(2, 13, 16)
    torch.testing.assert_close(out, mixed @ less.proj.weight.T + less.proj.bias, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_offset_maps_are_convolutions_over_the_grid() -> None:
    less, a = layer("lavit:map=offset,radius=1,mix=false"), torch.randn(2, 2, 13, 13)
    theta, psi = torch.eye(13), torch.eye(13)
    for made, weight in ((theta, less.theta.weight), (psi, less.psi.weight)):
        for i in range(12):
            for j in range(12):
                dy, dx = j // 4 - i // 4, j % 4 - i % 4
                if max(abs(dy), abs(dx)) <= 1:
                    made[1 + i, 1 + j] += weight[0, 0, dy + 1, dx + 1]
    torch.testing.assert_close(
        less.transformed(a, GRID), by_hand(less, a, theta[None], psi[None]), atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_the_linear_layers_bias_is_added_where_the_poster_has_it() -> None:
    less, a = layer("lavit:map=dense,mix=false,bias"), torch.randn(1, 2, 13, 13)
    theta, psi = torch.nn.Linear(13, 13), torch.nn.Linear(13, 13)
    for made, mine, bias in ((theta, less.theta, less.theta_bias), (psi, less.psi, less.psi_bias)):
        made.weight.copy_(torch.eye(13) + mine.delta[0])
        made.bias.copy_(bias[0, 0])
    torch.testing.assert_close(less.transformed(a, GRID), psi(theta(a).mT).mT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "low_rank", "offset", "none"])
@torch.no_grad()
def test_untouched_it_attends_exactly_as_the_layer_before(kind: str) -> None:
    less, full = layer(f"lavit:map={kind},bias", moved=False), create("full", 16, 2, grid=GRID)
    x = torch.randn(2, 13, 16)
    _, left = full(x, Context(GRID, frozenset({"scores"})))
    assert torch.equal(less.map(x, left), full.map(x, Context(GRID)))
    assert torch.equal(less(x, left.replace(wants=frozenset({"scores"})))[1].scores, left.scores)


def test_it_has_no_queries_and_keys_and_takes_the_values_of_a_pretrained_layer() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, depth=4)
    less, report = convert_with_report(model, "lavit:vanilla=2", below_breakeven="keep")
    assert less.attention == "2xfull/2xlavit"
    theirs, ours = model.blocks[3].attn, less.blocks[3].attn
    assert ours.qkv.weight.shape == (32, 32)
    assert torch.equal(ours.qkv.weight, theirs.qkv.weight[64:])
    assert torch.equal(ours.qkv.bias, theirs.qkv.bias[64:])
    assert torch.equal(ours.proj.weight, theirs.proj.weight)
    assert "qkv.weight" in report.layers[3].copied
    assert "less attention starts as a copy" in str(report)
    assert convert(less, "full").blocks[3].attn.qkv.weight.shape == (96, 32)  # and back, with new queries and keys


# Other keys ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_with_fewer_keys_it_reads_what_reduced_leaves() -> None:
    grid = Grid(4, 6)
    less, reduced = layer("lavit:ratio=2,map=dense", grid, moved=False), create("reduced", 16, 2, grid=grid).eval()
    less.sr.load_state_dict(reduced.sr.state_dict())
    less.sr_norm.load_state_dict(reduced.sr_norm.state_dict())
    x = torch.randn(2, 24, 16)
    _, left = reduced(x, Context(grid, frozenset({"scores"})))
    assert left.scores.shape == (2, 2, 24, 6) == less.score_shape(2, grid)
    torch.testing.assert_close(less.map(x, left), reduced.map(x, Context(grid)))
    assert (less.theta.delta.shape, less.psi.delta.shape) == ((1, 6, 6), (1, 24, 24))


@torch.no_grad()
def test_behind_full_attention_a_block_of_like_keys_is_one_key() -> None:
    """Where the keys of a block are the same, nothing is lost by making them one."""
    grid = Grid(4, 4, 1)
    less, values = layer("lavit:ratio=2", grid, moved=False), torch.randn(1, 2, 5, 8)
    few = torch.randn(1, 2, 17, 5)
    block = [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    index = torch.tensor([0, *(1 + b for b in block)])
    scores = few[..., index]
    out, _ = less.attend(values, values, values, Context(grid, scores=scores))
    torch.testing.assert_close(out, scores.softmax(-1) @ values[:, :, index])


@pytest.mark.parametrize(("grid", "shift"), [(Grid(6, 6), 0), (Grid(6, 6), 1), (Grid(5, 7), 1), (Grid(2, 6), 1)])
@torch.no_grad()
def test_in_windows_it_reads_what_windows_leave(grid: Grid, shift: int) -> None:
    less = layer(f"lavit:window=3,shift={shift}", grid, moved=False)
    window = create(f"window:size=3,shift={shift}", 16, 2, grid=grid).eval()
    window.relative_position_bias_table.normal_()
    x = torch.randn(2, grid.tokens, 16)
    _, left = window(x, Context(grid, frozenset({"scores"})))
    assert left.scores.shape == less.score_shape(2, grid)
    torch.testing.assert_close(less.map(x, left), window.map(x, Context(grid)), atol=1e-5, rtol=1e-4)
    full = torch.randn(2, 2, grid.tokens, grid.tokens)
    inside = less.arranged(full, grid)
    cells = partition(torch.arange(grid.tokens).float()[None, None, :, None], *less.sides(grid))[0, 0, ..., 0].long()
    assert inside[1, 0, 0, 1, 2] == full[1, 0, cells[0, 1], cells[0, 2]]


def test_layers_that_do_not_fit_each_other_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"lavit in blocks.0 reads the scores .* it is the first layer"):
        column("lavit")
    with pytest.raises(UserError, match=r"foveal in blocks.1 does not provide it"):
        column("full/foveal/lavit/lavit")
    wide = {"img_size": 32, "embed_dims": (16,), "depths": (2,), "num_heads": (2,), "num_classes": 5}
    with pytest.raises(UserError, match=r"does not provide it: it reads scores of 2×64×64, not of 2×64×16"):
        Pyramid("reduced+lavit", **wide)
    with pytest.raises(UserError, match=r"window:size=4 in stages.0.blocks.0 does not provide it"):
        Pyramid("window:size=4+lavit:window=2", **wide)
    with pytest.raises(UserError, match="windows of another size or shift hold other pairs"):
        Pyramid("window:size=4+lavit:window=4,shift=2", **wide)
    assert Pyramid("window:size=4,shift=2+lavit:window=4,shift=2", **wide)
    with pytest.raises(UserError, match=r"evit in blocks.1 removes tokens in between"):
        column("2xfull/2xlavit", tokens="evit:keep=0.5,at=1")
    with pytest.raises(UserError, match=r"vanilla is for the layers of a model"):
        create("lavit:vanilla=2", 16, 2, grid=GRID)
    with pytest.raises(UserError, match=r"window and ratio exclude each other"):
        create("lavit:ratio=2,window=3", 16, 2, grid=GRID)
    with pytest.raises(UserError, match="there are none"):
        layer("lavit")(torch.randn(1, 13, 16), Context(GRID))


def test_vanilla_means_the_first_layers_of_each_stage() -> None:
    assert column("lavit:vanilla=3").attention == "3xfull/lavit"
    wide = {"img_size": 32, "embed_dims": (16, 32), "depths": (2, 3), "num_heads": (2, 2), "num_classes": 5}
    names = [block.attn.spec.name for block in Pyramid("lavit:vanilla=1", **wide).blocks]
    assert names == ["full", "lavit", "full", "lavit", "lavit"]
    assert Pyramid("lavit:vanilla=1,window=4", **wide).blocks[2].attn.spec.name == "window"


# Training and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "low_rank", "offset"])
def test_gradients_reach_the_maps_and_the_vanilla_layers_the_same_with_checkpointing(kind: str) -> None:
    model = column(f"lavit:vanilla=2,map={kind},bias,dp=1").train()
    for name, value in model.named_parameters():
        if name.rpartition(".")[2] in ("delta", "up", "weight") and (".theta." in name or ".psi." in name):
            value.data.add_(0.1 * torch.randn_like(value))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        x, context = model.forward_context(IMAGES)
        (model.forward_head(x).square().mean() + sum(value for _, value in context.losses)).backward()
        assert [name for name, _ in context.losses] == ["diagonality"] * 2
        return {name: value.grad.clone() for name, value in model.named_parameters()}

    plain = gradients()
    model.set_grad_checkpointing(True)
    again = gradients()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name
    for part in ("blocks.2.attn.theta", "blocks.2.attn.psi", "blocks.3.attn.mixing", "blocks.1.attn.qkv.weight"):
        found = [value for name, value in plain.items() if name.startswith(part)]
        assert found
        assert all(value.abs().sum() > 0 for value in found), part
    q, k, _ = plain["blocks.1.attn.qkv.weight"].chunk(3)
    assert q.abs().sum() > 0
    assert k.abs().sum() > 0


def test_one_score_tensor_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    alive: list[int] = []
    original = LaViTAttention.transformed

    def watched(self: LaViTAttention, scores: Tensor, grid: Grid) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        out = original(self, scores, grid)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(LaViTAttention, "transformed", watched)
    with torch.no_grad():
        column("lavit:vanilla=1", depth=6)(IMAGES)
    assert len(alive) == 5
    assert max(alive) == 1  # the one that is being read
    assert sum(ref() is not None for ref in made) == 0


# Any resolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["lavit:map=dense,bias", "lavit", "lavit:map=offset", "lavit:ratio=2,map=dense"])
@torch.no_grad()
def test_on_another_grid_the_identity_stays_and_the_rest_is_resampled(spec: str) -> None:
    old, new = Grid(4, 4, 1), Grid(6, 8, 1)
    less = layer(spec, old, moved=False)
    a = torch.randn(1, 2, new.tokens, less.score_shape(1, new)[-1])
    assert torch.equal(less.transformed(a, new), a)
    less = layer(spec, old)
    fly = less.transformed(a, new)
    less.resize(new)
    assert less.grid == new
    torch.testing.assert_close(less.transformed(a, new), fly)
    model = column("2xfull/2x" + spec, dynamic_img_size=True)
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)


@torch.no_grad()
def test_resampled_maps_do_to_smooth_scores_what_they_did() -> None:
    """A map that adds the mean over all patches does so on any grid."""
    less = create("lavit:map=dense,mix=false", 16, 2, grid=Grid(4, 4))
    less.theta.delta.fill_(1 / 16)
    a = torch.randn(1, 2, 64, 64)
    torch.testing.assert_close(less.transformed(a, Grid(8, 8)), a + a.mean(-1, keepdim=True), atol=1e-5, rtol=1e-4)


# What it costs -------------------------------------------------------------------------------------------------------


def test_dense_maps_cost_more_than_they_save_and_the_default_does_not() -> None:
    """DeiT-S at 224 px, a layer: saves 2 N D² + N² D = 73.0 M, adds 2 H N³ = 91.7 M."""
    grid = Grid(14, 14, 1)
    full = create("full", 384, 6, grid=grid).macs(grid).total
    dense, default = (create(text, 384, 6, grid=grid) for text in ("lavit:map=dense,mix=false", "lavit"))
    assert dense.transform_macs(grid) == 2 * 6 * 197**3
    assert dense.macs(grid).total - full == 2 * 6 * 197**3 - (2 * 197 * 384**2 + 197**2 * 384)
    assert round(dense.transform_macs(grid) / 1e6, 1) == 91.7
    assert dense.macs(grid).total > full > default.macs(grid).total
    model = timm.create_model("vit_tiny_patch16_224", depth=3)
    assert convert(model, "lavit:vanilla=1,map=dense").attention == "full"
    assert convert(model, "lavit:vanilla=1").attention == "full/2xlavit"


# The loss ------------------------------------------------------------------------------------------------------------


def test_the_diagonality_loss_is_the_printed_one_over_its_pairs() -> None:
    a = torch.randn(5, 5, dtype=torch.float64)
    printed = sum(abs(a[i, j] - a[j, i]) for i in range(5) for j in range(5))
    printed = printed + sum(4 * a[i, i] - sum(a[i, j] for j in range(5) if j != i) for i in range(5))
    assert torch.isclose(diagonality(a, "poster", "scores"), printed / 20)


@pytest.mark.parametrize("on", ["softmax", "scores"])
def test_corrected_it_raises_the_diagonal_and_as_printed_it_lowers_it(on: str) -> None:
    start = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(1))
    for sign, rises in (("corrected", True), ("poster", False)):
        a = start.clone().requires_grad_()
        for _ in range(60):
            (slope,) = torch.autograd.grad(diagonality(a, sign, on), a)
            a = (a - 20 * slope).detach().requires_grad_()
        share = [float(torch.softmax(x, -1).diagonal(dim1=-2, dim2=-1).mean()) for x in (start, a.detach())]
        assert (share[1] > share[0]) == rises
        assert diagonality(a, "corrected", on) >= (-1 if on == "softmax" else 0)  # bounded below


def test_only_training_pays_for_the_loss() -> None:
    model = column("lavit:vanilla=2,dp=0.5")
    assert model.forward_context(IMAGES)[1].losses == ()
    assert len(model.train().forward_context(IMAGES)[1].losses) == 2
    wide = {"img_size": 32, "embed_dims": (16,), "depths": (2,), "num_heads": (2,), "num_classes": 5}
    few = Pyramid("reduced+lavit:ratio=2,dp=1", **wide).train()
    assert few.forward_context(torch.randn(2, 3, 32, 32))[1].losses[0][1].isfinite()


# Fitting -------------------------------------------------------------------------------------------------------------


def _with_scores_of(model: Columnar, number: int, before: int, mixing: Tensor) -> None:
    """Make a layer's queries and keys those of another, so that its scores are that one's, heads mixed."""
    theirs, ours = model.blocks[before], model.blocks[number]
    ours.norm1.load_state_dict(theirs.norm1.state_dict())
    qkv = theirs.attn.qkv.weight.data.view(3, 2, 16, 32)
    ours.attn.qkv.weight.data[:64] = torch.stack([torch.einsum("hg,gdc->hdc", mixing, qkv[0]), qkv[1].flip(0)]).reshape(
        64, 32
    )
    ours.attn.qkv.bias.data.zero_()


@torch.no_grad()
def test_fitting_finds_heads_that_were_exchanged_and_lowers_the_difference() -> None:
    teacher = column("full", depth=3)
    for block in teacher.blocks:
        block.attn.qkv.weight.normal_(std=0.3)
        block.attn.qkv.bias.zero_()
    for part in ("attn.proj.weight", "attn.proj.bias", "mlp.fc2.weight", "mlp.fc2.bias"):
        teacher.get_parameter(f"blocks.1.{part}").zero_()  # so that layer 2 is given what layer 1 is
    _with_scores_of(teacher, 2, 1, torch.eye(2).flip(0))
    fitted = convert(teacher, "2xfull/lavit", below_breakeven="keep", fit=IMAGES).eval()
    copied = convert(teacher, "2xfull/lavit", below_breakeven="keep").eval()
    torch.testing.assert_close(fitted.blocks[2].attn.mixing, torch.eye(2).flip(0), atol=1e-3, rtol=1e-3)
    near, far = ((model(IMAGES) - teacher(IMAGES)).norm() for model in (fitted, copied))
    assert near < 0.05 * far


@torch.no_grad()
def test_least_squares_finds_the_maps_that_made_the_scores() -> None:
    from attendless.convert.fit import _fit_map

    less = create("lavit:map=dense,mix=false", 16, 2, grid=GRID)
    truth = 0.2 * torch.randn(1, 13, 13)
    inputs = torch.randn(40, 2, 13, 13)
    _fit_map(less.theta, inputs, inputs @ (torch.eye(13) + truth[0]).T, GRID, shared=True)
    assert (less.theta.delta - truth).norm() < 0.15 * truth.norm()  # the ridge keeps it a little short
    low = create("lavit:rank=2", 16, 2, grid=GRID)
    truth = 0.2 * torch.randn(1, 13, 2) @ torch.randn(1, 2, 13)
    _fit_map(low.theta, inputs, inputs @ (torch.eye(13) + truth[0]).T, GRID, shared=True)
    assert (low.theta.up @ low.theta.down - truth).norm() < 0.15 * truth.norm()


def test_a_fitted_model_is_saved_and_opened_and_few_images_are_refused(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, depth=4)
    fitted, report = convert_with_report(model, "lavit:vanilla=2", below_breakeven="keep", fit=IMAGES)
    assert "fitted to the original's scores on 6 images" in str(report)
    attendless.save(fitted, tmp_path / "less.safetensors", report=report)
    again = attendless.load(tmp_path / "less.safetensors")
    assert torch.equal(again(IMAGES), fitted.eval()(IMAGES))
    with pytest.raises(UserError, match="1 images were given to fit to"):
        convert(model, "lavit:vanilla=2", below_breakeven="keep", fit=IMAGES[:1])


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "columnar_micro_patch4_32", "--attention", "lavit:vanilla=1"]) in (0, None)
    assert "full/2xlavit" in capsys.readouterr().out
    assert count(column("lavit:vanilla=1")).total < count(column("full")).total


def test_distilling_begins_with_a_fitted_student_and_goes_on(tmp_path: Path) -> None:
    folder, quick = toy_folder(tmp_path / "data"), {"new": "epochs=1,batch=8", "all": "epochs=1,batch=8"}
    call = {"attention": "full/lavit", "change": quick, "out": tmp_path / "out", "run": Run(workers=0), "eval_every": 1}
    result = distill(toy_vit(), folder, **call)
    assert result.finished
    student = attendless.load(tmp_path / "out" / "last.safetensors")
    assert student.attention == "full/lavit"
    assert not torch.equal(student.blocks[1].attn.mixing, torch.eye(2))
    assert distill(toy_vit(), folder, **call).steps == result.steps  # there is nothing left to do


# Its former name -----------------------------------------------------------------------------------------------------


def test_less_is_accepted_wherever_lavit_is() -> None:
    assert attendless.attention.aliases()["less"] == "lavit"
    assert "less" not in attendless.attentions()
    assert attendless.attention.attention_class("less") is LaViTAttention
    for old, new in (("less:rank=3", "lavit:rank=3"), ("less", "lavit")):
        assert str(attendless.attention.parse(old)) == new
        assert str(create(old, 16, 2, grid=GRID).spec) == new
        assert attendless.attention.named(f"full/{old}") == attendless.attention.named(f"full/{new}")
    assert column("less:vanilla=3").attention == "3xfull/lavit"
    assert column("2xfull/2xless+lavit").attention == "2xfull/2xlavit"
    with pytest.raises(UserError, match=r"unknown option of less 'ran'\. Did you mean 'rank'"):
        create("less:ran=3", 16, 2, grid=GRID)


def test_a_file_saved_under_the_former_name_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = column("lavit:vanilla=2"), tmp_path / "old.safetensors"
    with monkeypatch.context() as patch:  # as versions before 0.2 wrote it
        patch.setattr(LaViTAttention, "name", "less")
        assert model.attention == "2xfull/2xless"
        attendless.save(model, path)
    assert b"less" in path.read_bytes()
    again = attendless.load(path)
    assert again.attention == "2xfull/2xlavit"
    with torch.no_grad():
        assert torch.equal(again(IMAGES), model(IMAGES))


def test_an_alias_takes_no_name_that_exists() -> None:
    from attendless.attention import register, register_alias

    with pytest.raises(UserError, match="'full' already exists"):
        register_alias("full", "lavit")
    with pytest.raises(UserError, match="'less' already exists"):
        register_alias("less", "full")
    with pytest.raises(UserError, match="unknown attention 'nothing'"):
        register_alias("more", "nothing")
    with pytest.raises(UserError, match="'less' already exists: another name of 'lavit'"):
        register(type("Mine", (attendless.Attention,), {"name": "less"}))


def test_the_list_names_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    assert "less is another name of lavit" in capsys.readouterr().out
    main(["list", "less"])
    assert "options of lavit" in capsys.readouterr().out
