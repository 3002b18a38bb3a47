"""The demo: both stories in one report, nothing done twice, and a headline that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attendless.data import open_data
from attendless.errors import UserError
from attendless_cli.main import COMMANDS, FIRST, main
from attendless_lab.compare import conversion, schedule
from attendless_lab.compare import demo as package
from attendless_lab.compare.conversion import Asked, headline
from attendless_lab.compare.demo import demo
from attendless_lab.compare.run import run
from attendless_lab.compare.variants import ATTENTIONS, DATA, PICTURES, SEEDS

SMALL = {"seeds": (0,), "data": "scenes:train=96,val=40", "epochs": 1, "batch": 32, "factors": (1,), "budget": 0.05}
ASKED = Asked(size=64, data="scenes:size=64,val=12", budget=0.3, shown=1)
ROW = {
    "attention": "foveal:keep=0.1", "speedup": 2.63, "distinguishable": True, "tokens": 2304, "difference": -0.17,
    "difference_ci": (-0.64, 0.31), "verdict": "not distinguishable from the baseline (1.01×, IQR 0.99–1.03)",
}  # fmt: skip


def here(jobs):
    """Carry out the runs in this process, which costs no start of another."""
    for job in jobs:
        yield run(job)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, package.Demo, list[str]]:
    out, said = tmp_path_factory.mktemp("demo"), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "local", lambda count: here)
        found = demo(out, asked=ASKED, attentions=["full", "efficient"], jobs=1, say=said.append, **SMALL)
    return out, found, said


@pytest.mark.slow
def test_the_report_opens_with_what_was_converted(made) -> None:
    out, found, _ = made
    row = found.conversion
    assert (row["tokens"], row["images"], row["trained_at"]) == (256, 12, [32, 32])
    assert row["peak_memory_mb"] > 0 < row["dense_peak_memory_mb"]
    assert row["quartiles"][0] <= row["speedup"] <= row["quartiles"][1]
    assert 0 < row["shown"][0]["share"] <= 1
    text = (out / "report.html").read_text()
    assert json.dumps(row["headline"])[1:-1] in text
    assert row["shown"][0]["sharp"] in text


@pytest.mark.slow
def test_what_is_done_is_not_done_again(made, monkeypatch) -> None:
    out, found, _ = made
    monkeypatch.setattr(package, "convert_and_measure", lambda *a: pytest.fail("a measurement"))
    monkeypatch.setattr(schedule, "local", lambda count: lambda jobs: iter([pytest.fail("a run")] if jobs else []))
    again = demo(out, asked=ASKED, attentions=["full", "efficient"], **SMALL)
    assert again.conversion == json.loads(json.dumps(found.conversion))
    assert again.comparison.rows == found.comparison.rows


@pytest.mark.slow
def test_answers_are_the_same_every_time(made) -> None:
    out, found, _ = made
    weights = package._trained(found.comparison)
    assert weights.is_file()
    assert out in weights.parents
    kept = ("top1", "dense_top1", "agreement", "difference")
    quiet = package.silent
    again = conversion.convert_and_measure(weights, ASKED, lambda text: None, quiet)
    assert {name: again[name] for name in kept} == {name: found.conversion[name] for name in kept}


@pytest.mark.slow
def test_it_says_first_how_long_the_runs_take(made) -> None:
    *_, said = made
    assert said[0].startswith("1.")
    assert "about" in said[1]
    assert said[1].startswith("2 runs, 1 at a time")


FASTER, INTERVAL = "foveal: 2.6× faster at 2,304 tokens", "(−0.6 to +0.3), no training"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, f"{FASTER}, accuracy drop 0.2 points {INTERVAL}"),
        ({"difference": 0.4}, f"{FASTER}, accuracy gain 0.4 points {INTERVAL}"),
        ({"difference": 0.0}, f"{FASTER}, no accuracy drop {INTERVAL}"),
        (
            {"distinguishable": False},
            "foveal: not distinguishable from the baseline (1.01×, IQR 0.99–1.03) at 2,304 tokens, "
            f"accuracy drop 0.2 points {INTERVAL}",
        ),
    ],
)
def test_the_headline(changes: dict, says: str) -> None:
    assert headline(ROW | changes) == says


@pytest.mark.slow
def test_without_full_attention_there_is_nothing_to_convert(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(schedule, "local", lambda count: here)
    with pytest.raises(UserError, match="compare `full` too"):
        demo(tmp_path, attentions=["efficient"], jobs=1, **SMALL)


def test_the_defaults_are_two_seeds_of_pictures_one_of_them_larger() -> None:
    assert len(SEEDS) >= 2
    assert "full" in ATTENTIONS
    assert DATA.startswith(PICTURES)
    assert open_data(Asked().data, "val")[0][0].size == (192, 192)


def test_attendless_alone_greets_with_five_commands(capsys) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert len(FIRST) == 5
    for question, command, answer in FIRST:
        assert f"{question}\n  attendless {command}\n  {answer}\n" in said
        assert command.split()[0] in COMMANDS
