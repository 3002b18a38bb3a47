"""A row says what was measured: what stands there, what was asked for, and what stayed full; a file is as it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from attendless.attention import Macs
from attendless.convert import convert, load, save
from attendless.errors import UserError
from attendless.measure import bench as bench_module
from attendless.measure import timing
from attendless.measure.bench import Conditions, bench, bench_rows
from attendless.measure.measurement import Measurement
from attendless.measure.memory import _resolve
from attendless.measure.memory_check import bytes_per_image, check_room, told_if_full
from attendless.measure.subject import Subject, attention_of, named
from attendless_cli.main import main

NAME = "columnar_micro_patch4_32"
#: More averages than the 65 tokens there are: at 32 px this never pays.
WASTE = "linformer:keys=65"
QUICK = {"budget": 0.01, "memory": False, "throughput": False, "parts": False}


def rows(model: object, *attentions: str, **opening: object) -> list[Measurement]:
    return list(bench_rows(str(model), attentions, [], Conditions(**QUICK), **opening))


def built_again(subject: Subject) -> nn.Module:
    """What the process that measures memory builds, from nothing but JSON."""
    return _resolve(subject.build)(**json.loads(json.dumps(dict(subject.arguments)))).eval()


@pytest.fixture
def wasteful(tmp_path: Path) -> Path:
    """A file with an attention that does not pay."""
    path = tmp_path / "wasteful.safetensors"
    save(convert(timm.create_model(NAME), WASTE, below_breakeven="keep"), path)
    return path


# Names: break-even, and it is said -----------------------------------------------------------------------------------


def test_what_was_left_full_is_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    timings: list[int] = []
    real = timing.interleave
    monkeypatch.setattr(timing, "interleave", lambda calls, **how: (timings.append(len(calls)), real(calls, **how))[1])
    depth = len(timm.create_model(NAME).blocks)
    plain, left, kept = rows(NAME, "full", WASTE, "window:size=4")
    assert (plain.setup.attention, plain.setup.asked, plain.setup.left_full, plain.label) == ("full", "full", 0, "full")
    assert (left.setup.attention, left.setup.asked, left.setup.left_full) == ("full", WASTE, depth)
    assert left.label == f"full (asked {WASTE}; {depth} of {depth} layers left full at 32 px)"
    assert left.label in str(left)
    assert {"asked": WASTE, "attention": "full", "left_full": depth}.items() <= left.as_dict().items()
    assert kept.label == kept.setup.attention == kept.setup.asked == "window:size=4"
    # One model under two names is one contestant: the dense one, full and window interleave.
    assert timings == [3]
    assert f"{WASTE} gave the same model as full: timed once" in left.notes
    assert left.latency_ms == plain.latency_ms


def test_some_layers_left_full_are_counted() -> None:
    depth = len(timm.create_model(NAME).blocks)
    (row,) = rows(NAME, f"window:size=4/{depth - 1}x{WASTE}")
    assert row.setup.attention == f"window:size=4/{depth - 1}xfull"
    assert row.setup.left == f"{depth - 1} of {depth} layers left full at 32 px"
    (kept,) = rows(NAME, WASTE, below_breakeven="keep")
    assert (kept.setup.attention, kept.setup.left_full, kept.label) == (WASTE, 0, WASTE)


def test_layers_of_timms_own_are_left_as_they_were() -> None:
    """PVT's attention is not full, so what stays there is not called that."""
    subject = named("pvt_v2_b0", "full", size=64)
    assert (subject.attention, subject.asked) == ("timm's Attention", "full")
    assert subject.left().words == "8 of 8 layers left as they were at 64 px"


def test_the_table_says_it_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", NAME, "--attention", WASTE, "--quick", "--budget", "0.01", "--json", str(out)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("maximum speed-up at 32 px: ")
    assert f"full (asked {WASTE};" in printed
    assert "the weights are random" in printed
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["attention"], row["asked"]) == ("full", WASTE)


# Files: as they are --------------------------------------------------------------------------------------------------


def test_a_file_is_measured_as_it_is(wasteful: Path) -> None:
    (row,) = rows(wasteful)
    assert (row.setup.attention, row.setup.asked, row.setup.left_full, row.label) == (WASTE, None, 0, WASTE)
    (asked,) = rows(wasteful, "linformer:keys=70")
    assert (asked.setup.attention, asked.setup.left_full) == ("linformer:keys=70", 0)


@torch.no_grad()
def test_another_process_builds_the_very_same(wasteful: Path) -> None:
    images = torch.randn(1, 3, 32, 32)
    subject = named(str(wasteful))
    assert torch.equal(built_again(subject)(images), load(wasteful)(images))
    depth = len(timm.create_model(NAME).blocks)
    left = named(NAME, f"window:size=4/{depth - 1}x{WASTE}")
    assert attention_of(built_again(left)) == left.attention != left.asked


@torch.no_grad()
def test_by_name_and_from_its_file_it_is_the_same_function(tmp_path: Path) -> None:
    weights, file = tmp_path / "weights.safetensors", tmp_path / "converted.safetensors"
    save(timm.create_model(NAME), weights)
    words = ["convert", NAME, "--weights", str(weights), "--attention", "foveal:keep=0.1", "--size", "64"]
    assert main([*words, "--below-breakeven", "keep", "--out", str(file)]) == 0
    opening = {"weights": str(weights), "size": (64, 64), "below_breakeven": "keep"}
    by_name, from_file = named(NAME, "foveal:keep=0.1", **opening), named(str(file))
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(by_name.model(images), from_file.model(images))
    assert by_name.attention == from_file.attention == "foveal:keep=0.1"


# What comes first, and what is refused -------------------------------------------------------------------------------


def test_the_cap_is_told_before_anything_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting may measure costs for seconds."""
    done: list[object] = []
    real = bench_module.named
    monkeypatch.setattr(bench_module, "named", lambda *a, **k: (done.append(a[1:]), real(*a, **k))[1])
    how = Conditions(**QUICK, announce=lambda size, macs: done.append(macs))
    list(bench_rows(NAME, ["window:size=4"], [], how))
    assert [type(thing) for thing in done] == [tuple, Macs, tuple]
    assert done[::2] == [(), ("window:size=4", None)]


def test_where_there_is_no_formula_the_cap_comes_later(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pvt_v2_b0", "--size", "64", "--quick", "--budget", "0.01"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("maximum speed-up at 64 px: no formula exists for this model")
    assert "× by MACs" in second


def test_how_long_it_takes_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = Conditions(budget=10)
    assert how.seconds(2, sizes=3) == 3 * (20 + 3 * (6 + 10 + 5))
    real = timing.interleave
    monkeypatch.setattr(timing, "interleave", lambda calls, **how: real(calls, **{**how, "budget": 0.01}))
    assert main(["bench", NAME, "--attention", "full", "axial", "--quick", "--budget", "40"]) == 0
    assert capsys.readouterr().err.startswith("this takes up to about 1 min 20 s")


def broken(model: nn.Module) -> nn.Module:
    """Every weight is a number, and no answer is one."""
    nn.init.constant_(model.head.weight, 1e38)
    nn.init.constant_(model.norm.bias, 1e10)
    return model


def test_answers_that_are_no_numbers_are_not_measured() -> None:
    model = timm.create_model(NAME)
    with pytest.raises(UserError, match=r"window:size=4 at 32 px cannot be measured: its output holds NaN or infinity"):
        bench(convert(broken(model), "window:size=4", below_breakeven="keep"), like=timm.create_model(NAME), **QUICK)


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    # 32 × 32 × 3 pixels; 5 tokens of 768 into and out of the MLP's middle, beside 192 in the residual stream, twice.
    assert bytes_per_image(model, (32, 32)) == 4 * (3 * 32 * 32 + 5 * 2 * (768 + 192))
    check_room(model, (32, 32), 10, left=10 * bytes_per_image(model, (32, 32)))
    with pytest.raises(UserError, match=r"batch 11 at 32 px takes about .* GB .* expected a batch of at most 10$"):
        check_room(model, (32, 32), 11, left=10 * bytes_per_image(model, (32, 32)))


def test_a_batch_that_no_machine_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", NAME, "--batch", str(10**9 - 1)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a batch of at most" in line


def test_a_full_memory_ends_it_before_this_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -9, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: killed)
    model = convert(timm.create_model(NAME), "full")
    with pytest.raises(UserError, match="batch 3 at 32 px does not fit: its process ran out of memory"):
        bench(model, like=timm.create_model(NAME), batch=3, **{**QUICK, "memory": True})


def test_an_allocator_that_gives_up_is_one_line() -> None:
    with pytest.raises(UserError, match="batch 7 at 32 px does not fit"), told_if_full((32, 32), 7):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="something else"), told_if_full((32, 32), 7):
        raise RuntimeError("something else")


@pytest.mark.parametrize("budget", ["nan", "inf", "0", "-1"])
def test_a_budget_that_is_none(budget: str) -> None:
    with pytest.raises(UserError, match="budget of more than 0 seconds"):
        Conditions(budget=float(budget))
