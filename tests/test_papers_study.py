"""Studies: they resume, pair by seed, say what has run, and their pages are made from their results."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from attendless import UserError
from attendless.train.process import only_run
from attendless_cli.main import main
from attendless_lab.papers import study as studying
from attendless_lab.papers import study_page
from attendless_lab.papers.study import (
    Entry,
    Part,
    Study,
    carry_out,
    gather,
    summarise,
)

MODEL = "columnar_micro_patch4_32"
TINY = Study(
    "bbvit",
    "bbvit-2",
    (
        Part("first", (Entry("ViT", MODEL, "full"), Entry("windows", MODEL, "window:size=4", "ViT"))),
        Part("second", (Entry("again", MODEL, "full"), Entry("axial", MODEL, "axial", "again"))),
    ),
    recipe="quick:epochs=1,batch=4,size=32,eval_every=1,warmup=0",
    side=36,
    every=2,
    seeds=(0, 1),
)


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draws = tmp_path_factory.mktemp("pictures"), random.Random(0)
    for split, count in (("train", 8), ("val", 3)):
        for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                shade = tuple(min(255, c + draws.randrange(40)) for c in colour)
                Image.new("RGB", (48, 40), shade).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def done(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A study that was cut short before its first run, then carried out."""
    out, said = tmp_path_factory.mktemp("out"), list[str]()
    carry_out(TINY, str(pictures), out, minutes=-1, say=said.append)
    assert said[-1] == "the time limit is reached; the same command continues"
    assert not any(row["runs"] for row in gather(TINY, out)["rows"])
    carry_out(TINY, str(pictures), out, say=said.append)
    return out, said


@pytest.mark.slow
def test_what_is_done_is_not_done_again(done: tuple[Path, list[str]], pictures: Path) -> None:
    out, said = done
    # Full attention stands in both parts and is trained once: three models, two seeds.
    assert "bbvit: 6 of 6 runs to do" in said
    ended = [line for line in said if "after" in line]
    assert [line.partition(" (")[0] for line in ended] == [
        *("1/6 ViT", "2/6 windows", "3/6 ViT", "4/6 windows"),
        *("5/6 axial", "6/6 axial"),
    ]
    more: list[str] = []
    carry_out(TINY, str(pictures), out, say=more.append)
    assert more == ["bbvit: 0 of 6 runs to do"]


@pytest.mark.slow
def test_what_another_process_is_at_is_left_to_it(pictures: Path, tmp_path: Path) -> None:
    entry = TINY.parts[0].entries[0]
    claim = tmp_path / "claims" / TINY.variant(entry, tmp_path).folder / "seed-0"
    said: list[str] = []
    with only_run(claim):
        carry_out(TINY, str(pictures), tmp_path, say=said.append)
    ended = [line.partition(" (")[0] for line in said if "after" in line]
    assert ended == ["2/6 windows", "3/6 ViT", "4/6 windows", "5/6 axial", "6/6 axial"]
    assert said[-1].endswith("belong to another process; if it has ended, the same command continues")
    carry_out(TINY, str(pictures), tmp_path, say=said.append)
    assert [line for line in said if "after" in line][-1].startswith("1/1 ViT")


@pytest.mark.slow
def test_pictures_are_few_and_small(done: tuple[Path, list[str]]) -> None:
    made = done[0] / "pictures"
    assert json.loads((made / "made.json").read_text()) == {"train": 8, "val": 6}
    assert {size_of(path) for path in made.rglob("*.png")} == {(36, 36)}


@pytest.mark.slow
def test_a_run_gives_the_same_number_again(done: tuple[Path, list[str]], pictures: Path, tmp_path: Path) -> None:
    carry_out(TINY, str(pictures), tmp_path)
    numbers = [
        [[(run["seed"], run["top1"]) for run in row["runs"]] for row in gather(TINY, out)["rows"]]
        for out in (done[0], tmp_path)
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_the_page_says_what_has_run(done: tuple[Path, list[str]], tmp_path: Path) -> None:
    found = gather(TINY, done[0])
    assert "**6 of 6 runs are done.**" in study_page.page(found)
    assert str(done[0]) not in json.dumps(found), "results go into the repository: no folder of this machine"
    found["rows"][1]["runs"] = []
    page = study_page.page(found)
    assert "**4 of 6 runs are done.**" in page
    assert "| windows | `window:size=4` |" in page
    assert "not run yet" in page
    study_page.draw(found, tmp_path / "figure.png")
    assert size_of(tmp_path / "figure.png")[0] > 400


def rows(**runs: list[float]) -> list[dict[str, Any]]:
    return [
        {"part": "p", "row": name, "against": "base", "runs": [{"seed": i, "top1": v} for i, v in enumerate(values)]}
        for name, values in runs.items()
    ]


def test_differences_are_paired_by_seed() -> None:
    """By hand: 3, 5 and 4 points over the base; mean 4, deviation 1, 95 % of t with two degrees 4.303 / √3."""
    table = rows(base=[50.0, 40.0, 60.0], sparse=[53.0, 45.0, 64.0])
    found = summarise(table[1], table)
    assert (found.runs, found.difference) == (3, pytest.approx(4.0))
    assert found.reach == pytest.approx(4.303 / 3**0.5)
    assert found.verdict == "better"
    assert found.mean == pytest.approx(54.0)
    noisy = rows(base=[50.0, 40.0, 60.0], sparse=[53.0, 35.0, 64.0])
    assert summarise(noisy[1], noisy).verdict == "not significant"
    worse = rows(base=[50.0, 40.0], sparse=[45.0, 35.1])
    assert summarise(worse[1], worse).verdict == "worse"


def test_one_run_has_no_interval() -> None:
    table = rows(base=[50.0, 40.0], sparse=[53.0])
    found = summarise(table[1], table)
    assert (found.difference, found.reach, found.verdict, found.deviation) == (3.0, None, "–", None)
    assert summarise(rows(base=[], sparse=[1.0])[1], rows(base=[], sparse=[1.0])).difference is None


def test_pictures_without_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / "one.png")
    with pytest.raises(UserError, match="without labels"):
        carry_out(TINY, str(tmp_path / "pictures"), tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lavit-2", "--scale", "small"], "bbvit-2"),
        (["--scale", "small"], "bbvit-2"),
        (["bbvit-2", "--out", "somewhere"], "--scale small"),
        (["bbvit-2", "--scale", "small", "--data", "somewhere"], "--out DIR"),
        (["bbvit-2", "--scale", "small", "--results", "nowhere.json"], "cannot be read"),
    ],
)
def test_refusals_say_what_is_possible(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["papers", *words])
    assert says in capsys.readouterr().err


def test_results_of_another_study_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"study": "fair-comparison"}')
    with pytest.raises(SystemExit, match="2"):
        main(["papers", "bbvit-2", "--scale", "small", "--results", str(tmp_path / "other.json")])
    assert "holds the study 'fair-comparison', expected 'bbvit'" in capsys.readouterr().err


def test_the_command_prints_a_page_and_draws(
    done: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gather(TINY, done[0])
    studying.write(found, tmp_path / "found.json")
    words = ["--results", str(tmp_path / "found.json"), "--figure", str(tmp_path / "rows.png")]
    assert main(["papers", "bbvit-2", "--scale", "small", *words, "--json", str(tmp_path / "again.json")]) == 0
    assert capsys.readouterr().out == study_page.page(found)
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads((tmp_path / "found.json").read_text())
    assert size_of(tmp_path / "rows.png")[0] > 400


@pytest.mark.parametrize("table", ["bbvit-2", "fair-comparison"])
def test_every_row_is_compared_with_one_of_its_part(table: str) -> None:
    asked = studying.study(table)
    assert len(asked.seeds) >= 3
    for part in asked.parts:
        names = [entry.row for entry in part.entries]
        assert len(names) == len(set(names))
        assert {entry.against for entry in part.entries} <= {*names, ""}
