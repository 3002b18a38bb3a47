"""The compiled module among its surroundings: paths, threads, forks, the OpenMP runtime, and life without it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

import attendless
from attendless import compiled
from attendless.errors import UserError
from attendless.sparse import foveal, native
from native_cases import every_path, needs_kernels  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
@pytest.mark.skipif(os.environ.get("ATTENDLESS_NATIVE") == "off", reason="turned off")
def test_a_compiler_means_kernels() -> None:
    """A build that fails leaves an install without kernels, and most tests of this file skipped: not unnoticed."""
    assert native.available, native.reason


@needs_kernels
def test_power_of_two(path: str) -> None:
    x = torch.cat([torch.linspace(-126, 1, 200_001), torch.tensor([0.0, -127.0, -1e30, -torch.inf, torch.nan])])
    y = torch.empty_like(x)
    native.kernels().exp2(x.numpy(), y.numpy())
    exact = torch.exp2(x[:-4].double())
    assert ((y[:-4] - exact) / exact).abs().max() < 1.5e-7
    assert y[-5:-1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert y[-1].isnan()


@needs_kernels
def test_paths() -> None:
    assert native.instruction_set() in native.instruction_sets()
    assert "portable" in native.instruction_sets()
    before = native.instruction_set()
    with (
        pytest.raises(UserError, match=r"unknown instruction set 'mmx'\. There are: .*portable"),
        native.forced("mmx"),
    ):
        pass
    assert native.instruction_set() == before
    with pytest.raises(UserError, match=r"ATTENDLESS_NATIVE=mmx: unknown .* There are: .*portable.*, off"):
        compiled._load("mmx")


def test_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled._load("off") == (None, "turned off by ATTENDLESS_NATIVE=off")
    monkeypatch.setattr(compiled, "_native", None)
    monkeypatch.setattr(compiled, "reason", "gone fishing")
    with pytest.raises(UserError, match="not available: gone fishing"):
        native.functions.foveal(*problem(0))
    monkeypatch.delattr(attendless, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "attendless._native", None)
    assert "not compiled when attendless was installed" in compiled._load("")[1]
    monkeypatch.setitem(sys.modules, "attendless._native", ModuleType("attendless._native"))
    assert compiled._load("") == (None, "the compiled kernels are of an older version: install attendless again")


@needs_kernels
def test_arrays_are_never_converted() -> None:
    """A silent copy would take the result with it."""
    x = torch.zeros(4, dtype=torch.float64).numpy()
    with pytest.raises(ValueError, match="source cannot be another type: the kernel takes f32"):
        native.kernels().exp2(x, x)


def problem(seed: int) -> tuple:
    plan = foveal.layout(12, 12, 1, keep=0.2, cell=2, tile=4, coarse=4)
    q, k, v = torch.randn(3, 1, 3, 145, 32, generator=torch.Generator().manual_seed(seed))
    return q, k, v, None, None, list(plan.sizes), 0.2


@needs_kernels
def test_threads_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.threading() == ""
    assert [native.kernels().threads_running(n) for n in (-1, 0, 1, 3)] == [1, 1, 1, 3]
    monkeypatch.setattr(native, "available", False)
    assert native.threading() == ""


@needs_kernels
def test_the_last_few_grids_are_kept() -> None:
    """More grids than are kept, in turn, come out as they did at first."""
    plans = [foveal.layout(3 + i, 4, 1, keep=0.5, cell=2, tile=2, coarse=0) for i in range(20)]
    inputs = [torch.randn(1, 1, 1 + plan.patches, 8) for plan in plans]

    def run(i: int) -> torch.Tensor:
        x = inputs[i]
        return native.functions.foveal_forward(x, x, x, None, None, list(dataclasses.astuple(plans[i])), 0.3)

    first = [run(i) for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda i: run(i % 20), range(200)))
    assert all(torch.equal(x, first[i % 20]) for i, x in enumerate(again))


@needs_kernels
def test_two_threads_at_once() -> None:
    alone = [native.functions.foveal(*problem(seed))[0] for seed in range(8)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda seed: native.functions.foveal(*problem(seed % 8))[0], range(64)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, alone[i % 8]) for i, x in enumerate(together))


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux lists them")
def test_no_thread_is_started_or_ended_between_calls() -> None:
    """Also where one call has work for fewer threads than the next: a runtime would change its team's size."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        native.functions.foveal(*problem(0))
        seen = {task.name for task in Path("/proc/self/task").iterdir()}
        for call in range(1000):
            native.kernels().threads_running(1 + call % 3)
            if call % 50 == 0:
                native.functions.foveal(*problem(0))
                assert {task.name for task in Path("/proc/self/task").iterdir()} == seen
    finally:
        torch.set_num_threads(before)


CHILD = """
import os, sys, torch
sys.path.insert(0, "tests")
from test_native_runtime import problem
from attendless.sparse import native
torch.set_num_threads(4)
before = native.functions.foveal(*problem(0))[0]
child = os.fork()
if not child:
    same = torch.equal(before, native.functions.foveal(*problem(0))[0])
    several = native.kernels().threads_running(4) == 4 and "forked" in native.threading()
    os._exit(0 if same and several else 1)
print(native.instruction_set())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(open("/proc/self/maps").read())
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_in_a_process_of_its_own() -> None:
    """The environment names the path; a fork has none of its parent's threads, must not wait for them, and starts its
    own; and there is one OpenMP runtime, PyTorch's: two pools of threads would stall each other."""
    environment = os.environ | {"ATTENDLESS_NATIVE": "portable"}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout.splitlines()[:2] == ["portable", "0"], done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines() if "libgomp" in line or "libomp" in line}) == 1
