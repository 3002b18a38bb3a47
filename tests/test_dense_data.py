"""Annotated pictures: the layouts that are understood, what is put right, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from attendless import UserError
from attendless.dense.coco import open_boxes
from attendless.dense.masks import IGNORE_INDEX, open_masks
from attendless.dense.recipes import RECIPES, DenseRecipe, dense_recipe
from attendless.dense.transforms import (
    Sized,
    WithBoxes,
    WithMasks,
    boxes_to_learn,
    masks_to_learn,
)
from dense_toys import toy_boxes, toy_masks

HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    return toy_boxes(tmp_path / "boxes")


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    return toy_masks(tmp_path / "masks")


def edit(root: Path, change: Any, name: str = "train.json") -> None:
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def test_boxes_are_corners_and_classes_by_place(boxes: Path) -> None:
    train, val, note = open_boxes(boxes)
    assert (len(train), len(val), note) == (8, 4, "the data's own splits; 2 classes")
    assert train.classes == ("red", "green")
    image, target = train[0]
    ((left, top, right, bottom),) = target["boxes"].tolist()
    inside = np.asarray(image)[int(top) : int(bottom), int(left) : int(right), target["labels"][0]]
    assert (inside == 230).all()
    assert (np.asarray(image)[..., target["labels"][0]] == 230).sum() == inside.size


def test_one_file_is_split_by_holding_out(boxes: Path) -> None:
    (boxes / "train.json").rename(boxes / "instances.json")
    (boxes / "val.json").unlink()
    with pytest.raises(UserError, match="too few images"):
        open_boxes(boxes)
    train, val, note = open_boxes(boxes, hold_out=4)
    assert (len(train), len(val)) == (6, 2)
    assert "every 4th" in note
    assert len(open_boxes(boxes, hold_out=0)[1]) == 8


def test_cocos_own_folders(boxes: Path) -> None:
    (boxes / "annotations").mkdir()
    (boxes / "images").rename(boxes / "train2017")
    (boxes / "val2017").mkdir()
    for path in (boxes / "train2017").glob("val*"):
        path.rename(boxes / "val2017" / path.name)
    for split in ("train", "val"):
        (boxes / f"{split}.json").rename(boxes / "annotations" / f"instances_{split}2017.json")
    train, val, _ = open_boxes(boxes)
    assert len(train) == 8
    assert val[0][0].size == (36, 44)


def test_boxes_outside_are_cut_or_left_out_and_told(boxes: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"][0]["bbox"] = [-10, -10, 30, 30]
        content["annotations"][1]["bbox"] = [1000, 1000, 5, 5]
        content["annotations"][2]["bbox"] = [3, 3, 0, 7]

    edit(boxes, change)
    train, _, note = open_boxes(boxes)
    assert train[0][1]["boxes"].tolist() == [[0, 0, 20, 20]]
    assert not len(train[1][1]["boxes"])
    assert "2 images have no boxes and serve as background" in note
    assert "1 boxes cross the edge and are clipped, first annotation 1" in note
    assert "2 boxes have no area inside their image and are removed, first 2" in note


def test_crowds_are_judged_but_not_learned_from(boxes: Path) -> None:
    edit(boxes, lambda content: content["annotations"][0].update(iscrowd=1))
    train, _, _ = open_boxes(boxes)
    assert not len(train[0][1]["boxes"])
    assert train.truth([0])["annotations"][0]["iscrowd"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["annotations"][3].update(category_id=99), "annotation 4: unknown category 99. There are 1, 2"),
        (lambda c: c["annotations"][3].update(image_id=99), "annotation 4: there is no image 99"),
        (lambda c: c["annotations"][3].update(bbox=[1, 2, 3]), "annotation 4: bbox .* is not valid"),
        (lambda c: c["annotations"][3].update(bbox=[1, 2, "x", 4]), "annotation 4: bbox .* is not valid"),
        (lambda c: c["annotations"][3].update(bbox=[1, 2, float("nan"), 4]), "annotation 4: bbox .* is not valid"),
        (lambda c: c["annotations"][3].update(bbox=[9, 2, -3, 4]), "annotation 4: bbox .* is not valid"),
        (lambda c: c["annotations"][3].update(bbox="1234"), "annotation 4: bbox .* is not valid"),
        (lambda c: c["annotations"][3].update(area="large"), "annotation 4: .*area 'large': expected"),
        (lambda c: c["annotations"][3].update(iscrowd="no"), "annotation 4: iscrowd 'no'"),
        (lambda c: c["annotations"][3].update(image_id=[10]), r"image_id \[10\]: expected a number or a string"),
        (lambda c: c["categories"][0].update(id={}), "id {}: expected a number or a string"),
        (lambda c: c["annotations"].clear(), "no box inside"),
        (lambda c: c["images"][0].pop("width"), "image 10 has no width and height"),
        (lambda c: c["images"][0].update(file_name="gone.png"), "1 of 8 images .* are not in .* first 'gone.png'"),
        (lambda c: c["images"][0].update(id=11), "contains an id of an image or a category twice"),
        (lambda c: c.pop("categories"), "is not COCO's JSON"),
        (lambda c: c["categories"][1].update(name="blue"), "differ in categories: blue, green"),
        (lambda c: c["images"][0].update(width=500), "train0.png' is 36x44 pixels, but annotated as 500x44"),
    ],
)
def test_broken_annotations_are_named(boxes: Path, change: Any, says: str) -> None:
    edit(boxes, change)
    with pytest.raises(UserError, match=says):
        open_boxes(boxes)


def test_an_area_that_is_not_given_is_that_of_the_box(boxes: Path) -> None:
    edit(boxes, lambda content: content["annotations"][0].update(area=None))
    one = open_boxes(boxes)[0].truth([0])["annotations"][0]
    assert one["area"] == one["bbox"][2] * one["bbox"][3]


def test_a_picture_turned_by_its_camera_is_as_large_as_it_is_shown(boxes: Path) -> None:
    about = json.loads((boxes / "train.json").read_text())["images"][0]
    path = boxes / "images" / about["file_name"]
    upright = Image.open(path).copy()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter to be seen
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    assert np.array_equal(np.asarray(open_boxes(boxes)[0][0][0]), np.asarray(upright))


def test_masks_hold_classes(masks: Path) -> None:
    train, val, _ = open_masks(masks)
    assert (len(train), len(val), train.classes) == (8, 4, ("0", "1", "2"))
    image, mask = train[0]
    assert mask.shape == (image.height, image.width)
    assert set(np.unique(mask)) == {0, 1}
    assert (np.asarray(image)[mask == 1][:, 0] == 230).all()


def test_named_classes_and_what_is_ignored(masks: Path) -> None:
    (masks / "classes.txt").write_text("0 nothing\n1 red thing\n2 green thing\n")
    path = masks / "train" / "masks" / "0.png"
    mask = np.asarray(Image.open(path)).copy()
    mask[0, 0] = 255
    Image.fromarray(mask).save(path)
    train, _, _ = open_masks(masks)
    assert train.classes == ("nothing", "red thing", "green thing")
    assert train[0][1][0, 0] == IGNORE_INDEX


def test_vocs_and_ade20ks_folders(masks: Path, tmp_path: Path) -> None:
    voc, ade = tmp_path / "voc", tmp_path / "ade"
    (voc / "ImageSets" / "Segmentation").mkdir(parents=True)
    for folder in ("JPEGImages", "SegmentationClass"):
        (voc / folder).mkdir()
    for split, long in (("train", "training"), ("val", "validation")):
        stems = [path.stem for path in sorted((masks / split / "images").iterdir())]
        (voc / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(f"{split}{stem}" for stem in stems))
        for kind in ("images", "annotations"):
            (ade / kind / long).mkdir(parents=True)
        for stem in stems:
            image, mask = (Image.open(masks / split / kind / f"{stem}.png") for kind in ("images", "masks"))
            image.save(voc / "JPEGImages" / f"{split}{stem}.jpg")
            mask.save(voc / "SegmentationClass" / f"{split}{stem}.png")
            image.save(ade / "images" / long / f"{stem}.png")
            mask.save(ade / "annotations" / long / f"{stem}.png")
    assert open_masks(voc)[0].classes == ("0", "1", "2")
    train, val, _ = open_masks(ade)
    assert (len(train), len(val), train.classes) == (8, 4, ("1", "2"))
    assert set(np.unique(train[0][1])) == {0, IGNORE_INDEX}  # 0 of the file is ignored, 1 is the first class
    (voc / "JPEGImages" / "train0.jpg").unlink()
    with pytest.raises(UserError, match=r"missing files, first JPEGImages/train0.jpg"):
        open_masks(voc)


def test_masks_that_do_not_fit_are_named(masks: Path) -> None:
    path = masks / "train" / "masks" / "3.png"
    whole = Image.open(path).copy()
    Image.fromarray(np.zeros((5, 7), dtype=np.uint8)).save(path)
    with pytest.raises(UserError, match=r"3.png' is 7x5 pixels, but its image is 48x32"):
        open_masks(masks)
    Image.fromarray(np.full((32, 48), 300, dtype=np.uint16)).save(path)
    with pytest.raises(UserError, match="contains the number 300: expected 0 to 255"):
        open_masks(masks)
    whole.convert("RGB").save(path)
    with pytest.raises(UserError, match=r"3.png' has colours \(RGB\)"):
        open_masks(masks)
    path.write_bytes(b"no picture")
    with pytest.raises(UserError, match="cannot read mask"):
        open_masks(masks)
    path.unlink()
    with pytest.raises(
        UserError, match=r"1 of 8 images in 'train/images' have no mask in 'train/masks', first '3.png'"
    ):
        open_masks(masks)
    whole.save(path)
    (masks / "classes.txt").write_text("0 a\n1 b\n")
    with pytest.raises(UserError, match="contains the number 2, which is not a class: expected 0, 1"):
        open_masks(masks)
    (masks / "classes.txt").write_text("zero a\n")
    with pytest.raises(UserError, match="expected lines such as `1 cat`"):
        open_masks(masks)


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    for opened in (open_boxes, open_masks):
        with pytest.raises(UserError, match="no such folder"):
            opened(tmp_path / "nowhere")
        with pytest.raises(UserError, match="only nothing"):
            opened(tmp_path)


def test_what_is_cropped_and_mirrored_stays_in_place(boxes: Path, masks: Path) -> None:
    """Red stays red: the boxes and masks move with the pixels."""
    recipe = DenseRecipe(scales=(40, 64), scale=(0.8, 1.6))
    learned = WithMasks(open_masks(masks)[0], masks_to_learn(recipe, (32, 32), (0, 0, 0), (1, 1, 1)), stand_in=True)
    for epoch in range(8):
        pixels, mask, _ = learned[epoch, 0, 0]
        assert pixels.shape[1:] == mask.shape == (32, 32)
        if (mask == 1).sum() > 40:
            assert (pixels[0][mask == 1] > 0.7).float().mean() > 0.7
    drawn = WithBoxes(open_boxes(boxes)[0], boxes_to_learn(recipe, 32, (0, 0, 0), (1, 1, 1)), stand_in=True)
    seen = set()
    for epoch in range(8):
        pixels, target, _ = drawn[epoch, 0, 0]
        seen.add(min(pixels.shape[1:]))
        left, top, right, bottom = target["boxes"][0].round().int().tolist()
        assert (pixels[0, top:bottom, left:right] > 0.7).float().mean() > 0.8
        assert target["sizes"].tolist() == [[44, 36], list(pixels.shape[1:])]
    assert seen == {40, 64}


@pytest.mark.parametrize("size", [(300, 2), (2, 300), (1, 1), (333, 500)])
def test_no_picture_is_too_thin_or_too_large(size: tuple[int, int]) -> None:
    """Short sides of 32 pixels, long ones of 64 at most, then zoomed; and never less than a pixel."""
    pixels = torch.zeros(3, *size, dtype=torch.uint8)
    made = [Sized((32,), 64, (0.5, 2.0))(tv_tensors.Image(pixels)).shape[-2:] for _ in range(20)]
    assert all(1 <= min(sides) <= 64 for sides in made)
    assert all(max(sides) <= 128 for sides in made)
    short, long = sorted(Sized((32,), 64)(tv_tensors.Image(pixels)).shape[-2:])
    assert (short, long) == {300: (1, 64), 1: (32, 32), 500: (32, 48)}[max(size)]


def test_recipes_say_how_long_they_take_in_steps() -> None:
    made = dense_recipe("semantic_fpn_80k", "segmentation")
    assert (made.steps(1263), made.falling(1263)) == (80_000, 80_000)
    assert dense_recipe("retinanet_1x:epochs=2", "detection").steps(100) == 200
    assert dense_recipe("retinanet_1x", "detection").rising(100) == 500
    with pytest.raises(UserError, match="unknown recipe of detection 'semantic_fpn_80k'"):
        dense_recipe("semantic_fpn_80k", "detection")
    assert all("Expected" in (make.__doc__ or "") for task in RECIPES.values() for make in task.values())
