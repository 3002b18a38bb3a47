"""Who computes an operation: by measured costs, kept in a file that may be missing, damaged or impossible to write."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch

from attendless import Context, Grid, create
from attendless.backbones import Columnar
from attendless.backbones.block import run_block
from attendless.convert.breakeven import breakeven
from attendless.errors import UserError
from attendless.sparse import (
    Backend,
    Case,
    calibration,
    choose,
    dispatch,
    execution,
    native,
    policy,
    register_backend,
)
from attendless.sparse import backend as registry
from attendless.sparse.calibration import Line
from native_cases import close, needs_kernels

FLOAT = torch.float32


@dataclasses.dataclass(frozen=True)
class Size:
    """A plan of an operation made up for these tests."""

    tokens: int


CASE = Case("toy", Size(10), batch=1, heads=1, width=1)


class Toy(Backend):
    op, about = "toy", "a toy"
    factor, refusal = 1, ""

    def refuses(self, case: Case) -> str:
        return self.refusal

    def macs(self, case: Case) -> int:
        return self.factor * case.plan.tokens * 100

    def run(self, case: Case, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An operation and costs of its own for every test, by estimate as a user would have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_BACKENDS", {op: dict(known) for op, known in registry._BACKENDS.items()})
    monkeypatch.setattr(registry, "_SAMPLES", dict(registry._SAMPLES))
    calibration.forget()
    register_backend(type("Quick", (Toy,), {"name": "quick", "standing": 2}))
    register_backend(type("Plain", (Toy,), {"name": "plain", "standing": 1, "factor": 3}))
    with execution("auto"):
        yield
    calibration.forget()


def named(text: str) -> str:
    """The name of a cost line, for an operation, a backend and perhaps one more word: `block_native_few`."""
    op, name, *more = text.split("_")
    return calibration.line_name(registry.backend(op, name), *more)


def know(**lines: tuple[float, float]) -> None:
    """Let these be the costs known, and no others: `toy_quick=(overhead, rate)`."""
    calibration.forget()
    found = {named(name): Line(*line) for name, line in lines.items()}
    calibration.learn(FLOAT, {"full sdpa": Line(0, 1e-6), **found})


# Choosing ------------------------------------------------------------------------------------------------------------


def test_the_fastest_by_estimate() -> None:
    assert choose(CASE).backend == "quick", "unmeasured: the one of higher standing"
    assert "not measured" in choose(CASE).reason
    know(toy_quick=(5e-3, 1e-6), toy_plain=(1e-3, 1e-6))
    threads = dispatch.threads_text(torch.get_num_threads())
    assert choose(CASE).backend == "plain"
    assert choose(CASE).reason == f"4 ms estimated, quick 6 ms, on {threads}"
    assert choose(dataclasses.replace(CASE, plan=Size(100))).backend == "quick"


def test_new_costs_are_heeded_at_once() -> None:
    know(toy_quick=(0, 1e-6), toy_plain=(1, 1))
    assert choose(CASE).backend == "quick"
    calibration.learn(FLOAT, {named("toy_quick"): Line(9, 9)})
    assert choose(CASE).backend == "plain"


def test_one_policy_says_how() -> None:
    know(toy_quick=(5e-3, 1e-6), toy_plain=(1e-3, 1e-6))
    with execution("quick"):
        assert policy() == "quick"
        assert choose(CASE).backend == "quick"
        assert "asked for" in choose(CASE).reason
    with execution("flex"):
        assert choose(CASE).backend == "quick", "what does not compute it is passed over"
    with execution("off"):
        assert choose(CASE).backend == "quick"
    assert policy() == "auto"
    with pytest.raises(UserError, match=r"unknown execution policy 'fastest'.*native"), execution("fastest"):
        pass


def test_the_environment_gives_the_first_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_policy", ContextVar("policy", default="fastest"))  # as read when the process began
        with pytest.raises(UserError, match=r"unknown ATTENDLESS_CHOOSE 'fastest'.*native"):
            choose(CASE)


def test_threads_do_not_see_each_other_s_policy() -> None:
    """Two threads are inside `execution` at once; a third, started meanwhile, has the environment's policy."""
    both, found = threading.Barrier(2), {}

    def ask(name: str) -> None:
        with execution(name):
            both.wait(30)
            found[name] = policy(), choose(CASE).backend
            both.wait(30)

    with ThreadPoolExecutor(2) as pool, execution("off"):
        for future in [pool.submit(ask, name) for name in ("quick", "plain")]:
            future.result()
        assert pool.submit(policy).result() == os.environ["ATTENDLESS_CHOOSE"]
        assert policy() == "off"
    assert found == {"quick": ("quick", "quick"), "plain": ("plain", "plain")}


def test_an_export_leaves_the_policy_of_other_threads_alone() -> None:
    from attendless.export.trace import STANDARD, traced

    tracing, asked = threading.Event(), threading.Event()
    inside = []

    class Waits(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            inside.append(policy())
            tracing.set()
            assert asked.wait(60)
            return images + 1

    with ThreadPoolExecutor(1) as pool, execution("quick"):
        export = pool.submit(traced, Waits(), 3, (4, 4), 1, STANDARD)
        assert tracing.wait(60)
        assert (policy(), choose(CASE).backend) == ("quick", "quick")
        asked.set()
        export.result()
    assert set(inside) == {STANDARD}


@pytest.mark.parametrize("thread", [False, True])
def test_a_checkpointed_layer_runs_again_under_the_policy_of_its_forward_pass(thread: bool) -> None:
    """Also where the backward pass is another thread's, as on a GPU."""
    asked = []

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, Context]:
            asked.append(policy())
            return x.exp(), context

    x = torch.zeros(1, 4, 2, requires_grad=True)
    with execution("plain"):
        out, _ = run_block(Asks(), x, Context(Grid(2, 2)), checkpointing=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result() if thread else out.sum().backward()
    assert asked == ["plain", "plain"]
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_compiler_reads_the_policy_of_the_thread_that_traces() -> None:
    found = []
    for name in ("quick", "plain"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: dispatch.run(CASE, x), fullgraph=True, backend="eager")
        with execution(name):
            found.append(compiled(torch.zeros(1)).item())
    assert found == [1, 3]


def test_a_refusal_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.backend("toy", "quick")), "refusal", "it rains")
    case = dataclasses.replace(CASE, batch=3)  # one that was never asked about
    assert choose(case) == registry.Choice("plain", "a toy; not quick: it rains")
    with execution("quick"):
        assert choose(case) == registry.Choice("plain", "a toy; not quick: it rains")
    monkeypatch.setattr(type(registry.backend("toy", "plain")), "refusal", "it snows")
    with pytest.raises(UserError, match="nothing computes toy on cpu: not quick: it rains; not plain: it snows"):
        choose(dataclasses.replace(CASE, batch=2))


def test_a_later_backend_is_asked_too() -> None:
    assert choose(CASE).backend == "quick"
    register_backend(type("Best", (Toy,), {"name": "best", "standing": 9}))
    assert choose(CASE).backend == "best"
    assert dispatch.run(CASE, torch.zeros(1)) == 1


def test_one_that_is_defined_again_is_asked_again() -> None:
    register_backend(type("Best", (Toy,), {"name": "best", "standing": 9, "refusal": "not yet written"}))
    assert choose(CASE).backend == "quick"
    register_backend(type("Best", (Toy,), {"name": "best", "standing": 9}))
    assert choose(CASE).backend == "best"


def test_costs_of_one_kind_say_nothing_about_another() -> None:
    know(toy_quick=(5e-3, 1e-6), toy_plain=(1e-3, 1e-6))
    assert choose(dataclasses.replace(CASE, device="cuda")).backend == "quick"
    assert choose(dataclasses.replace(CASE, dtype=torch.bfloat16)).backend == "quick"
    assert dispatch.against_full(dataclasses.replace(CASE, device="cuda")) is None


@pytest.mark.parametrize(
    "spec", ["foveal:keep=0.2", "bigbird:block=2,seed=1", "sparsifiner:rank=9", "sparsifiner:rest=pooled"]
)
def test_it_never_changes_the_function(spec: str) -> None:
    grid = Grid(12, 9, 1)
    layer = create(spec, 96, 3, grid=grid).eval()
    x = torch.randn(2, grid.tokens, 96)
    results = []
    for name in ("native", "torch"):
        with execution(name), torch.no_grad():
            results.append(layer(x, Context(grid))[0])
            assert (layer.choice(grid).backend == "native") == (name == "native" and native.available)
    close(*results)


# Break-even ----------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.filterwarnings("ignore")
def test_tracing_is_refused_with_what_to_do_instead() -> None:
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = Columnar(**shape, attention="foveal:keep=0.25,cell=2,tile=2").eval()
    with pytest.raises(UserError, match=r"foveal: torch\.jit\.trace.*torch\.export"):
        torch.jit.trace(model, torch.randn(1, 3, 32, 32))


def test_break_even_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure", lambda backends, dtype: ({}, True))
    grid = Grid(16, 16, 1)
    layer = create("foveal:keep=0.1,tile=4", 192, 3, grid=grid).eval()
    know(foveal_native=(1e-3, 1e-9), full_sdpa=(0, 1e-10))
    decision = breakeven(layer, grid)
    assert not decision.keep
    macs = layer.macs(grid).core
    assert decision.reason == (
        f"{1 + 1e-6 * macs:.3g} ms estimated on this machine, full attention {1e-7 * 2 * 257**2 * 192:.3g} ms"
    )
    know(foveal_native=(0, 1e-11), full_sdpa=(0, 1e-10))
    assert breakeven(layer, grid).keep


def test_break_even_by_counting() -> None:
    grid = Grid(16, 16, 1)
    know(foveal_native=(1, 1))
    counted = "× the MACs of full attention"
    assert counted in breakeven(create("linformer:keys=4", 192, 3, grid=grid), grid).reason
    with execution("off"):
        assert counted in breakeven(create("foveal:keep=0.1", 192, 3, grid=grid), grid).reason


# Costs ---------------------------------------------------------------------------------------------------------------


def test_a_line_through_points() -> None:
    line = calibration.fit([(x, 2e-3 + 3e-9 * x) for x in (1e5, 1e6, 1e7)])
    assert line == pytest.approx((2e-3, 3e-9))
    assert calibration.fit([(1.0, 1.0), (2.0, 4.0)]).overhead == 0
    assert calibration.fit([(1.0, 4.0), (2.0, 2.0)]).rate == 0


def test_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SIDES", (5, 6))
    monkeypatch.setattr(calibration, "_SECONDS", 0)
    monkeypatch.setattr(calibration, "_waited", lambda: 0.0)  # whatever else runs here
    assert calibration.known(FLOAT) == {}
    found = dict(calibration.measured())
    assert {"full sdpa", "foveal torch", "block torch", "gather torch"} <= set(found)
    assert not native.available or {"foveal native", "foveal native few", "gather native"} <= set(found)

    # What is known is not measured again, here or in the next process; what came later is, and only that.
    asked = []
    measure = calibration._measure
    monkeypatch.setattr(
        calibration, "_measure", lambda backends, dtype: asked.extend(backends) or measure(backends, dtype)
    )
    calibration.forget()
    assert calibration.measured() == found
    assert {one.op for one in asked} <= {"toy"}, "which has no samples to be measured by"
    asked.clear()

    @registry.sampled("toy")
    def samples(side: int, dtype: torch.dtype) -> Iterator[registry.Sample]:
        yield registry.Sample(dataclasses.replace(CASE, plan=Size(side)), lambda run: run(torch.zeros(1)))

    calibration.forget()  # as the next process does
    assert set(calibration.measured()) == {*found, named("toy_quick"), named("toy_plain")}
    assert {one.op for one in asked} == {"toy"}
    assert "estimated" in choose(CASE).reason


def test_what_was_measured_on_a_busy_machine_is_said_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SIDES", (5, 6))
    monkeypatch.setattr(calibration, "_SECONDS", 0)
    waits = itertools.count()
    monkeypatch.setattr(calibration, "_waited", lambda: float(next(waits)))  # a second in every call
    assert calibration.measured(), "this process has nothing better"
    assert calibration.disturbed()
    layer = create("foveal:keep=0.1,tile=4", 192, 3, grid=Grid(16, 16, 1)).eval()
    assert "while it was busy" in breakeven(layer, Grid(16, 16, 1)).reason
    assert not calibration._file(calibration._key()).exists()
    calibration.forget()  # as the next process does
    assert not calibration.disturbed()
    assert calibration.known(FLOAT) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread had no processor")
def test_waiting_for_a_processor_is_seen() -> None:
    """Two processes on one processor wait for each other."""
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from attendless.sparse.calibration import _waited\n"
        "child = os.fork(); start = time.perf_counter()\n"
        "while time.perf_counter() - start < 0.5: pass\n"
        "if child: os.waitpid(child, 0); print(_waited())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) > 0.1


def test_an_backend_that_was_edited_is_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    names = []
    for body in ("return x", "return x + 0"):
        file.write_text(
            "from attendless import Backend, register_backend\n"
            "class Mine(Backend):\n    op, name, about = 'toy', 'mine', ''\n"
            f"    def run(self, case, x):\n        {body}\n"
        )
        spec = importlib.util.spec_from_file_location(f"mine_{len(names)}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        calibration._edited.cache_clear()
        names.append(calibration.line_name(module.Mine()))
    assert names[0] != names[1]
    assert all(name.startswith("toy mine ") for name in names)


def test_one_that_refuses_whatever_it_is_tried_on_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(calibration, "_measure", lambda backends, dtype: (asked.append(len(backends)) or {}, True))
    calibration.measured(torch.float64)
    calibration.measured(torch.float64)
    assert len(asked) == 1
    monkeypatch.undo()
    assert calibration._measure([], torch.float32) == ({}, True)


def test_types_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure", lambda backends, dtype: ({"full sdpa": Line(1, 1)}, True))
    monkeypatch.setattr(calibration, "survives", lambda dtype: dtype is torch.bfloat16)
    assert calibration.measured(torch.bfloat16) == {"full sdpa": Line(1, 1)}
    assert calibration.known(FLOAT) == {}
    assert calibration.measured(torch.float16) == {}, "products in it die on this machine"


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "{}", '{"float32": {"full sdpa": [1]}}', '{"float32": {"full sdpa": [NaN, 1]}}', "\0\0"]
)
def test_a_damaged_file_is_made_again(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    every = {calibration.line_name(one): Line(1e-5, 1e-10) for one in registry.every_backend()}
    monkeypatch.setattr(calibration, "_measure", lambda backends, dtype: (every, True))
    calibration.measured()
    file = calibration._file(calibration._key())
    whole = file.read_text()
    file.write_text(damage)
    calibration.forget()
    assert calibration.known(FLOAT) == {}
    assert calibration.measured() == every
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibration, "_measure", lambda backends, dtype: ({"full sdpa": Line(1, 1)}, True))
    assert calibration.measured() == {"full sdpa": Line(1, 1)}
    assert calibration.known(FLOAT) == {"full sdpa": Line(1, 1)}, "kept for this process"


def test_threads_have_costs_of_their_own() -> None:
    before = torch.get_num_threads()
    keys = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys.add(calibration._key())
    finally:
        torch.set_num_threads(before)
    assert len(keys) == 2
