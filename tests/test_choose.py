"""Who computes an attention: by measured costs, kept in a file that may be missing, damaged or impossible to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attendless import Context, Grid, create
from attendless.convert.breakeven import breakeven
from attendless.errors import UserError
from attendless.sparse import choose, costs, native
from attendless.sparse.choose import Ways
from attendless.sparse.costs import Line
from native_cases import close, needs_kernels

MEASURED = {"full sdpa": Line(1e-5, 1e-10), "block native": Line(1e-4, 1e-10)}
WAYS = Ways("block", (("native", 1000), ("torch", 3000)))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Costs of its own for every test, by estimate as a user would have it."""
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(costs, "_known", {})
    choose._choose.cache_clear()


def know(monkeypatch: pytest.MonkeyPatch, **lines: tuple[float, float]) -> None:
    """Let these be the costs known: `block_native=(overhead, rate)`."""
    found = {name.replace("_", " "): Line(*line) for name, line in lines.items()}
    monkeypatch.setattr(costs, "_known", {costs._name(): {"full sdpa": Line(0, 1e-6), **found}})
    choose._choose.cache_clear()


# Choosing ------------------------------------------------------------------------------------------------------------


def test_the_quickest_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose.choose(WAYS).path == "native", "unmeasured: the usual one"
    assert "not measured" in choose.choose(WAYS).reason
    know(monkeypatch, block_native=(5e-3, 1e-6), block_torch=(1e-3, 1e-6))
    assert choose.choose(WAYS).path == "torch"
    assert (
        choose.choose(WAYS).reason == f"4 ms estimated, native 6 ms, on {choose.threads_text(torch.get_num_threads())}"
    )
    larger = Ways("block", (("native", 10_000), ("torch", 30_000)))
    assert choose.choose(larger).path == "native"


def test_few_queries_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, block_native=(0, 1e-6), block_native_few=(0, 9e-6), block_torch=(0, 1e-6))
    assert choose.choose(Ways("block", WAYS.macs, queries=16)).path == "native"
    assert choose.choose(Ways("block", WAYS.macs, queries=4)).path == "torch"


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, block_native=(5e-3, 1e-6), block_torch=(1e-3, 1e-6))
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "native")
    assert choose.choose(WAYS) == choose.Choice("native", "asked for by ATTENDLESS_CHOOSE=native")
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "flex")
    assert choose.choose(WAYS).path == "native", "what cannot compute it is passed over"
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "off")
    assert choose.choose(WAYS).path == "native"
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "fastest")
    with pytest.raises(UserError, match=r"unknown ATTENDLESS_CHOOSE 'fastest'.*native"):
        choose.choose(WAYS)


def test_costs_of_the_cpu_say_nothing_about_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, block_native=(5e-3, 1e-6), block_torch=(1e-3, 1e-6))
    assert choose.choose(Ways("block", WAYS.macs, device="cuda")).path == "native"
    assert choose.against_full(Ways("block", WAYS.macs, device="cuda"), 1000) is None


@pytest.mark.parametrize("spec", ["foveal:keep=0.2", "bigbird:seed=1"])
def test_it_never_changes_the_function(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    grid = Grid(12, 9, 1)
    layer = create(spec, 96, 3, grid=grid).eval()
    x = torch.randn(2, grid.tokens, 96)
    results = []
    for path in ("native", "torch"):
        monkeypatch.setenv("ATTENDLESS_CHOOSE", path)
        results.append(layer(x, Context(grid))[0])
        assert (layer.choice(grid).path == "native") == (path == "native" and native.available)
    close(*results)


# Break-even ----------------------------------------------------------------------------------------------------------


@needs_kernels
def test_break_even_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(16, 16, 1)
    layer = create("foveal:keep=0.1,tile=4", 192, 3, grid=grid).eval()
    know(monkeypatch, foveal_native=(1e-3, 1e-9), full_sdpa=(0, 1e-10))
    decision = breakeven(layer, grid)
    assert not decision.keep
    macs = layer.macs(grid).core
    assert decision.reason == (
        f"{1 + 1e-6 * macs:.3g} ms estimated on this machine, full attention {1e-7 * 2 * 257**2 * 192:.3g} ms"
    )
    know(monkeypatch, foveal_native=(0, 1e-11), full_sdpa=(0, 1e-10))
    assert breakeven(layer, grid).keep


def test_break_even_by_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(16, 16, 1)
    know(monkeypatch, foveal_native=(1, 1))
    counted = "× the MACs of full attention"
    assert counted in breakeven(create("linformer:keys=4", 192, 3, grid=grid), grid).reason
    monkeypatch.setenv("ATTENDLESS_CHOOSE", "off")
    assert counted in breakeven(create("foveal:keep=0.1", 192, 3, grid=grid), grid).reason


# Costs ---------------------------------------------------------------------------------------------------------------


def test_a_line_through_points() -> None:
    line = costs.fit([(x, 2e-3 + 3e-9 * x) for x in (1e5, 1e6, 1e7)])
    assert line == pytest.approx((2e-3, 3e-9))
    assert costs.fit([(1.0, 1.0), (2.0, 4.0)]).overhead == 0
    assert costs.fit([(1.0, 4.0), (2.0, 2.0)]).rate == 0


def test_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_SIDES", (5, 6))
    monkeypatch.setattr(costs, "_SECONDS", 0)
    assert costs.known() is None
    found = costs.measured()
    assert {"full sdpa", "foveal torch", "block torch"} <= set(found)
    assert not native.available or {"foveal native", "foveal native few", "gather native"} <= set(found)
    monkeypatch.setattr(costs, "_measure", lambda: pytest.fail("measured again"))
    monkeypatch.setattr(costs, "_known", {})
    assert costs.measured() == found


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"full sdpa": [1]}', '{"full sdpa": [NaN, 1]}', "\0\0"])
def test_a_damaged_file_is_made_again(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(costs, "_measure", lambda: MEASURED)
    costs.measured()
    file = costs._file(costs._name())
    whole = file.read_text()
    file.write_text(damage)
    monkeypatch.setattr(costs, "_known", {})
    assert costs.known() is None
    assert costs.measured() == MEASURED
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(costs, "_measure", lambda: MEASURED)
    assert costs.measured() == MEASURED
    assert costs.known() == MEASURED, "kept for this process"


def test_threads_have_costs_of_their_own() -> None:
    before = torch.get_num_threads()
    names = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            names.add(costs._name())
    finally:
        torch.set_num_threads(before)
    assert len(names) == 2
