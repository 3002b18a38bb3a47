"""The fair comparison: same start, same pictures, nothing done twice, and kills change nothing."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attendless.attention import attentions, named
from attendless.errors import UserError
from attendless_lab.compare import compare, comparison, cost, schedule
from attendless_lab.compare.build import build
from attendless_lab.compare.results import (
    headline,
    latex,
    markdown,
    on_one_clock,
    table,
)
from attendless_lab.compare.run import Job, Outcome, run
from attendless_lab.compare.variants import (
    ATTENTIONS,
    MODEL,
    RECIPE,
    combinations,
    recall,
)

#: The smallest comparison that has everything in it.
SMALL = {"data": "scenes:train=96,val=40", "epochs": 2, "batch": 32, "factors": (1,), "budget": 0.05}
TIMES = ("latency", "speedup", "spread", "quartiles", "pairs", "distinguishable", "throughput", "best_batch", "verdict")


def variants(*attentions: str, model: str = MODEL, **fields):
    return combinations([model], attentions, [None], ["scenes"], ["scenes"], fields)


def test_a_plan_is_the_product_of_its_lists_each_once() -> None:
    found = combinations(["a", "b"], ["full", "xca", "full"], [4, 8], ["scenes"], ["quick", "quick:epochs=5"], {})
    assert len(found) == 2 * 2 * 2 * 2
    assert len({c.folder for c in found}) == len(found)
    assert {c.setting.recipe.epochs for c in found} == {20, 5}


def test_a_folder_is_named_by_what_stands_in_it() -> None:
    (one,), (same,), (other,) = (variants("full", lr=lr) for lr in (1e-3, 1e-3, 2e-3))
    assert one.folder == same.folder != other.folder
    assert variants("foveal:keep=0.1")[0].folder != variants("foveal:keep=0.2")[0].folder
    assert comparison.Variant.from_dict(json.loads(json.dumps(one.as_dict()))) == one


@pytest.mark.parametrize("model", [MODEL, "vit_tiny_patch16_224", "pyramid_pvt_v2_b0"])
def test_shared_weights_start_the_same(model: str) -> None:
    size = {} if model == MODEL else {"size": (64,)}
    models = {
        c.attention: build(c, 10, seed=3).state_dict()
        for c in variants("full", "linformer", "xca", model=model, **size)
    }
    full = models.pop("full")
    for state in models.values():
        shared = [name for name in full if name in state and state[name].shape == full[name].shape]
        assert len(shared) > 0.8 * len(full)
        assert all(torch.equal(full[name], state[name]) for name in shared)
    assert not torch.equal(
        full["head.weight"], build(variants("full", model=model, **size)[0], 10, seed=4).state_dict()["head.weight"]
    )


def test_all_stands_for_every_mechanism() -> None:
    found = [variant.attention for variant in variants("all", "full", "xca:lpi")]
    assert len(found) == len(set(found)) == len(attentions()) + 1
    assert {spec.name for text in found for spec in named(text)} == set(attentions())


def test_all_skips_what_the_model_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_full(variant, classes):
        if variant.attention != "full":
            raise UserError("does not fit")
        return build(variant, classes)

    monkeypatch.setattr(comparison.build, "build", only_full)
    said: list[str] = []
    _, remaining = comparison.check(variants("all"), required=["all"], say=said.append)
    assert [variant.attention for variant in remaining] == ["full"]
    assert "xca is skipped: does not fit" in said
    with pytest.raises(UserError, match="does not fit"):
        comparison.check(variants("all", "xca"), required=["all", "xca"], say=said.append)


def test_patch_and_image_size_reach_the_model() -> None:
    (found,) = combinations(["vit_tiny_patch16_224"], ["full"], [8], ["scenes"], ["scenes"], {"size": (32, 64)})
    grid = build(found, 10).grid()
    assert (grid.height, grid.width) == (4, 8)


def test_the_defaults_are_one_of_every_kind_and_can_be_built() -> None:
    found = variants(*ATTENTIONS)
    assert len(found) >= 6
    models = [build(c, 10) for c in found]
    assert {len(list(m.blocks)) for m in models} == {3}
    assert all(sum(p.numel() for p in m.parameters()) < 500_000 for m in models)


def here(jobs):
    """Carry out the runs in this process, which costs no start of another."""
    for job in jobs:
        yield run(job)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small")
    compare(attentions=["full", "efficient"], seeds=(0, 1), out=out, command="attendless compare …", jobs=1, **SMALL)
    return out


def rows_of(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["rows"]


def test_a_row_holds_accuracy_and_every_cost(small: Path) -> None:
    rows = rows_of(small)
    assert [row["attention"] for row in rows] == ["full", "efficient"]
    for row in rows:
        assert row["seeds"] == [0, 1]
        tops = [run["top1"] for run in row["runs"]]
        assert row["top1_mean"] == pytest.approx(sum(tops) / 2)
        assert row["top1_std"] == pytest.approx(abs(tops[0] - tops[1]) / 2**0.5)
        assert row["macs"]["total"] == sum(row["macs"][part] for part in ("core", "projections", "mlp", "other"))
        assert min(row["latency_ms"], row["dense_latency_ms"], row["speedup"], row["peak_memory_mb"]) > 0
        assert row["images"] == 40
    assert rows[0]["macs"]["core"] > rows[1]["macs"]["core"]


def test_every_run_left_its_weights_and_metrics(small: Path) -> None:
    for row in rows_of(small):
        for found in row["runs"]:
            names = {path.name for path in (small / found["folder"]).iterdir()}
            assert {"last.safetensors", "best.safetensors", "metrics.jsonl", "result.json", "log.txt"} <= names


def test_the_table_in_every_format(small: Path) -> None:
    rows = rows_of(small)
    names, cells = table(rows)
    assert len(cells) == 2
    assert all(len(line) == len(names) for line in cells)
    assert markdown(rows).count("\n") == 4
    assert r"\%" in latex(rows)
    assert " ± " not in latex(rows)
    with open(small / "results.csv") as file:
        found = list(csv.DictReader(file))
    assert [float(line["top1_mean"]) for line in found] == [row["top1_mean"] for row in rows]
    assert [int(line["macs_total"]) for line in found] == [row["macs"]["total"] for row in rows]
    assert "attendless compare …" in (small / "results.md").read_text()


def test_another_attention_adds_its_row_and_redoes_nothing(small: Path, monkeypatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*.safetensors")}
    costs = {path: path.read_bytes() for path in small.rglob("cost.json")}
    monkeypatch.setattr(schedule, "local", lambda count: here)
    monkeypatch.setattr(cost, "peaks", lambda models, *a, **k: [1.0] * len(models))
    compare(attentions=["xca"], seeds=(0, 1), out=small, command="attendless compare --attention xca", **SMALL)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path: path.read_bytes() for path in costs} == costs
    rows = rows_of(small)
    assert [row["attention"] for row in rows] == ["full", "efficient", "xca"]
    assert rows[2]["seeds"] == [0, 1]
    variants_, commands = recall(small)
    assert len(variants_) == 3
    assert len(commands) == 2
    # Nothing is left to do: neither a run nor a measurement is started.
    monkeypatch.setattr(schedule, "local", lambda count: lambda jobs: iter([pytest.fail("a run")] if jobs else []))
    monkeypatch.setattr(cost, "measure", lambda *a, **k: pytest.fail("a measurement"))
    again = compare(attentions=["full", "efficient", "xca"], seeds=(0, 1), out=small, **SMALL)
    assert again.rows == rows


def test_the_headline_names_the_best_and_the_fastest(small: Path) -> None:
    rows = [
        {"setting": "s", "attention": name, "top1_mean": top1, "curve": [{"speedup": speedup, "tokens": 2304}]}
        for name, top1, speedup in (("full", 91.0, 1.0), ("foveal", 92.5, 2.9), ("window", 11.0, 3.8))
    ]
    assert headline(rows) == (
        "trained under identical conditions, foveal has the highest top-1, 92.5 %, and window the lowest, 11.0 %; at "
        "2,304 tokens window is the fastest, 3.8× as fast as the baseline, with 11.0 %"
    )
    assert headline(rows[:1]) == ""
    assert headline(rows_of(small)).startswith("trained under identical conditions")


def test_times_of_different_days_meet_on_one_clock() -> None:
    slow = {"speedup": 2.0, "latency_ms": 10.0, "dense_latency_ms": 20.0}
    quick = {"speedup": 4.0, "latency_ms": 1.0, "dense_latency_ms": 4.0}
    on_one_clock([slow, quick])
    assert [slow["ms"], quick["ms"]] == [6.0, 3.0]


def test_a_mistake_shows_before_anything_is_trained(tmp_path: Path) -> None:
    for wrong, text in (
        ({"attentions": ["full", "fovael"]}, "foveal"),
        ({"models": "deit_tinny"}, "unknown model"),
        ({"data": str(tmp_path / "none")}, "none"),
        ({"recipes": "slow"}, "unknown recipe"),
        ({"attentions": []}, "at least one"),
        ({"seeds": ()}, "seed"),
    ):
        with pytest.raises(UserError, match=text):
            compare(**{"attentions": ["full"], **wrong}, out=tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.safetensors")) if (tmp_path / "out").exists() else True


def test_a_run_that_fails_leaves_the_others_standing(tmp_path: Path, monkeypatch) -> None:
    def failing(jobs):
        for job in jobs:
            yield Outcome(job, None, "the loss became nan") if job.variant.attention == "xca" else run(job)

    monkeypatch.setattr(schedule, "local", lambda count: failing)
    monkeypatch.setattr(cost, "measure", lambda *a, **k: None)
    found = compare(attentions=["full", "xca"], seeds=(0,), out=tmp_path, **SMALL)
    assert [row["failed"] for row in found.rows] == [None, "the loss became nan"]
    assert found.rows[0]["top1_mean"] is not None
    assert found.rows[1]["top1_mean"] is None
    assert markdown(found.rows).endswith("\nxca failed: the loss became nan\n")
    assert "xca failed: the loss became nan" in str(found)
    for suffix in ("json", "csv", "md", "tex"):
        assert "the loss became nan" in (tmp_path / f"results.{suffix}").read_text(), suffix


def test_the_command_line_prints_why_a_run_failed(tmp_path: Path, monkeypatch, capsys) -> None:
    from attendless_cli.main import main

    def failing(jobs):
        yield from (Outcome(job, None, "the loss became nan") for job in jobs)

    monkeypatch.setattr(schedule, "local", lambda count: failing)
    monkeypatch.setattr(cost, "measure", lambda *a, **k: None)
    words = ["--attention", "xca", "--data", SMALL["data"], "--out", str(tmp_path), "--json", str(tmp_path / "c.json")]
    assert main(["compare", *words]) == 1
    assert "xca failed: the loss became nan" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["rows"][0]["failed"] == "the loss became nan"


def test_a_run_that_breaks_gives_its_reason_and_its_traceback(tmp_path: Path, monkeypatch) -> None:
    from attendless.attention.xca import XCA

    def breaks(*arguments, **more):
        raise RuntimeError("shapes cannot be multiplied")

    (variant,) = combinations([MODEL], ["xca"], [None], [SMALL["data"]], ["scenes"], {"epochs": 1})
    monkeypatch.setattr(XCA, "forward", breaks)
    outcome = run(Job(variant, 0, str(tmp_path / "run")))
    assert outcome.result is None
    assert outcome.reason.startswith("RuntimeError: shapes cannot be multiplied (see ")
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "faster"),
        ({"speedup": 0.8}, "slower"),
        ({"distinguishable": False}, "not distinguishable"),
        ({"distinguishable": False, "pairs": 7}, "too few rounds"),
    ],
)
def test_the_table_says_what_the_ratios_allow(small: Path, changes: dict, says: str) -> None:
    known = {"speedup": 1.3, "distinguishable": True, "pairs": 25, "quartiles": [1.254, 1.31]}
    row = rows_of(small)[0]
    names, (cells,) = table([row | {"curve": [row["curve"][0] | known | changes]}])
    found = dict(zip(names, cells, strict=True))
    assert found["against baseline"] == says
    assert found["quartiles"] == "1.25–1.31"


def test_runs_do_not_depend_on_who_carries_them_out(small: Path, tmp_path: Path) -> None:
    row = rows_of(small)[0]
    (found,) = combinations([MODEL], ["full"], [None], [SMALL["data"]], [RECIPE], {"epochs": 2, "batch": 32})
    alone = run(Job(found, 1, str(tmp_path / "alone"))).result
    assert {k: v for k, v in alone.items() if k != "seconds"} == {
        k: v for k, v in row["runs"][1].items() if k not in ("seconds", "folder")
    }


def timeless(rows: list[dict]) -> list[dict]:
    """Rows without what a clock or a memory gauge said."""
    drop = (*TIMES, "ms", "dense_", "peak_", "seconds", "curve", "notes")
    return [
        {k: timeless(v) if k == "runs" else v for k, v in row.items() if not any(k.startswith(d) for d in drop)}
        for row in rows
    ]


@pytest.mark.slow
def test_five_kills(tmp_path: Path) -> None:
    """kill -9 of the comparison at five random moments: the results of one that was left alone, timings aside."""
    draw = random.Random(int.from_bytes(os.urandom(4), "little"))
    words = "compare --attention full efficient window:size=4 --seed 0 1 --data scenes:train=1600,val=100 --epochs 3 "
    words += "--larger --budget 0.1 --jobs 2 --out"

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "attendless", *words.split(), str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    began = time.monotonic()
    plain = start(tmp_path / "plain")
    said = plain.communicate()[0]
    assert plain.returncode == 0, said
    took = time.monotonic() - began
    for _ in range(5):
        process = start(tmp_path / "killed")
        time.sleep(draw.uniform(0.05, 0.3) * took)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(1)
    last = start(tmp_path / "killed")
    said = last.communicate()[0]
    assert last.returncode == 0, said
    assert timeless(rows_of(tmp_path / "killed")) == timeless(rows_of(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_ray_cluster_gives_the_same_results(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'attendless[cluster]'")
    words = [
        "compare",
        "--attention",
        "full",
        "efficient",
        "--seed",
        "0",
        "1",
        "--data",
        SMALL["data"],
        "--epochs",
        "2",
    ]
    words += ["--batch", "32", "--larger", "--budget", "0.05", "--ray", "local", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "attendless", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert timeless(rows_of(tmp_path)) == timeless(rows_of(small)[:2])
