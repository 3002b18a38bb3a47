"""The cache of decoded pictures: the same pixels, made once, never half."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attendless.data import open_data
from attendless.data.cache import Cached, cached
from attendless.data.source import BadImage
from attendless.errors import UserError
from attendless.train import Run, train
from train_toys import full_disk, same_bits, tensors_of, toy_folder, toy_vit


def test_the_same_pictures(tmp_path: Path) -> None:
    root = toy_folder(tmp_path / "data")
    (root / "train" / "class1" / "2.png").write_bytes(b"damaged")
    source, said = open_data(root, "train"), list[str]()
    found = cached(source, tmp_path / "cache", said.append)
    assert isinstance(found, Cached)
    again = pickle.loads(pickle.dumps(cached(source, tmp_path / "cache", said.append)))
    assert len(said) == 1
    for reader in (found, again):
        assert (len(reader), reader.classes) == (len(source), source.classes)
        for i in range(len(source)):
            if source.name(i) == "class1/2.png":
                with pytest.raises(BadImage, match=r"class1/2.png"):
                    reader[i]
                continue
            (a, label), (b, other) = source[i], reader[i]
            assert np.array_equal(np.asarray(a), np.asarray(b))
            assert label == other


def test_changed_pictures_get_a_new_cache(tmp_path: Path) -> None:
    root = toy_folder(tmp_path / "data", train=2, val=1)
    source, said = open_data(root, "train"), list[str]()
    cached(source, tmp_path / "cache", said.append)
    source[1][0].save(root / "train" / "class0" / "0.png")
    found = cached(source, tmp_path / "cache", said.append)
    assert len(said) == 2
    assert np.array_equal(np.asarray(found[0][0]), np.asarray(source[1][0]))


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    source = open_data("scenes:train=10", "train")
    cached(source, tmp_path)
    pixels = next(tmp_path.glob("*.pixels"))
    pixels.write_bytes(pixels.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        cached(source, tmp_path)
    next(tmp_path.glob("*.json")).write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        cached(source, tmp_path)


@pytest.mark.parametrize("most", [100, 300])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, most: int) -> None:
    """The pixels (180 bytes) find no room, or only their index; once there is some, the cache is made."""
    (tmp_path / "data").mkdir()
    for i in range(60):
        Image.new("RGB", (1, 1)).save(tmp_path / "data" / f"{i}.png")
    source, cache = open_data(tmp_path / "data"), tmp_path / "cache"
    with full_disk(most), pytest.raises(OSError, match="File too large"):
        cached(source, cache)
    assert list(cache.iterdir()) == []
    assert len(cached(source, cache)) == 60


def test_training_from_a_cache_changes_no_bit(tmp_path: Path) -> None:
    root = toy_folder(tmp_path / "data")
    for name, cache in (("plain", ""), ("cached", str(tmp_path / "cache"))):
        run = Run(workers=1, cache=cache)
        train(toy_vit(), root, out=tmp_path / name, run=run, epochs=1, batch=20, size=(16,))
    assert same_bits(tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "cached"))
