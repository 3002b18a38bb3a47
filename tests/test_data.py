"""Folders as people have them, pictures as they come, and damage of every kind."""

from __future__ import annotations

import io
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attendless.data.folders import Files
from attendless.data.opening import open_data, open_splits
from attendless.data.source import BadImage, load_image
from attendless.errors import UserError
from train_toys import toy_folder

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)


def picture(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.fromarray(PIXELS)).save(path, **options)
    return path


# Layouts -------------------------------------------------------------------------------------------------------------


def test_splits_with_class_names(tmp_path: Path) -> None:
    for name in ("train/b/1.png", "train/a/2.jpg", "train/a/deep/er/3.JPEG", "validation/b/4.png"):
        picture(tmp_path / name)
    train, val = open_data(tmp_path, "train"), open_data(tmp_path, "val")
    assert train.classes == val.classes == ("a", "b")
    assert [(train.name(i), train[i][1]) for i in range(3)] == [("a/2.jpg", 0), ("a/deep/er/3.JPEG", 0), ("b/1.png", 1)]
    assert val[0][1] == 1


def test_folders_named_by_class_index_keep_their_number(tmp_path: Path) -> None:
    for name in ("007", "0", "12"):
        picture(tmp_path / name / "x.png")
    source = open_data(tmp_path)
    assert len(source.classes) == 13
    assert sorted(source.labels) == [0, 7, 12]


def test_tiny_imagenet(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        picture(tmp_path / "train" / name / "images" / f"{name}_0.JPEG")
    for i in range(3):
        picture(tmp_path / "val" / "images" / f"val_{i}.JPEG")
    notes = "val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\nval_2.JPEG\tn02\t0\t0\t9\t9\n"
    (tmp_path / "val" / "val_annotations.txt").write_text(notes)
    train, val = open_data(tmp_path, "train"), open_data(tmp_path, "val")
    assert (train.classes, train.labels) == (("n01", "n02"), (0, 1))
    assert val.labels == (1, 0, 1)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(UserError, match="line 1"):
        open_data(tmp_path, "val")
    (tmp_path / "val" / "val_annotations.txt").write_text("../../secret.png\tn01\n")
    with pytest.raises(UserError, match="line 1"):
        open_data(tmp_path, "val")


@pytest.mark.parametrize(("hundred", "labels"), [(False, [3, 9]), (True, [40, 99])])
def test_cifar_binary(tmp_path: Path, hundred: bool, labels: list[int]) -> None:
    images = np.random.default_rng(1).integers(0, 255, (2, 32, 32, 3), dtype=np.uint8)
    rows = [
        bytes([1, y] if hundred else [y]) + x.transpose(2, 0, 1).tobytes() for x, y in zip(images, labels, strict=True)
    ]
    (tmp_path / ("train.bin" if hundred else "data_batch_1.bin")).write_bytes(b"".join(rows))
    (tmp_path / ("test.bin" if hundred else "test_batch.bin")).write_bytes(rows[0])
    train = open_data(tmp_path, "train")
    assert (len(train), len(open_data(tmp_path, "val"))) == (2, 1)
    assert [train[i][1] for i in range(2)] == labels
    assert np.array_equal(np.asarray(train[1][0]), images[1])
    (tmp_path / ("test.bin" if hundred else "test_batch.bin")).write_bytes(rows[0][:-5])
    with pytest.raises(UserError, match="damaged"):
        open_data(tmp_path, "val")


def test_torchvision_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read from"):
        open_data(f"cifar10@{tmp_path}")
    with pytest.raises(UserError, match="CIFAR10"):
        open_data(f"CIFAR11@{tmp_path}")


def test_torchvision_set_that_is_there(tmp_path: Path) -> None:
    for i, name in enumerate(("AnnualCrop", "Forest")):
        picture(tmp_path / "eurosat" / "2750" / name / f"{i}.png")
    source = open_data(f"eurosat@{tmp_path}")
    assert source.classes == ("AnnualCrop", "Forest")
    assert np.array_equal(np.asarray(source[1][0]), PIXELS)
    assert source[1][1] == 1


def test_pictures_alone_are_unlabelled(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "b.png")
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "notes").mkdir()
    source = open_data(tmp_path)
    assert source.classes == ()
    assert [source.name(i) for i in range(2)] == ["images/a.png", "images/b.png"]


def test_without_splits_some_are_held_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(20):
            picture(tmp_path / name / f"{i:02}.png")
    train, val, note = open_splits(tmp_path)
    assert isinstance(train, Files)
    assert isinstance(val, Files)
    assert (len(train), sorted(val.labels)) == (36, [0, 0, 1, 1])
    assert not set(train.files) & set(val.files)
    assert "held out" in note


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ([], "Found: nothing"),
        (["notes.txt"], "Found: notes.txt"),
        (["a/x.png", "b/readme.md"], "b' contains no images"),
        (["train/a/x.png"], "no val folder"),
        (["val/a/x.png"], "no train folder"),
        (["train/a/x.png", "val/b/x.png"], "training data lacks: b"),
    ],
)
def test_a_wrong_folder_is_told_what_was_expected(tmp_path: Path, make: list[str], says: str) -> None:
    for name in make:
        if name.endswith("png"):
            picture(tmp_path / name)
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    with pytest.raises(UserError, match=says):
        open_splits(tmp_path)


def test_a_wrong_name_is_told_what_exists(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scenes"):
        open_data(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file"):
        open_data(picture(tmp_path / "x.png"))


@pytest.mark.data
def test_the_development_data(data_dir: Path) -> None:
    counts = {"imagenette-160": (9469, 10), "imagenet-mini/distil": (2000, 1000), "coco128": (128, 0)}
    for name, (images, classes) in counts.items():
        source = open_data(data_dir / name, "train" if "nette" in name else "val")
        assert (len(source), len(source.classes)) == (images, classes)


# Pictures ------------------------------------------------------------------------------------------------------------


def in_mode(mode: str) -> Image.Image:
    grey = np.asarray(Image.fromarray(PIXELS).convert("L"))
    if mode == "I;16":
        return Image.fromarray(grey.astype(np.uint16) * 257)
    if mode in ("I", "F"):
        return Image.fromarray(grey.astype(np.int32 if mode == "I" else np.float32))
    return Image.fromarray(PIXELS).convert(mode)


def storable() -> list[tuple[str, str]]:
    """Every pair of mode and format that Pillow can write, and read again."""
    found = []
    for mode in ("1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"):
        for suffix in ("png", "tiff", "jpeg", "bmp", "webp", "gif"):
            try:
                in_mode(mode).save(file := io.BytesIO(), format=suffix)
                Image.open(file).load()
                found.append((mode, suffix))
            except (OSError, KeyError, ValueError, DeprecationWarning):
                pass
    return found


@pytest.mark.parametrize(("mode", "suffix"), storable())
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    found = load_image(picture(tmp_path / f"x.{suffix}", in_mode(mode)))
    assert (found.mode, found.size) == ("RGB", (16, 12))
    if suffix in ("png", "tiff") and mode in ("L", "I;16", "I", "F"):
        assert np.array_equal(np.asarray(found)[..., 0], np.asarray(in_mode("L")))


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    found = load_image(picture(tmp_path / "x.png", exif=exif))
    assert np.array_equal(np.asarray(found), np.rot90(PIXELS, -1))


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS).quantize(8)
    found = load_image(picture(tmp_path / "x.png", image, transparency=bytes(range(8))))
    assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def encoded() -> list[tuple[str, bytes]]:
    """One sound file of every kind, to be damaged."""
    found = []
    for suffix in ("jpg", "png", "gif", "bmp", "webp", "tiff", "ppm"):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 3
        more = {"exif": exif} if suffix in ("jpg", "png", "webp") else {}
        Image.fromarray(PIXELS).save(buffer, format={"jpg": "jpeg"}.get(suffix, suffix), **more)
        found.append((suffix, buffer.getvalue()))
    return found


def damage(content: bytes, draw: random.Random) -> bytes:
    """Cut, flip, repeat, swap or make up bytes."""
    out = bytearray(content)
    kind = draw.randrange(6)
    if kind == 0:
        return bytes(out[: draw.randrange(len(out))])
    if kind == 1:
        return draw.randbytes(draw.randrange(200))
    if kind == 2:
        start = draw.randrange(len(out))
        return bytes(out[:start] + out[start // 2 :] + out[start:])
    if kind == 3:
        start = draw.randrange(len(out))
        out[start : start + draw.randrange(40)] = draw.randbytes(draw.randrange(40))
        return bytes(out)
    for _ in range(draw.choice((1, 1, 2, 8, 50))):
        # Headers hold the sizes and offsets, so most of the damage goes there.
        out[draw.randrange(len(out) if kind == 4 else min(64, len(out)))] = draw.choice((0, 255, draw.randrange(256)))
    return bytes(out)


def test_thousands_of_damaged_pictures(tmp_path: Path) -> None:
    """Each is read, or refused with its name; never anything else, and never more memory than a picture deserves."""
    draw, sound = random.Random(0), encoded()
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own remarks about damaged files
        for i in range(3000):
            suffix, content = sound[i % len(sound)]
            path = tmp_path / f"{i}.{suffix}"
            path.write_bytes(damage(content, draw))
            try:
                assert load_image(path).mode == "RGB"
            except BadImage as error:
                refused += 1
                assert path.name in str(error)
            path.unlink()
    assert 1000 < refused < 3000


def test_files_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "folder.png").mkdir()
    picture(tmp_path / "a" / "good.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    source = open_data(tmp_path)
    readable = 0
    for i in range(len(source)):
        try:
            source[i]
            readable += 1
        except BadImage:
            pass
    assert readable == 1


def test_thousands_of_strange_folders(tmp_path: Path) -> None:
    """Random trees of folders and files: a set of images, or a `UserError`."""
    draw = random.Random(1)
    words = ["train", "val", "test", "images", "a", "b", "0", "12", "x.png", "y.jpg", "notes.txt", ".hidden", "ü²", " "]
    words += ["val_annotations.txt", "data_batch_1.bin", "test_batch.bin", "train.bin", "test.bin"]
    opened = 0
    for i in range(1500):
        root = tmp_path / str(i)
        root.mkdir()
        for _ in range(draw.randrange(7)):
            place = root.joinpath(*(draw.choice(words) for _ in range(draw.randrange(1, 4))))
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if draw.random() < 0.3:
                    place.mkdir()
                else:
                    place.write_bytes(draw.randbytes(draw.choice((0, 5, 3073, 3074))))
            except OSError:
                continue
        for split in ("train", "val"):
            try:
                assert len(open_data(root, split)) > 0
                opened += 1
            except UserError as error:
                assert str(error)
    assert opened > 50


def test_toy_folder_is_what_the_other_tests_think(tmp_path: Path) -> None:
    train, val, _ = open_splits(toy_folder(tmp_path))
    assert (len(train), len(val), train.classes) == (60, 21, ("class0", "class1", "class2"))
