"""The embedded data set: the same pictures everywhere, and a class that no single patch betrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attendless.data import open_data
from attendless.data.opening import open_splits
from attendless.data.scenes import _FAR_APART, COLOURS, LARGE, SceneOptions
from attendless.data.scenes import scene as drawn
from attendless.errors import UserError
from attendless.train import train


def scene(seed: int, split: int, index: int, size: int, **options: int) -> tuple[np.ndarray, int]:
    return drawn(SceneOptions(seed=seed, size=size, **options), split, index)


def test_a_picture_is_a_function_of_its_key() -> None:
    first, label = scene(0, 0, 5, 32)
    again, same = scene(0, 0, 5, 32)
    assert np.array_equal(first, again)
    assert label == same
    others = [scene(1, 0, 5, 32)[0], scene(0, 1, 5, 32)[0], scene(0, 0, 6, 32)[0]]
    assert not any(np.array_equal(first, other) for other in others)
    # The very bytes, so that results can be compared between machines.
    assert (int(first.astype(np.int64).sum()), label) == EXPECTED


EXPECTED = (387205, 4)


def test_size_changes_the_pixels_not_the_scene() -> None:
    for index in range(20):
        small, label = scene(0, 0, index, 32)
        large, same = scene(0, 0, index, 128)
        assert label == same
        shrunk = large.reshape(32, 4, 32, 4, 3).mean((1, 3))
        assert np.abs(shrunk - small).mean() < 12


def test_the_label_is_the_step_between_two_distant_colours() -> None:
    """Found again in the pixels: the disc's uppermost row is narrow, the flag's is as wide as the flag."""
    palette = np.array(list(COLOURS.values()))
    labels = set()
    for index in range(60):
        pixels, label = scene(3, 0, index, 64)
        here = [(pixels == colour).all(-1) for colour in palette]
        seen = [colour for colour in range(10) if here[colour].sum() > 40]
        if len(seen) == 1:
            assert label == 0
            continue
        wide = {}
        for colour in seen:
            rows, columns = np.nonzero(here[colour])
            wide[colour] = (rows == rows.min()).sum() > 0.8 * (columns.max() + 1 - columns.min())
        disc, flag = sorted(seen, key=wide.__getitem__)
        assert (wide[disc], wide[flag]) == (False, True)
        assert label == (flag - disc) % 10
        labels.add(label)
    assert len(labels) > 7


def test_they_are_far_apart() -> None:
    assert all(max(abs(a - c), abs(b - d)) >= LARGE + 2 for a, b, c, d in _FAR_APART)
    assert len(_FAR_APART) > 50


def test_clutter_adds_colours_and_keeps_the_class() -> None:
    palette = np.array(list(COLOURS.values()))

    def colours(pixels: np.ndarray) -> int:
        return sum(bool((pixels == colour).all(-1).any()) for colour in palette)

    for index in range(20):
        plain, label = scene(0, 0, index, 64)
        full, same = scene(0, 0, index, 64, clutter=16)
        assert label == same
        assert colours(plain) <= 2 < colours(full)


def test_fewer_colours_and_shades_of_them() -> None:
    assert open_data("scenes:colours=5", "train").classes == tuple(f"{steps} steps" for steps in range(5))
    labels = {scene(0, 0, index, 32, colours=5)[1] for index in range(60)}
    assert labels == set(range(5))
    plain, label = scene(0, 0, 3, 32, colours=5)
    shaded, same = scene(0, 0, 3, 32, colours=5, shade=25)
    assert label == same
    palette = np.array(list(COLOURS.values()))
    pure = [(pixels[:, :, None] == palette).all(-1).sum() for pixels in (plain, shaded)]
    assert pure[0] > 40 > pure[1], "no longer the palette's own"


def test_with_a_grain_a_patch_looks_the_same_at_every_size() -> None:
    """Every striped patch of large pictures is found in small ones too."""
    palette = {colour: i for i, colour in enumerate(COLOURS.values())}

    def patches(pixels: np.ndarray) -> set[bytes]:
        coloured = np.array([[palette.get(tuple(p), -1) for p in row] for row in pixels.tolist()], dtype=np.int8)
        side = len(pixels) // 4
        tiles = coloured.reshape(side, 4, side, 4).swapaxes(1, 2).reshape(-1, 4, 4)
        return {tile.tobytes() for tile in tiles if tile[0, 0] >= 0 and -1 in tile and (tile == tile[0]).all()}

    small = set().union(*(patches(scene(0, 0, index, 32, clutter=8, grain=4)[0]) for index in range(60)))
    large = set().union(*(patches(scene(0, 0, index, 96, clutter=8, grain=4)[0]) for index in range(3)))
    assert len(large) > 5
    assert large <= small


def test_classes_are_balanced() -> None:
    source = open_data("scenes:size=16,train=2000", "train")
    counts = np.bincount([source[i][1] for i in range(2000)], minlength=10)
    assert counts.min() > 150


def test_options() -> None:
    learn, judge, _ = open_splits("scenes:size=48,train=30,val=7")
    assert (len(learn), len(judge), learn[0][0].size) == (30, 7, (48, 48))
    with pytest.raises(IndexError):
        learn[30]
    with pytest.raises(UserError, match="size"):
        open_data("scenes:colour=3")
    with pytest.raises(UserError, match="16 to 1024"):
        open_data("scenes:size=2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_attention_solves_it_and_single_patches_do_not(tmp_path: Path, seed: int) -> None:
    """A tenth of a million parameters, 64 tokens, a minute of two cores; chance is 10 percent."""
    found = {}
    for attention in ("full", "window:size=1"):
        out = tmp_path / attention.replace(":", "-")
        result = train("columnar_micro_patch4_32", "scenes", attention=attention, recipe="scenes", out=out, seed=seed)
        found[attention] = result.metrics["top1"]
    print(seed, found)
    assert found["full"] >= 90
    assert found["window:size=1"] <= 13
