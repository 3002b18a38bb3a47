"""What a measurement is made of: memory, parts, caps, rows, plots and stamps. No test here trusts a real clock."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import re
import resource
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from attendless import execution
from attendless.attention import Macs, cap
from attendless.backbones import Columnar
from attendless.convert import convert
from attendless.errors import UserError
from attendless.measure import bench as bench_module
from attendless.measure import parts as parts_module
from attendless.measure import timing
from attendless.measure.amdahl import time_share
from attendless.measure.bench import Conditions, bench, bench_rows
from attendless.measure.clock import Comparison
from attendless.measure.macs import count, count_by_running
from attendless.measure.measurement import Measurement, Performance, Setup, SpeedLimit
from attendless.measure.memory import peak_memory
from attendless.measure.parts import PARTS, parts, places, run
from attendless.measure.plot import curves, plot, slope, slopes
from attendless.measure.subject import original
from attendless.stamp import stamp, stamp_line
from native_cases import needs_kernels

KEYS = {
    *("model", "attention", "tokens_spec", "size", "tokens", "batch", "params", "macs", "seed", "path", "reason"),
    *("latency_ms", "dense_latency_ms", "speedup", "spread", "throughput", "best_batch", "peak_memory_mb"),
    *("attention_share", "cap", "time_share", "time_cap"),
}


def small(**changes: object) -> VisionTransformer:
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**{**arguments, **changes}).eval()


def a_row(compared: dict[str, object] | None = None, **setup: object) -> Measurement:
    ratios = {"ratio": 1.31, "quartiles": (1.28, 1.35), "interval": (1.3, 1.32), "pairs": 100}
    return Measurement(
        Setup(
            **{
                "model": "deit_tiny_patch16_224",
                "attention": "foveal:keep=0.1",
                "size": (384, 384),
                "tokens": 577,
                "batch": 1,
                "params": 5_717_416,
                "macs": Macs(core=10, projections=20, mlp=30, other=40),
                "path": "native",
                "reason": "because",
                **setup,
            }
        ),
        performance=Performance(latency_ms=50.0, peak_memory_mb=100.0),
        baseline=Performance(latency_ms=65.0, peak_memory_mb=200.0),
        compared=Comparison(**{**ratios, **(compared or {})}),
        limit=SpeedLimit(attention_share=0.5),
        stamp=stamp(),
    )


# Caps ----------------------------------------------------------------------------------------------------------------


def test_cap_is_amdahls() -> None:
    assert cap(0) == 1
    assert cap(0.5) == 2
    assert cap(1) is None


def test_the_promise_about_vit_small_at_224() -> None:
    """The core's share of a block's MACs is N / (N + 6C): ViT-S at 224 px cannot gain more than 1.09 times."""
    N, C = 197, 384
    model = convert(timm.create_model("vit_small_patch16_224"), "full")
    macs = count(model)
    blocks = macs.core + macs.projections + macs.mlp
    assert macs.core / blocks == pytest.approx(N / (N + 6 * C))
    assert cap(macs.core / blocks) == pytest.approx(1.09, abs=0.005)
    assert macs.cap <= 1.09  # the embedding and the head only lower it


# Parts ---------------------------------------------------------------------------------------------------------------


class Ticks:
    """A clock that only moves when told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Waits(nn.Module):
    """Passes its input on and takes exactly so long."""

    def __init__(self, clock: Ticks, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        return x


class Selecting(nn.Module):
    """An attention with a selection, projections and a core."""

    selection = ("select",)

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.qkv = nn.Linear(1, 1)
        self.clock = clock

    def select(self) -> None:
        self.clock.now += 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.qkv(x)
        self.clock.now += 1
        self.select()
        self.clock.now += 1
        return x


class Toy(nn.Module):
    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.patch_embed = Waits(clock, 10)
        self.attn = Selecting(clock)
        self.mlp = nn.Sequential(Waits(clock, 20), Waits(clock, 30))
        self.rest = Waits(clock, 5)
        self.head = Waits(clock, 7)

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.rest(self.mlp(self.attn(self.patch_embed(x)))))


def test_every_stretch_belongs_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(parts_module, "time", clock)
    toy = Toy(clock)
    found = run(toy, torch.ones(1, 1), places(toy))
    expected = {"embedding": 10, "selection": 3, "core": 2, "mlp": 50, "head": 7, "other": 5}
    assert {name: seconds for name, seconds in found.items() if seconds} == expected


@pytest.mark.parametrize("attention", [None, "full"])
def test_the_parts_of_a_run_add_up_and_leave_the_model_as_it_was(attention: str | None) -> None:
    model = small() if attention is None else convert(small(), attention)
    images, before = torch.randn(2, 3, 32, 32), [dict(vars(module)) for module in model.modules()]
    expected = model(images)
    found = parts(model, images, budget=0, rounds=4)
    assert set(found.ms) == set(PARTS)
    assert all(found.ms[name] > 0 for name in PARTS if name != "selection")
    assert found.ms["selection"] == 0
    assert [dict(vars(module)) for module in model.modules()] == before
    assert torch.equal(model(images), expected)
    assert 0 < time_share(found.ms) < 1


def test_shadows_are_lifted_when_the_forward_fails() -> None:
    model = small()
    with pytest.raises(AssertionError):
        parts(model, torch.randn(1, 3, 31, 31))
    assert not any("forward" in vars(module) for module in model.modules())


# Memory --------------------------------------------------------------------------------------------------------------


def test_peak_memory_of_a_layer_whose_memory_is_known() -> None:
    """A linear layer on three planes of 512 × 512: weights, images and one output, all of them exactly known."""
    features, width = 20_000, 512
    arguments = {"in_features": width, "out_features": features, "bias": False}
    found = peak_memory("torch.nn:Linear", arguments, size=(width, width), threads=1)
    weights = 4e-6 * features * width
    assert found.weights == pytest.approx(weights)
    known = weights + 4e-6 * 3 * width * width + 4e-6 * 3 * width * features
    # Above what is known PyTorch may keep packed copies for its product: about 10 MB of 167 on a CPU with AVX-512.
    assert 0.98 * known < found.peak < 1.10 * known


SEEN_FROM_OUTSIDE = """
import sys, timm, torch
from timm.models.vision_transformer import VisionTransformer

def wait():
    print("ready", flush=True)
    sys.stdin.readline()

torch.set_num_threads(1)
with torch.inference_mode():
    VisionTransformer(img_size=32, embed_dim=64, depth=1, num_heads=1).eval()(torch.rand(2, 3, 32, 32))
    wait()
    model, images = timm.create_model("deit_tiny_patch16_224").eval(), torch.rand(16, 3, 224, 224)
    wait()
    for _ in range(3):
        model(images)
    wait()  # leaving takes memory of its own
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_peak_memory_agrees_with_what_is_seen_from_outside() -> None:
    """Independent: another script, watched from this process page by page, with no high-water mark involved."""
    script = [sys.executable, "-c", SEEN_FROM_OUTSIDE]
    return_at_once = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(script, env={**os.environ, **return_at_once}, **pipes) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        statm = Path(f"/proc/{child.pid}/statm")
        seen: list[list[float]] = []
        for _ in range(3):
            seen.append([])
            while not select.select([child.stdout], [], [], 0)[0]:
                seen[-1].append(int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6)
            child.stdout.readline()
            seen[-1].append(int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6)
            child.stdin.write("\n")
    before, peak = seen[0][-1], max(seen[2])
    arguments = {"model_name": "deit_tiny_patch16_224"}
    found = peak_memory("timm:create_model", arguments, size=(224, 224), batch=16, threads=1)
    assert found.peak == pytest.approx(peak - before, rel=0.05)


@pytest.mark.parametrize(
    ("code", "complaint", "words"),
    [
        (1, "Traceback …\nValueError: no such thing", "ValueError: no such thing"),
        (-9, "", "batch 1 at 32 px does not fit: its process ran out of memory"),
    ],
)
def test_a_measurement_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, code: int, complaint: str, words: str
) -> None:
    failed = subprocess.CompletedProcess([], code, stdout="", stderr=complaint)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: failed)
    with pytest.raises(UserError, match=words):
        peak_memory("timm:create_model", {}, size=(32, 32))


# Rows ----------------------------------------------------------------------------------------------------------------

QUICK = {"budget": 0.05, "memory": False, "threads": 1}


def test_bench_measures_against_the_dense_model() -> None:
    dense = small()
    threads, model = torch.get_num_threads(), convert(dense, "full").train()
    row = bench(model, like=dense, batch=2, **QUICK)
    found = json.loads(json.dumps(row.as_dict(), allow_nan=False))
    assert set(found) >= KEYS
    assert found["attention"] == "full"
    assert found["size"] == [32, 32]
    assert found["tokens"] == 17
    assert found["batch"] == 2
    assert found["params"] == sum(p.numel() for p in dense.parameters())
    assert found["macs"] == count(model).as_dict()
    assert found["path"] == "sdpa"
    assert found["pairs"] >= 1
    assert found["attention_share"] == pytest.approx(found["macs"]["core"] / found["macs"]["total"])
    assert found["cap"] == pytest.approx(1 / (1 - found["attention_share"]))
    assert found["time_cap"] == pytest.approx(1 / (1 - found["time_share"]))
    assert found["throughput"] > 0
    assert found["peak_memory_mb"] is None
    assert row.stamp["threads"] == 1
    # Measuring leaves nothing behind.
    assert model.training
    assert torch.get_num_threads() == threads


def test_bench_finds_the_dense_model_itself() -> None:
    dense = small()
    model = convert(dense, "full")
    twin = original(model)
    assert type(twin) is VisionTransformer
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(twin(images), dense(images))
    row = bench(model, size=48, throughput=False, parts=False, **QUICK)
    assert row.setup.tokens == 37
    assert row.limit.time_share is None
    assert model.grid().tokens == 17  # the given model keeps its size
    with pytest.raises(UserError, match="like="):
        bench(dense)
    with pytest.raises(UserError, match="batch=0"):
        bench(model, batch=0)


def test_rows_come_as_they_are_done_and_the_cap_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = timing.interleave
    monkeypatch.setattr(timing, "interleave", lambda *a, **k: (done.append("interleave"), real(*a, **k))[1])
    how = Conditions(**QUICK, parts=False, throughput=False, announce=lambda size, macs: done.append(f"cap {size[0]}"))
    for row in bench_rows("vit_tiny_patch16_224", ["full", "xca"], [32, 48], how):
        done.append(f"{row.setup.asked} {row.setup.size[0]}")
    assert done == ["cap 32", "interleave", "full 32", "xca 32", "cap 48", "interleave", "full 48", "xca 48"]


@pytest.mark.parametrize("size", [(224, 224), (240, 320)])
def test_the_cap_by_formula_is_the_cap_by_running(size: tuple[int, int]) -> None:
    dense = timm.create_model("deit_tiny_patch16_224", img_size=size)
    found = timing.by_formula(dense, size)
    assert found == count_by_running(dense, size)
    assert found.cap == count(convert(dense, "full")).cap
    assert timing.by_formula(nn.Sequential(dense), size) is None


def test_what_is_counted_by_running_is_counted_after_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running first can make a compiled model slow ever after, also the next size's."""
    done: list[str] = []
    for place, name in ((timing, "interleave"), (timing, "parts"), (timing, "best_batch"), (bench_module, "count")):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, real=real, name=name, **k: (done.append(name), real(*a, **k))[1])
    monkeypatch.setattr(timing, "by_formula", lambda model, size: None)
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    rows = list(bench_rows("vit_tiny_patch16_224", ["full"], [32, 48], Conditions(**QUICK, compile=True)))
    assert [row.setup.size for row in rows] == [(32, 32), (48, 48)]
    assert done.count("best_batch") == 4
    assert set(done[done.index("count") :]) == {"count"}


def test_bench_measures_memory_in_a_process_of_its_own() -> None:
    model = convert(small(), "full")
    row = bench(model, like=nn.Sequential(small()), budget=0.05, throughput=False, parts=False)
    assert 0.1 < row.performance.peak_memory_mb < 30
    assert row.baseline.peak_memory_mb is None
    assert any("Sequential cannot be built again" in note for note in row.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "1.31× faster (IQR 1.28–1.35)"),
        (
            {"ratio": 0.8, "quartiles": (0.78, 0.82), "interval": (0.79, 0.81)},
            "1.25× slower (speed-up 0.80, IQR 0.78–0.82)",
        ),
        (
            {"ratio": 1.01, "quartiles": (0.97, 1.05), "interval": (0.99, 1.03)},
            "not distinguishable from the baseline (1.01×, IQR 0.97–1.05)",
        ),
        ({"pairs": 7}, "too few rounds for a verdict within the budget: 7 (median 1.31×)"),
    ],
)
def test_the_verdict_is_in_words(changes: dict, words: str) -> None:
    row = a_row(changes)
    assert row.verdict == row.as_dict()["verdict"] == words
    _, first, second, *_ = str(row).splitlines()
    assert first.split()[:5] == ["max", "speed-up", "2.00×", "by", "MACs"]  # the limit comes before the verdict
    assert words in second


# Plots and stamps ----------------------------------------------------------------------------------------------------


def test_slope_is_the_exponent_of_a_power_law() -> None:
    assert slope([(n, 3 * n**1.5) for n in (100, 200, 1000)]) == pytest.approx(1.5)
    assert slope([(100, 1.0), (100, 2.0)]) is None


def test_plot_draws_cost_against_tokens(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(
            a_row(tokens=n),
            performance=Performance(latency_ms=n * 0.1),
            baseline=Performance(latency_ms=n**2 * 1e-3, peak_memory_mb=200.0),
        )
        for n in (256, 64, 1024)
    ]
    assert [n for n, _ in curves(rows)["ms"]["baseline (timm)"]] == [64, 256, 1024]
    assert slopes(rows)["ms"] == {"baseline (timm)": pytest.approx(2), "foveal:keep=0.1": pytest.approx(1)}
    assert slopes(rows)["MB at the peak"] == {"baseline (timm)": pytest.approx(0)}
    plot(rows, tmp_path / "cost.svg")
    text = (tmp_path / "cost.svg").read_text()
    assert "slope 2.00" in text  # matplotlib draws letters as shapes, and notes in the file what they say
    assert "slope 1.00" in text
    assert [file.name for file in tmp_path.iterdir()] == ["cost.svg"]
    with pytest.raises(UserError, match=r"\.png"):
        plot(rows, tmp_path / "cost.doc")
    with pytest.raises(UserError, match="nothing to plot"):
        plot([a_row(tokens=None)], tmp_path / "cost.svg")


def test_the_stamp_names_the_machine_but_no_host_and_no_person() -> None:
    found = stamp()
    assert {"cpu", "instructions", "threads", "torch", "timm", "attendless", "native_kernels", "date"} <= set(found)
    text = json.dumps(found) + stamp_line(found)
    assert torch.__version__.split("+")[0] in text
    assert platform.node() not in text or len(platform.node()) < 4
    assert f'"{getpass.getuser()}"' not in text
    if (Path(__file__).resolve().parents[1] / ".git").exists() and shutil.which("git"):
        assert re.search(r"attendless [\w.]+ \([0-9a-f]{7,}\+?\)", stamp_line(found)), "the commit of a checkout"


@needs_kernels
def test_layers_say_who_computes_them_on_the_tokens_they_get() -> None:
    shape = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    with execution("native"):
        path, reason = bench_module._path(Columnar(**shape, tokens="tome:r=8"), 1)
    assert path == "1xsdpa + 2xnative"
    assert reason.startswith("full attention runs in PyTorch's fused kernel; asked for by")
