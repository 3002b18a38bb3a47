"""A new user's path, from a model's name to a saved file, and that its numbers are of one mind.

info NAME → bench NAME → eval NAME → tune NAME → convert → bench FILE → eval FILE
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from attendless_cli.main import main

MODEL, SPEC, SIZE = "deit_tiny_patch16_224", "foveal:keep=0.1", "160"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every step's JSON, the steps taken one after the other in one folder."""
    here = tmp_path_factory.mktemp("user")
    torch.manual_seed(0)
    save_file(timm.create_model(MODEL, num_classes=10).state_dict(), here / "w.safetensors")
    draws = np.random.default_rng(0)
    for label in range(10):
        (here / "photos" / str(label)).mkdir(parents=True)
        for i in range(2):
            coarse = Image.fromarray(draws.integers(0, 255, (6, 6, 3), dtype=np.uint8))
            coarse.resize((180, 180)).save(here / "photos" / str(label) / f"{i}.jpg")
    given = [MODEL, "--weights", str(here / "w.safetensors"), "--size", SIZE]
    photos, fast = ["--data", str(here / "photos")], str(here / "fast.safetensors")
    clock = ["--threads", "1", "--budget", "2"]
    steps = {
        "info": ["info", *given, "--attention", "full", SPEC],
        "bench": ["bench", *given, "--attention", SPEC, "--below-breakeven", "keep", "--quick", *clock],
        "eval": ["eval", *given, *photos, "--attention", "full", SPEC, "--workers", "0"],
        "tune": ["tune", *given, *photos, "--tokens", "none", "--rates", "0.1", *clock],
        "convert": ["convert", *given, "--attention", SPEC, "--below-breakeven", "keep", "--out", fast],
        "bench FILE": ["bench", fast, "--quick", *clock],
        "eval FILE": ["eval", fast, *photos, "--workers", "0"],
        "info FILE": ["info", fast],
    }
    found, threads = {}, torch.get_num_threads()
    try:
        for name, words in steps.items():
            out = here / f"{name.replace(' ', '-')}.json"
            assert main([*words, "--json", str(out)]) == 0, name
            found[name] = json.loads(out.read_text())
    finally:
        torch.set_num_threads(threads)
    return found


def test_a_file_computes_what_its_name_promised(path: dict[str, Any]) -> None:
    """Accuracy, agreement and cost of the file are those of the spec under the model's name, to the last digit."""
    by_name, by_file = path["eval"]["rows"][1], path["eval FILE"]["rows"][0]
    assert by_name["attention"] == by_file["attention"] == SPEC
    for key in ("top1", "top5", "agreement", "difference", "images", "macs"):
        assert by_name[key] == by_file[key], key
    costs = [path["info"]["rows"][1], path["info FILE"]["rows"][0], path["bench"]["rows"][0], path["convert"]]
    assert len({row["macs"]["core"] for row in costs}) == 1
    assert path["bench FILE"]["rows"][0]["macs"] == path["bench"]["rows"][0]["macs"] == by_file["macs"]


def test_rows_are_called_by_what_was_measured(path: dict[str, Any]) -> None:
    assert [row["attention"] for row in path["info"]["rows"]] == ["full", SPEC]
    assert [row["attention"] for row in path["eval"]["rows"]] == ["full", SPEC]
    for step in ("bench", "bench FILE"):
        (row,) = path[step]["rows"]
        assert row["attention"] == SPEC
        assert row["left_full"] == 0


@pytest.mark.slow  # depends on real time
def test_the_same_spec_is_as_fast_by_name_by_file_and_in_tune(path: dict[str, Any]) -> None:
    """The quartiles of the paired ratios overlap, with a margin for load between two benchmarks."""
    (tuned,) = [row for row in path["tune"]["rows"] if row["attention"] == SPEC and len(row["layers"]) == 12]
    rows = {"bench NAME": path["bench"]["rows"][0], "bench FILE": path["bench FILE"]["rows"][0], "tune": tuned}
    low = {name: 0.85 * row["quartiles"][0] for name, row in rows.items()}
    high = {name: 1.15 * row["quartiles"][1] for name, row in rows.items()}
    said = {name: (row["speedup"], row["quartiles"]) for name, row in rows.items()}
    assert max(low.values()) <= min(high.values()), said


def test_tune_expects_of_the_spec_what_eval_finds(path: dict[str, Any]) -> None:
    (tuned,) = [row for row in path["tune"]["rows"] if row["attention"] == SPEC and len(row["layers"]) == 12]
    low, high = tuned["agreement_ci"]
    assert low <= path["eval"]["rows"][1]["agreement"] <= high
