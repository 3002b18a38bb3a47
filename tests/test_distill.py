"""Distillation: every term against its formula, phases as data, and maps that never pile up."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from attendless.convert import convert
from attendless.errors import UserError
from attendless.train import Recipe, Run, distill
from attendless.train.distill_losses import Distillation, divergence, map_lessons
from attendless.train.distilling import (
    NEW,
    PHASES,
    Losses,
    edit,
    fit_to,
)
from attendless.train.log import read_rows
from attendless.train.objective import outputs
from attendless.train.state import Phase
from train_toys import toy_folder, toy_vit

RUN = Run(workers=0)
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TARGETS = torch.eye(3)[torch.tensor([0, 1, 2, 0])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def pair(attention: str = "linformer") -> tuple:
    teacher = convert(toy_vit(), "full")
    torch.manual_seed(1)
    return convert(teacher, attention, below_breakeven="keep"), teacher.requires_grad_(False)


def terms(student, teacher, **weights: float) -> dict[str, float]:
    found = Distillation(student, weights, teacher)(IMAGES, TARGETS)
    return {name: value.item() for name, value in found.items()}


def test_logits_are_the_divergence_from_the_teacher() -> None:
    student, teacher = pair()
    p, q = (model(IMAGES).double() / 2 for model in (teacher, student))
    expected = 0.0
    for row in range(4):
        zp, zq = (sum(math.exp(v) for v in logits[row].tolist()) for logits in (p, q))
        for a, b in zip(p[row].tolist(), q[row].tolist(), strict=True):
            expected += math.exp(a) / zp * ((a - math.log(zp)) - (b - math.log(zq)))
    found = terms(student, teacher, logits=0.5, temperature=2.0)["logits"]
    assert found == pytest.approx(0.5 * 4 * expected / 4, rel=1e-3)
    assert divergence(p, p).item() == pytest.approx(0, abs=1e-9)


def test_tokens_leave_out_the_prefix() -> None:
    student, teacher = pair()
    ours, theirs = (model.forward_features(IMAGES)[:, 1:] for model in (student, teacher))
    expected = sum(((a - b) ** 2).mean().item() for a, b in zip(ours, theirs, strict=True)) / 4
    assert terms(student, teacher, tokens=2.0)["tokens"] == pytest.approx(2 * expected, rel=1e-5)


def test_maps_layer_by_layer() -> None:
    """Each layer of the student sees what the teacher's layer sees."""
    student, teacher = pair()
    expected = 0.0
    x, context = teacher.embed(IMAGES)
    for theirs, ours in zip(teacher.blocks, student.blocks, strict=True):
        difference = ours.attn.map(ours.norm1(x), context) - theirs.attn.map(theirs.norm1(x), context)
        expected += (difference**2).sum().item() / (4 * 2 * 17)
        x, context = theirs(x, context)
    assert terms(student, teacher, maps=1.0)["maps"] == pytest.approx(expected / 2, rel=1e-4)
    assert terms(convert(teacher, "full"), teacher, maps=1.0)["maps"] == 0


def test_map_lessons_bring_the_teachers_answer() -> None:
    student, teacher = pair()
    taught, _ = map_lessons(student, teacher, IMAGES)
    torch.testing.assert_close(taught.logits, outputs(teacher, IMAGES).logits)
    torch.testing.assert_close(taught.features, teacher.forward_features(IMAGES))
    assert not taught.logits.requires_grad


def test_the_student_is_not_run_where_only_its_maps_count(monkeypatch) -> None:
    student, teacher = pair()
    monkeypatch.setattr(type(student), "forward_context", lambda *_: pytest.fail("the student was run"))
    monkeypatch.setattr(teacher, "forward_context", None, raising=False)
    assert list(terms(student, teacher, maps=1.0, extra=0.0)) == ["maps"]


def test_maps_teach_and_never_pile_up(monkeypatch) -> None:
    """Gradients are those of the plain formula, and no map outlives its layer, in the forward or the backward pass."""
    import gc
    import weakref

    student, teacher = pair()
    alive: list[weakref.ref] = []
    most = 0
    original = type(teacher.blocks[0].attn).map

    def watched(self, x, context, query=slice(None)):
        nonlocal most
        found = original(self, x, context, query)
        alive.append(weakref.ref(found))
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        return found

    monkeypatch.setattr(type(teacher.blocks[0].attn), "map", watched)
    loss = Distillation(student, {"maps": 1.0}, teacher)(IMAGES, TARGETS)["maps"]
    loss.backward()
    assert len(alive) == 4
    assert most == 1
    gradients = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    x, context = teacher.embed(IMAGES)
    plain = torch.zeros(())
    for theirs, ours in zip(teacher.blocks, student.blocks, strict=True):
        difference = ours.attn.map(ours.norm1(x), context) - original(theirs.attn, theirs.norm1(x), context)
        plain = plain + difference.square().sum(-1).mean() / 2
        x, context = theirs(x, context)
    plain.backward()
    for found, expected in zip(gradients, [p.grad for p in student.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_extra_losses_come_from_the_context(monkeypatch) -> None:
    student, teacher = pair("full")
    attend = type(student.blocks[0].attn).attend

    def with_loss(self, q, k, v, context):
        out, context = attend(self, q, k, v, context)
        return out, context.with_loss("sparsity", q.square().mean())

    monkeypatch.setattr(type(student.blocks[0].attn), "attend", with_loss)
    found = terms(student, teacher, logits=1.0, extra=0.25)
    assert found["sparsity"] > 0
    assert terms(student, teacher, logits=1.0, extra=0.5)["sparsity"] == pytest.approx(2 * found["sparsity"])
    assert "sparsity" not in terms(student, teacher, logits=1.0, extra=0.0)


def test_plans_are_data() -> None:
    for name, make in PHASES.items():
        assert "attendless distill" in (make.__doc__ or "")
        assert [phase.name for phase in edit(name, {}, {})] in ([NEW, "all"], ["all"])
    new, whole = edit("imitate", {"all": "epochs=9,loss.tokens=3,lr=1e-4"}, {"batch": 8})
    assert (new.recipe.epochs, new.recipe.batch, whole.recipe.batch) == (2, 8, 8)
    assert (whole.recipe.epochs, whole.recipe.lr, whole.losses["tokens"], whole.losses["logits"]) == (9, 1e-4, 3.0, 1.0)
    assert edit("imitate", {"all": "trained=old"}, {})[1].trained == ("old",)
    with pytest.raises(UserError, match="new"):
        edit("imitate", {"first": "epochs=1"}, {})
    with pytest.raises(UserError, match="sparsifiner"):
        edit("imitat", {}, {})


def test_phases_fit_the_models() -> None:
    phases = PHASES["sparsifiner"]()
    student, teacher = pair("linformer")
    first, second = fit_to(phases, student, teacher, labelled=False)
    assert first.trained
    assert all("attn" in name for name in first.trained)
    assert "label" not in second.losses
    old = fit_to(edit("imitate", {"all": "trained=old"}, {}), student, teacher, labelled=False)[1].trained
    assert sorted((*first.trained, *old)) == sorted(name for name, _ in student.named_parameters())
    student, teacher = pair("full")
    assert [phase.name for phase in fit_to(phases, student, teacher, labelled=True)] == ["all"]


def test_only_what_a_phase_trains_changes(folder: Path, tmp_path: Path) -> None:
    from attendless.convert import load

    teacher = toy_vit()
    recipe = Recipe(epochs=1, batch=20, size=(16,), lr=1e-2)
    phases = [Phase(NEW, recipe, dataclasses.asdict(Losses(maps=1.0)), (NEW,))]
    distill(teacher, folder, attention="linformer", recipe=phases, out=tmp_path, run=RUN)
    student = load(tmp_path / "last.safetensors").state_dict()
    before = convert(teacher, "full").state_dict()
    assert all(torch.equal(student[name], value) for name, value in before.items())
    assert student.keys() > before.keys()


def test_a_student_learns_without_labels(folder: Path, tmp_path: Path) -> None:
    """From pictures alone the student comes to agree with a teacher that knows the classes."""
    from attendless.train import train

    out = tmp_path / "teacher"
    train(toy_vit(), folder, out=out, run=RUN, epochs=4, batch=10, size=(16,), lr=3e-3)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i, path in enumerate(sorted((folder / "train").rglob("*.png"))):
        Image.open(path).save(pictures / f"{i:03}.png")
    result = distill(
        out / "last.safetensors", pictures, attention="linformer", out=tmp_path / "run", run=RUN, batch=9, lr=2e-3
    )
    assert result.finished
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["event"] == "epoch"]
    assert "top1" not in rows[-1]
    assert "label" not in rows[-1]
    assert rows[-1]["logits"] < rows[2]["logits"]
    assert result.best == max(row["agreement"] for row in rows) > 0.8


def test_maps_need_columns(folder: Path, tmp_path: Path) -> None:
    import timm

    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    with pytest.raises(UserError, match="isotropic"):
        Distillation(model, {"maps": 1.0}, model)
