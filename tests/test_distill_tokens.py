"""Teaching models that keep fewer tokens: which tokens are compared, how reduction sets in, and token labelling."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import attendless
from attendless import Grid, UserError
from attendless.backbones import Columnar, LVViT
from attendless.convert import convert
from attendless.train import Recipe, Run, distill, train
from attendless.train.annealing import anneal, strength
from attendless.train.distill_losses import Distillation
from attendless.train.distilling import PHASES, fit_to
from attendless.train.labelling import Box, draw_box
from attendless.train.log import read_rows
from attendless.train.objective import Supervised, outputs
from attendless.train.optimise import Schedule, make_optimizer
from attendless_cli.main import main
from train_toys import same_bits, tensors_of, toy_folder, toy_vit

RUN = Run(workers=0)
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TARGETS = torch.eye(3)[torch.tensor([0, 1, 2, 0])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def pair(tokens: str, attention: str = "full") -> tuple:
    teacher = convert(toy_vit(), "full").eval().requires_grad_(False)
    torch.manual_seed(1)
    return convert(teacher, attention, tokens=tokens, below_breakeven="keep").train().requires_grad_(True), teacher


def lvvit(**changes: object) -> LVViT:
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 16, "depth": 2, "num_heads": 2, "stem": 4, "num_classes": 3}
    return LVViT(**{**sizes, **changes}).train()


# Which tokens are compared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["tome:r=3", "evit:keep=0.5,at=1", "evit:keep=0.5,at=0,fuse=false"])
def test_each_token_is_compared_with_what_it_stands_for(tokens: str) -> None:
    student, teacher = pair(tokens)
    found = Distillation(student, {"tokens": 1.0}, teacher)(IMAGES, TARGETS)["tokens"]
    result, theirs = outputs(student, IMAGES), teacher.forward_features(IMAGES)[:, 1:]
    grid, total, weight = result.context.grid, 0.0, 0.0
    for b in range(4):
        for i in range(grid.patches):
            cells = [c for c in range(16) if grid.owners[b, c] == i]
            counts = 1.0 if grid.sizes is None else float(len(cells))
            mean = sum(theirs[b, c] for c in cells) / len(cells)
            total += counts * (result.features[b, 1 + i] - mean).square().mean().item()
            weight += counts
    assert grid.patches < 16
    assert found.item() == pytest.approx(total / weight, rel=1e-4)


def test_what_dynamicvit_masks_in_training_is_not_compared() -> None:
    student, teacher = pair("dynamicvit:keep=0.5,at=1")
    torch.manual_seed(5)
    terms = Distillation(student, {"tokens": 1.0, "extra": 1.0}, teacher)(IMAGES, TARGETS)
    torch.manual_seed(5)
    result, theirs = outputs(student, IMAGES), teacher.forward_features(IMAGES)[:, 1:]
    stays = result.context.grid.sizes > 0.5
    assert 0 < stays.sum() < 64
    expected = F.mse_loss(result.features[:, 1:][stays], theirs[stays])
    torch.testing.assert_close(terms["tokens"], expected, rtol=1e-4, atol=1e-6)
    assert terms["ratio"] > 0


def test_merged_patches_count_in_the_answer_learned_from() -> None:
    """What is trained is what the model answers: a pool counts merged patches for all they stand for."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(0)
    model = Columnar(**sizes, class_token=False, global_pool="avg", tokens="tome:r=4")
    torch.testing.assert_close(outputs(model, IMAGES).logits, model(IMAGES))


# How reduction sets in -----------------------------------------------------------------------------------------------


def test_strength_runs_between_two_epochs() -> None:
    assert [strength(epoch, (2.0, 6.0)) for epoch in (0, 2, 3, 6, 9)] == [0, 0, 0.25, 1, 1]
    assert strength(0, ()) == strength(0, (0.0, 0.0)) == 1
    with pytest.raises(UserError, match="expected two epochs"):
        Recipe(reduce=(5.0, 2.0))


@torch.no_grad()
def test_evit_comes_down_along_a_cosine_in_training_alone() -> None:
    student, _ = pair("evit:keep=0.5,at=0,fuse=false")
    for progress in (0.0, 0.25, 0.5, 1.0):
        anneal(student, progress)
        keep = 0.5 + 0.5 * (1 + math.cos(math.pi * progress)) / 2
        assert student.train().forward_features(IMAGES).shape[1] == 1 + math.ceil(keep * 16)
        assert student.eval().forward_features(IMAGES).shape[1] == 1 + 8


def test_a_run_in_which_reduction_sets_in_resumes_exactly(folder: Path, tmp_path: Path, monkeypatch) -> None:
    fields = {"epochs": 3, "batch": 16, "size": (16,), "reduce": (0.5, 2.0), "lr": 1e-3}
    given = {"tokens": "evit:keep=0.5,at=0", "recipe": "evit", "run": RUN, **fields}
    seen: list[float] = []
    forward = Distillation.forward

    def watched(self, images, targets):
        seen.append(self.model.blocks[0].reducer.progress)
        if dies and len(seen) == dies:
            raise SystemExit("died")
        return forward(self, images, targets)

    monkeypatch.setattr(Distillation, "forward", watched)
    dies = 0
    distill(toy_vit(), folder, out=tmp_path / "plain", **given)
    assert seen == [pytest.approx(min(1, max(0, (step / 3 - 0.5) / 1.5))) for step in range(9)]
    seen.clear()
    dies = 6
    with pytest.raises(SystemExit):
        distill(toy_vit(), folder, out=tmp_path / "again", **given)
    dies = 0
    distill(toy_vit(), folder, out=tmp_path / "again", **given)
    assert same_bits(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "plain"))


def test_dynamicvits_backbone_learns_a_hundredth_as_fast() -> None:
    student, teacher = pair("dynamicvit:keep=0.5,at=1")
    phases = fit_to(PHASES["dynamicvit"](), student, teacher, labelled=True)
    assert all(".reducer." in name for name in phases[0].trained)
    assert len(phases[0].trained) == len(list(student.blocks[1].reducer.parameters()))
    optimizer = make_optimizer(student, phases[1].recipe)
    Schedule(optimizer, phases[1].recipe, 10).before(9)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(list(student.parameters()))
    fast = {rates[id(p)] for p in student.blocks[1].reducer.parameters()}
    slow = {rates[id(p)] for name, p in student.named_parameters() if ".reducer." not in name}
    assert len(fast) == len(slow) == 1
    assert slow.pop() == pytest.approx(0.01 * fast.pop())


@pytest.mark.parametrize("recipe", ["evit", "dynamicvit", "imitate"])
def test_the_recipes_run(folder: Path, tmp_path: Path, recipe: str) -> None:
    tokens = "evit:keep=0.5,at=1" if recipe == "evit" else "dynamicvit:keep=0.5,at=1"
    fields = {"epochs": 1, "batch": 32, "reduce": ()}
    result = distill(toy_vit(), folder, tokens=tokens, recipe=recipe, out=tmp_path / "run", run=RUN, **fields)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert result.finished
    assert [row["phase"] for row in rows if row["event"] == "epoch"] == (
        ["all"] if recipe == "evit" else ["new", "all"]
    )
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_something_must_be_taught(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give an attention, .* or tokens"):
        distill(toy_vit(), folder, out=tmp_path)
    with pytest.raises(UserError, match="given by its name or file"):
        train(toy_vit(), folder, tokens="tome:r=2", out=tmp_path)


@pytest.mark.parametrize("command", ["train", "distill"])
def test_on_the_command_line(command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [command, "columnar_micro_patch4_32", "--data", str(folder), "--out", str(tmp_path), "--tokens", "tome:r=4"]
    assert not main([*given, "--epochs", "1", "--batch", "32", "--workers", "0"])
    assert attendless.load(tmp_path / "last.safetensors").tokens == "tome:r=4"
    with pytest.raises(SystemExit):
        main([*given[:-1], "tome:r=2", "--epochs", "1", "--batch", "32", "--workers", "0"])
    assert "tokens: tome:r=4 → tome:r=2" in capsys.readouterr().err


# Token labelling -----------------------------------------------------------------------------------------------------

LARGE = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_every_patch_learns_the_teachers_answer_for_it() -> None:
    teacher = lvvit().eval().requires_grad_(False)
    student = convert(teacher, tokens="tome:r=3").train().requires_grad_(True)
    found = Distillation(student, {"patches": 0.5}, teacher)(LARGE, TARGETS)["patches"]
    labels = teacher.patch_logits(teacher.forward_features(LARGE)).softmax(-1)
    features, context = student.forward_context(LARGE)
    answers, expected = student.patch_logits(features).log_softmax(-1), 0.0
    for b in range(4):
        for i in range(context.grid.patches):
            mine = torch.stack([labels[b, c] for c in range(16) if context.grid.owners[b, c] == i]).mean(0)
            expected -= (mine * answers[b, i]).sum().item()
    assert found.item() == pytest.approx(0.5 * expected / (4 * context.grid.patches), rel=1e-4)
    found.backward()
    assert student.aux_head.weight.grad.abs().sum() > 0


def test_a_teacher_without_a_head_for_patches_uses_its_classifier() -> None:
    student, teacher = lvvit(img_size=16, patch_size=4), toy_vit().eval().requires_grad_(False)
    teacher = convert(teacher, "full")
    found = Distillation(student, {"patches": 1.0}, teacher)(IMAGES, TARGETS)["patches"]
    labels = teacher.head(teacher.forward_features(IMAGES)[:, 1:]).softmax(-1)
    torch.manual_seed(0)
    answers = student.patch_logits(student.forward_features(IMAGES))
    expected = -(labels * answers.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match="VisionTransformer has none; LV-ViT has one"):
        Distillation(toy_vit(), {"patches": 1.0}, teacher)


def test_without_a_teacher_every_patch_learns_the_label() -> None:
    model = lvvit()
    terms = Supervised(model, {"label": 1.0})(LARGE, TARGETS)
    features = model.forward_features(LARGE)
    expected = F.cross_entropy(model.patch_logits(features).flatten(0, 1), TARGETS.argmax(1).repeat_interleave(16))
    torch.testing.assert_close(terms["patches"], expected)
    torch.testing.assert_close(terms["label"], F.cross_entropy(model.head(features[:, 0]), TARGETS.argmax(1)))
    assert set(Supervised(toy_vit(), {"label": 1.0})(IMAGES, TARGETS)) == {"label"}


def test_a_box_moves_patches_and_mixes_images_by_area() -> None:
    inside = torch.zeros(3, 4, dtype=torch.bool)
    inside[1:, 2:] = True
    box, x = Box(inside.flatten()), torch.randn(2, 1 + 12, 5)
    mixed = box.tokens(x, 1)
    for b in range(2):
        assert torch.equal(mixed[b, 0], x[b, 0])
        for cell in range(12):
            source = 1 - b if cell // 4 >= 1 and cell % 4 >= 2 else b
            assert torch.equal(mixed[b, 1 + cell], x[source, 1 + cell])
    torch.testing.assert_close(box.images(x[:, 0])[0], x[0, 0] * 8 / 12 + x[1, 0] * 4 / 12)


def test_boxes_are_as_large_as_drawn() -> None:
    torch.manual_seed(0)
    shares = [draw_box(Grid(14, 14, 1), 1.0).share for _ in range(300)]
    assert 0.6 < sum(shares) / 300 < 0.8  # ½ if boxes were not cut off at the edges
    assert min(shares) < 0.3
    assert max(shares) > 0.95


def test_mixed_lessons_are_the_teachers_of_the_images_they_came_from() -> None:
    """With a box that takes everything, each image is its partner, and so is every lesson."""
    teacher = lvvit().eval().requires_grad_(False)
    student = convert(teacher).eval()
    everything = Box(torch.ones(16, dtype=torch.bool))
    weights = {"label": 1.0, "logits": 1.0, "tokens": 1.0, "patches": 1.0}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("attendless.train.distill_losses.draw_box", lambda *_: everything)
        mixed = Distillation(student, {**weights, "mixtoken": 1.0}, teacher)(LARGE, TARGETS)
        plain = Distillation(student, weights, teacher)(LARGE.flip(0), TARGETS.flip(0))
    assert mixed.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(mixed[name], plain[name], atol=1e-4, rtol=1e-4)
    assert mixed["tokens"] < 1e-6, "the student is the teacher, on the same tokens"


def test_averaged_is_the_other_way_round_from_restore() -> None:
    grid = Grid(2, 3, 1, cells=torch.tensor([[0, 2]]), owners=torch.tensor([[0, 0, 1, -1, 1, 1]]))
    x = torch.randn(1, 3, 4)
    torch.testing.assert_close(grid.averaged(grid.restore(x)[:, 1:]), x[:, 1:])
