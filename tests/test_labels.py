"""Which class a folder is: by the model's names, ImageNet's, a number, or the order; and what is said otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import attendless
from attendless import UserError
from attendless.data.labels import class_names, match_labels
from attendless.data.opening import open_data
from attendless_cli.main import main
from train_toys import toy_folder, toy_vit

ANIMALS = SimpleNamespace(num_classes=4, pretrained_cfg={"label_names": ("ant", "bee", "cat", "dog")})
NAMELESS = SimpleNamespace(num_classes=4)
IMAGENET = SimpleNamespace(num_classes=1000)


@pytest.mark.parametrize(
    ("model", "given", "classes", "how"),
    [
        (ANIMALS, ("ant", "bee", "cat", "dog"), (0, 1, 2, 3), "by name"),
        (ANIMALS, ("bee", "dog"), (1, 3), "by name"),
        (ANIMALS, ("0", "1", "2"), (0, 1, 2), "by index"),
        (NAMELESS, ("0", "1"), (0, 1), "by index"),
        (NAMELESS, ("ant", "bee", "cat", "dog"), (0, 1, 2, 3), "in sorted order"),
        (IMAGENET, ("n01440764", "n02102040", "n03888257"), (0, 217, 701), "ImageNet"),
        (IMAGENET, ("0", "1", "2"), (0, 1, 2), "by index"),
        (IMAGENET, (), (), "none"),
        (SimpleNamespace(num_classes=1, pretrained_cfg={"label_names": ["7"]}), ("7",), (0,), "by name"),
    ],
)
def test_classes_are_found(model: object, given: tuple[str, ...], classes: tuple[int, ...], how: str) -> None:
    found = match_labels(given, model)
    assert (found.classes, found.how) == (classes, how)


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (
            ANIMALS,
            ("ant", "bird"),
            r"^'bird' is not among the classes of the model: 'ant', 'bee', 'cat', 'dog'\.",
        ),
        (ANIMALS, ("a", "b", "c", "d"), r"^'a', 'b', 'c', 'd' are not among the classes of the model"),
        (ANIMALS, ("0", "4"), r"the model has classes 0 to 3, not 4"),
        (NAMELESS, ("ant", "bee"), r"the images have 2 classes \('ant', 'bee'\) and the model has 4 without names"),
        (IMAGENET, ("n01440764", "n99999999"), r"^'n99999999' is not among the classes of ImageNet: .* and 995 more"),
        (IMAGENET, ("n01440764", "cat"), r"the images have 2 classes"),
        (IMAGENET, ("20261117",), r"the images have 1 classes"),  # a date is no index
    ],
)
def test_what_the_model_does_not_know_is_named(model: object, given: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        match_labels(given, model)
    assert "--no-labels" in str(error.value)


def test_names_of_another_classifier_do_not_count() -> None:
    assert class_names(ANIMALS) == ("ant", "bee", "cat", "dog")
    assert class_names(SimpleNamespace(num_classes=3, pretrained_cfg=ANIMALS.pretrained_cfg)) == ()


def test_long_numbers_are_names(tmp_path: Path) -> None:
    """Twenty million classes, two of which are there, were made of such a folder."""
    for name in ("20250101", "20261117"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "x.png")
    assert open_data(tmp_path).classes == ("20250101", "20261117")


def test_without_labels_any_folder_will_do(tmp_path: Path) -> None:
    for name in ("x.png", "some/where/y.png", "0/z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "empty").mkdir()
    found = open_data(tmp_path, labels=False)
    assert [found.name(i) for i in range(len(found))] == ["0/z.png", "some/where/y.png", "x.png"]
    assert found.classes == ()
    assert len(open_data(toy_folder(tmp_path / "toy"), labels=False)) == 21  # the validation pictures


# As it is typed ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with names for its classes that always answers `class1`."""
    model = attendless.convert(toy_vit(), "full")
    model.head.bias.data[1] = 100
    model.pretrained_cfg = {"label_names": ("class0", "class1", "class2"), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    attendless.save(model, path)
    return path


def evaluated(model: Path, folder: Path, *words: str) -> dict:
    out = folder.parent / "rows.json"
    assert main(["eval", str(model), "--data", str(folder), "--workers", "0", "--json", str(out), *words]) == 0
    return json.loads(out.read_text())["rows"][0]


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / name / "x.png")
    return folder


def test_a_part_of_the_classes_is_enough(trained: Path, tmp_path: Path) -> None:
    row = evaluated(trained, pictures(tmp_path / "a", "class1", "class2"))
    assert (row["labels"], row["top1"]) == ("by name", 50)
    assert evaluated(trained, pictures(tmp_path / "b", "class1"))["top1"] == 100  # alone, it is not class 0
    row = evaluated(trained, pictures(tmp_path / "c", "0", "1"))  # without the highest
    assert (row["labels"], row["top1"]) == ("by index", 50)


def test_renamed_folders_are_an_error(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many folders as classes, under other names: they printed an accuracy, and it meant nothing."""
    folder = pictures(tmp_path / "a", "uno", "dos", "tres")
    with pytest.raises(SystemExit) as left:
        main(["eval", str(trained), "--data", str(folder), "--workers", "0"])
    assert left.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "'dos', 'tres', 'uno' are not among the classes of the model: 'class0', 'class1', 'class2'" in said
    assert "\n" not in said
    row = evaluated(trained, folder, "--no-labels")
    assert (row["labels"], row["top1"], row["images"], row["agreement"]) == ("none", None, 3, 1)


def test_the_order_is_taken_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attendless.save(attendless.convert(toy_vit(), "full"), tmp_path / "m.safetensors")
    row = evaluated(tmp_path / "m.safetensors", pictures(tmp_path / "a", "uno", "dos", "tres"))
    assert row["labels"] == "in sorted order"
    assert "stores no class names: folders were matched to its classes in sorted order" in capsys.readouterr().out
