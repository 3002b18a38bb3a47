"""Draws are functions of their place: pictures of (seed, epoch, index), orders of (seed, epoch), mixtures of step."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attendless.data.opening import open_data, open_splits
from attendless.errors import UserError
from attendless.randomness import key, randomness
from attendless.train.augment import Mix, eval_transform, train_transform
from attendless.train.loader import (
    Prepared,
    Steps,
    epoch_order,
    eval_loader,
    shares,
    train_loader,
)
from attendless.train.recipe import RECIPES, Recipe, recipe
from train_toys import toy_folder

HALF = (0.5, 0.5, 0.5)
ALL = Recipe(augment="rand-m9-mstd0.5-inc1", erase=0.5, jitter=0.4, interpolation="random", mixup=0.8, cutmix=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(tmp_path_factory.mktemp("toy"))


def prepared(folder: Path, seed: int = 0) -> Prepared:
    return Prepared(open_data(folder, "train"), train_transform(ALL, (16, 16), HALF, HALF), seed, stand_in=True)


def test_keys_are_the_same_everywhere() -> None:
    assert key(0, 1, 2) == 10917752987982246961
    assert len({key(a, b) for a in range(50) for b in range(50)}) == 2500


def test_randomness_leaves_no_trace() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws(), draws()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draws()
    with randomness(3, 4):
        inside = draws()
    assert [first, draws()] == expected
    with randomness(3, 4):
        assert draws() == inside


def test_a_picture_depends_on_its_draw_alone(folder: Path) -> None:
    data = prepared(folder)
    draw = (2, 7, 0)
    pixels = data[draw][0]
    torch.rand(5), random.random(), data[0, 3, 0]
    assert torch.equal(data[draw][0], pixels)
    for other in ((3, 7, 0), (2, 7, 1)):
        assert not torch.equal(data[other][0], pixels)
    assert not torch.equal(prepared(folder, seed=1)[draw][0], pixels)


def test_the_strongest_posterizing_is_possible(folder: Path) -> None:
    transform = train_transform(Recipe(augment="rand-m10-n1-inc1-mmax10"), (16, 16), HALF, HALF)
    policy = next(step for step in transform.transforms if hasattr(step, "ops"))  # type: ignore[attr-defined]
    image = open_data(folder, "train")[0][0]
    found = [op.aug_fn(image, bits) for op in policy.ops if "Posterize" in op.name for bits in (0, 4, 8, 9)]
    assert len(found) == 4
    assert np.array_equal(np.asarray(found[3]), np.asarray(image))
    assert set(np.unique(np.asarray(found[0]))) <= {0, 128}


def test_an_epoch_shows_every_picture_once() -> None:
    order = epoch_order(50, 3, 0)
    assert sorted(index for _, index, _ in order) == list(range(50))
    assert order == epoch_order(50, 3, 0)
    assert order != epoch_order(50, 3, 1)
    repeated = epoch_order(51, 3, 0, repeats=3)
    assert len(repeated) == len(set(repeated)) == 51
    assert len({index for _, index, _ in repeated}) == 17


@given(st.integers(1, 40), st.integers(1, 6))
def test_shares_are_a_partition_that_keeps_mixup_pairs(size: int, parts: int) -> None:
    batch = size * parts
    found = shares(batch, parts)
    assert sorted(p for part in found for p in part) == list(range(batch))
    assert {len(part) for part in found} == {size}
    if size % 2 == 0:
        for part in found:
            assert [batch - 1 - p for p in part] == part[::-1]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="does not divide"):
        shares(10, 4)


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 60), st.integers(0, 12), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
def test_starting_late_gives_the_rest_of_the_same_run(count: int, start: int, split: tuple[int, int]) -> None:
    processes, accumulate = split

    def run(first: int, rank: int) -> list:
        return list(Steps(count, 8, first, 14, 1, 1, accumulate, rank, processes))

    for rank in range(processes):
        assert run(0, rank)[start * accumulate :] == run(start, rank)
    runs = [run(0, rank) for rank in range(processes)]
    together = [
        sorted(draw for mine in runs for part in mine[step * accumulate : (step + 1) * accumulate] for draw in part)
        for step in range(14)
    ]
    assert together == [sorted(batch) for batch in Steps(count, 8, 0, 14, 1)]


def test_mixing_in_shares_is_mixing_whole() -> None:
    """Two halves mixed apart hold what the whole batch mixed at once holds."""
    images, labels = torch.rand(12, 3, 8, 8), torch.arange(12) % 3
    mix = Mix(ALL, 3)
    for step in range(6):
        whole, targets = mix(images.clone(), labels, step)
        for part in shares(12, 3):
            some, some_targets = mix(images[part].clone(), labels[part], step)
            assert torch.equal(some, whole[part])
            assert torch.equal(some_targets, targets[part])
    assert not torch.equal(mix(images.clone(), labels, 0)[0], mix(images.clone(), labels, 1)[0])


def test_targets_without_mixing() -> None:
    targets = Mix(Recipe(smoothing=0.3), 3)(torch.rand(2, 3, 4, 4), torch.tensor([0, 2]), 0)[1]
    assert targets.tolist() == [pytest.approx([0.8, 0.1, 0.1]), pytest.approx([0.1, 0.1, 0.8])]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_pictures(tmp_path: Path, workers: int) -> None:
    """Training takes the next one instead, so batches stay whole; evaluation leaves them out and counts them."""
    root = toy_folder(tmp_path, train=4, val=4)
    for split in ("train", "val"):
        (root / split / "class1" / "1.png").write_bytes(b"damaged")
    train, val, _ = open_splits(root)
    transform = eval_transform(ALL, (16, 16), HALF, HALF)
    batches = list(train_loader(Prepared(train, transform, stand_in=True), Steps(12, 4, 0, 3), workers))
    assert [len(images) for images, _, _ in batches] == [4, 4, 4]
    assert [bad for _, _, flags in batches for bad in flags.tolist() if bad >= 0] == [5]
    judged = list(eval_loader(Prepared(val, transform), 5, workers))
    assert [len(labels) for _, labels, _ in judged] == [5, 5 - 1, 2]
    assert [index for _, _, bad in judged for index in bad.tolist()] == [5]


def test_nothing_readable_at_all(tmp_path: Path) -> None:
    root = toy_folder(tmp_path, train=2, val=2)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"")
    data = Prepared(open_data(root, "train"), eval_transform(ALL, (16, 16), HALF, HALF), stand_in=True)
    with pytest.raises(UserError, match="no image"):
        data[0, 0, 0]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_counts_every_picture_once(folder: Path, processes: int) -> None:
    data = Prepared(open_data(folder, "val"), eval_transform(ALL, (16, 16), HALF, HALF))
    loaders = [eval_loader(data, 4, 0, rank, processes) for rank in range(processes)]
    labels = sorted(label for loader in loaders for _, labels, _ in loader for label in labels.tolist())
    assert labels == sorted(data.source.labels)  # type: ignore[attr-defined]


# Recipes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_how_to_run_it_and_what_to_expect(name: str) -> None:
    text = RECIPES[name].__doc__ or ""
    assert "attendless train" in text
    assert "Expected" in text
    made = recipe(name)
    image = open_data("scenes:size=40", "train")[0][0]
    assert train_transform(made, (32, 24), HALF, HALF)(image).shape == (3, 32, 24)
    assert eval_transform(made, (32, 24), HALF, HALF)(image).shape == (3, 32, 24)


def test_recipes_are_edited_by_text() -> None:
    made = recipe("fair:epochs=5,betas=0.8/0.9,compile")
    assert (made.epochs, made.betas, made.compile, made.drop_path) == (5, (0.8, 0.9), True, 0.2)
    assert recipe("deit").rate() == pytest.approx(1e-3)
    with pytest.raises(UserError, match="quick"):
        recipe("quik")
    with pytest.raises(UserError, match="out of range"):
        recipe("quick:epochs=-1")
    with pytest.raises(UserError, match="must be even"):
        recipe("deit:batch=7")


def test_the_papers_recipes() -> None:
    fair, bbvit, pvt = recipe("fair"), recipe("bbvit"), recipe("pvt")
    assert (fair.lr, fair.weight_decay, fair.clip, fair.warmup, fair.min_lr) == (5e-4, 0.05, 5.0, 20, 5e-6)
    assert (bbvit.optimizer, bbvit.lr, bbvit.schedule, bbvit.patience, bbvit.weight_decay) == (
        "adam",
        1e-3,
        "plateau",
        10,
        0,
    )
    assert (pvt.rate(), pvt.drop_path, pvt.warmup, pvt.repeats) == (1e-3, 0.1, 5, 3)
