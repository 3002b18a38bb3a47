"""The loop itself, against a plain loop written here, and what it does when things go wrong."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

from attendless.convert import load
from attendless.data.opening import open_splits
from attendless.errors import UserError
from attendless.train import Recipe, Run, train
from attendless.train.augment import eval_transform, train_transform
from attendless.train.log import Log, Pace, duration, read_rows
from attendless.train.loop import Diverged
from attendless.train.optimise import Schedule, choose_trained, make_optimizer
from attendless.train.process import Stop, only_run
from train_toys import toy_folder, toy_vit

RUN = Run(workers=0, log_every=1)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def by_hand(folder: Path, recipe: Recipe, order: list[list[int]]) -> tuple[nn.Module, list[float]]:
    """AdamW on cross-entropy, one batch of given pictures after another, as anyone would write it."""
    model = toy_vit().train()
    source, _, _ = open_splits(folder)
    transform = train_transform(recipe, (16, 16), MEAN, STD)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if p.ndim < 2 or n in ("pos_embed", "cls_token")],
             "weight_decay": 0.0},
            {"params": [p for n, p in model.named_parameters() if p.ndim >= 2 and n not in ("pos_embed", "cls_token")]},
        ],
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
    )  # fmt: skip
    losses = []
    for step, indices in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * step / len(order))) / 2
        images = torch.stack([transform(source[i][0]) for i in indices])
        loss = F.cross_entropy(model(images), torch.tensor([source[i][1] for i in indices]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_it_is_the_loop_anyone_would_write(folder: Path, tmp_path: Path) -> None:
    from attendless.train.loader import Steps

    recipe = Recipe(epochs=2, batch=16, lr=2e-3, clip=0.5, crop="none", flip=0.0, size=(16,), seed=3)
    train(toy_vit(), folder, recipe=recipe, out=tmp_path, run=RUN)
    order = [[index for _, index, _ in batch] for batch in Steps(60, 16, 0, 6, seed=3)]
    model, losses = by_hand(folder, recipe, order)
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["event"] == "step"]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    found = load_file(tmp_path / "last.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    _, val, _ = open_splits(folder)
    transform = eval_transform(recipe, (16, 16), MEAN, STD)
    with torch.no_grad():
        logits = model.eval()(torch.stack([transform(val[i][0]) for i in range(len(val))]))
    labels = torch.tensor(val.labels)  # type: ignore[attr-defined]
    last = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert last["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert last["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)


def test_accumulating_changes_only_memory(folder: Path, tmp_path: Path) -> None:
    fields = {"epochs": 1, "batch": 16, "size": (16,), "mixup": 0.8, "cutmix": 1.0, "clip": 1.0}
    losses = []
    for parts in (1, 4):
        train(toy_vit(), folder, out=tmp_path / str(parts), run=RUN, accumulate=parts, **fields)
        losses.append([row["loss"] for row in read_rows(tmp_path / str(parts) / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_a_run_leaves(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = Run(workers=0, log_every=1, keep=1, tensorboard=True)
    result = train(
        "test_vit",
        folder,
        attention="linformer",
        out=out,
        run=run,
        epochs=2,
        batch=20,
        size=(32,),
        ema=0.5,
        drop_path=0.2,
    )
    assert result.finished
    assert result.steps == 6
    names = {path.name for path in out.iterdir()}
    assert {
        "last.safetensors",
        "best.safetensors",
        "metrics.jsonl",
        "recipe.json",
        "curves.png",
        "tensorboard",
    } <= names
    model = load(out / "last.safetensors")
    assert model.attention.startswith("linformer")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    wrote = json.loads((out / "recipe.json").read_text())
    assert wrote["what"]["phases"][0]["recipe"]["epochs"] == 2
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "epoch"] == [3, 6]
    assert {"loss", "lr", "epoch", "step", "images_per_second"} <= rows[0].keys()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-6.safetensors"]


def test_another_run_in_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    fields = {"epochs": 1, "batch": 20, "size": (16,), "run": RUN, "out": tmp_path}
    train(toy_vit(), folder, **fields)
    with pytest.raises(UserError, match=r"lr: 0.001 → 0.002"):
        train(toy_vit(), folder, **fields, lr=2e-3)
    with only_run(tmp_path), pytest.raises(UserError, match="another run"):
        train(toy_vit(), folder, **fields)


class Poisoned(VisionTransformer):
    """Its second block gives one infinity from step `when` on."""

    when, steps = 4, 0

    def forward_features(self, x: torch.Tensor, **more: object) -> torch.Tensor:
        if self.training:
            self.steps += 1
        self.blocks[1].register_forward_hook(self._poison)
        return super().forward_features(x)

    def _poison(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        return output / 0 if self.steps >= self.when else None


def test_a_loss_that_is_no_number_stops_the_run(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Poisoned(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=3)
    run = Run(workers=0, checkpoint_minutes=0.0)
    with pytest.raises(Diverged, match=r"step 3, learning rate .* output of blocks.1.*last good checkpoint is step 3"):
        train(model, folder, out=tmp_path, run=run, epochs=2, batch=16, size=(16,))
    from attendless.train.checkpoint import Store

    kept = Store(tmp_path / "checkpoints").read(pytest.fail)
    assert kept["progress"]["step"] == 3
    assert all(value.isfinite().all() for value in kept["model"].values())
    # The step that failed changed nothing, in memory either.
    assert all(torch.equal(kept["model"][name], value) for name, value in model.state_dict().items())


def test_a_gradient_that_is_no_number_is_named(folder: Path, tmp_path: Path) -> None:
    model = toy_vit()
    model.cls_token.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Diverged, match="gradient of cls_token"):
        train(model, folder, out=tmp_path, run=RUN, epochs=1, batch=16, size=(16,))


def test_unreadable_pictures_are_named_once(folder: Path, tmp_path: Path, capfd) -> None:
    root = toy_folder(tmp_path / "data", train=6, val=3)
    (root / "train" / "class0" / "0.png").write_bytes(b"GIF89a")
    (root / "val" / "class0" / "0.png").write_bytes(b"")
    result = train(toy_vit(), root, out=tmp_path / "run", run=RUN, epochs=2, batch=6, size=(16,))
    assert capfd.readouterr().err.count("class0/0.png") == 1
    assert result.metrics["skipped_training_images"] == 1
    assert (result.metrics["images"], result.metrics["skipped"]) == (8, 1)


def test_mistakes_are_answered(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="epochs"):
        train(toy_vit(), folder, out=tmp_path, run=RUN, epoch=1)
    with pytest.raises(UserError, match="larger than the training data"):
        train(toy_vit(), folder, out=tmp_path / "new", run=RUN, size=(16,), batch=1000)
    with pytest.raises(UserError, match="does not divide into 3"):
        train(toy_vit(), folder, out=tmp_path / "new", run=RUN, size=(16,), batch=20, accumulate=3)
    with pytest.raises(UserError, match="4 classes, but the data has 3"):
        train(toy_vit(classes=4), folder, out=tmp_path, run=RUN)
    with pytest.raises(UserError, match="adamw"):
        train(toy_vit(), folder, out=tmp_path / "new", run=RUN, size=(16,), batch=16, optimizer="adamww")
    (tmp_path / "flat").mkdir()
    open_splits(folder)[0][0][0].save(tmp_path / "flat" / "x.png")
    with pytest.raises(UserError):
        train(toy_vit(), tmp_path / "flat", out=tmp_path / "new", run=RUN)


def test_an_answer_that_is_no_number_is_an_error(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """The loss may stay sound while the pictures that judge the model break it: NaN is never the best top-1."""
    sound = VisionTransformer.forward_head

    def breaks_on_one(self, x, **more):
        logits = sound(self, x, **more)
        return logits if self.training else logits.index_fill(0, torch.tensor([2]), math.nan)

    monkeypatch.setattr(VisionTransformer, "forward_head", breaks_on_one)
    (folder / "val" / "class0" / "1.png").rename(folder / "val" / "class0" / "1.gone")
    try:
        with pytest.raises(UserError, match=r"returns NaN or infinity for 2 of 20 images, the first 'class0/3.png'"):
            train(toy_vit(), folder, out=tmp_path, run=RUN, epochs=1, batch=16, size=(16,))
    finally:
        (folder / "val" / "class0" / "1.gone").rename(folder / "val" / "class0" / "1.png")
    assert not (tmp_path / "best.safetensors").exists()


# Parts ---------------------------------------------------------------------------------------------------------------


def rates(recipe: Recipe, steps: int, per_epoch: int, losses: list[float] | None = None) -> list[float]:
    optimizer = make_optimizer(toy_vit(), recipe)
    schedule = Schedule(optimizer, recipe, per_epoch)
    found = []
    for step in range(steps):
        schedule.before(step)
        found.append(schedule.rate())
        if losses and step % per_epoch == per_epoch - 1:
            schedule.after_epoch(losses[step // per_epoch])
    return found


def test_cosine_with_warmup_and_cooldown() -> None:
    recipe = Recipe(epochs=4, cooldown=1, warmup=1, lr=1.0, warmup_lr=0.0, min_lr=0.1, batch=8)
    expected = [step / 10 if step < 10 else 0.1 + 0.45 * (1 + math.cos(math.pi * step / 40)) for step in range(40)]
    assert rates(recipe, 50, 10) == pytest.approx(expected + [0.1] * 10)


def test_plateau_divides_by_ten() -> None:
    recipe = Recipe(schedule="plateau", lr=1.0, min_lr=0.0, patience=1)
    assert rates(recipe, 6, 1, [3.0, 2.0, 2.0, 2.0, 1.0, 1.0]) == pytest.approx([1, 1, 1, 1, 0.1, 0.1])
    assert rates(Recipe(schedule="constant", lr=0.5), 3, 1) == [0.5] * 3


def test_how_long_it_takes_is_said_now_and_then() -> None:
    pace = Pace(total=110, before=10, began=0.0)
    moments = {done: pace.left(done, 2.0 * (done - 10)) for done in range(10, 111)}  # two seconds a step
    assert [done for done, left in moments.items() if left is not None] == [12, 27, 42, 57, 72, 87, 102]
    assert moments[12] == 2 * 98
    quick = Pace(total=100, before=0, began=0.0)
    assert not any(quick.left(done, 0.1 * done) for done in range(101))
    assert [duration(s) for s in (12.3, 89, 100, 5000, 9000)] == ["12 s", "89 s", "2 min", "83 min", "2.5 h"]


def test_piped_it_says_how_far_it_is(tmp_path: Path, capsys) -> None:
    log = Log(tmp_path)
    with log.progress("train", total=1000, done=0):
        log.pace.began -= 20  # as if it had begun then
        log.advance(10, 1.25, 1e-3, 64.0)
        log.advance(11, 1.25, 1e-3, 64.0)
    said = capsys.readouterr().err
    assert said.startswith("step 10/1000, loss 1.250, about 33 min left")
    assert said.count("left") == 1


@pytest.mark.parametrize("schedule", ["constant", "plateau", "cosine"])
def test_layer_decay(schedule: str) -> None:
    """Once, whoever sets the rate: timm's cosine applies a layer's factor too."""
    recipe = Recipe(layer_decay=0.5, lr=1.0, schedule=schedule)
    optimizer = make_optimizer(toy_vit(), recipe)
    Schedule(optimizer, recipe, 1).before(0)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([0.125, 0.25, 0.5, 1.0])


def test_choosing_what_learns() -> None:
    model = toy_vit()
    assert choose_trained(model, ("head.*", "blocks.1.attn.*")) == sum(
        p.numel() for p in (*model.head.parameters(), *model.blocks[1].attn.parameters())
    )
    assert not model.cls_token.requires_grad
    with pytest.raises(UserError, match="cls_token"):
        choose_trained(model, ("predictor.*",))


def test_a_second_interrupt_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_compile_and_bf16(folder: Path, tmp_path: Path) -> None:
    fields = {"epochs": 1, "batch": 20, "size": (16,), "run": RUN}
    plain = train(toy_vit(), folder, out=tmp_path / "plain", **fields)
    for change in ({"compile": True}, {"precision": "bf16"}):
        found = train(toy_vit(), folder, out=tmp_path / str(change), **fields, **change)
        assert found.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=2e-2)


@pytest.mark.parametrize(
    ("attention", "weight"), [("window:size=2", "relative_position_bias_table"), ("xca", "temperature")]
)
def test_weight_decay_leaves_an_attentions_own_scales_alone(attention: str, weight: str) -> None:
    from attendless.convert import convert
    from attendless.train.optimise import make_optimizer

    model = convert(toy_vit(), attention, below_breakeven="keep")
    names = {id(value): name for name, value in model.named_parameters()}
    groups = make_optimizer(model, Recipe(weight_decay=0.1)).param_groups
    decayed = {names[id(value)] for group in groups if group["weight_decay"] for value in group["params"]}
    assert "blocks.0.attn.qkv.weight" in decayed
    assert f"blocks.0.attn.{weight}" in names.values()
    assert not {name for name in decayed if name.endswith((weight, "pos_embed", "cls_token"))}
