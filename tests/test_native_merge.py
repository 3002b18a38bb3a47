"""Merging by the native kernel against its definition, and as an operation and a PyTorch operator.

Where two cosines differ by rounding alone, the kernel may decide otherwise than PyTorch. So its decision, which can be
read off the owners, is checked against cosines in double precision, and all else is compared given the decision.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attendless import execution
from attendless.errors import UserError
from attendless.sparse import choose, merging, native, operations
from attendless.sparse.backend import Case
from attendless.sparse.merging import Merged, Merging
from native_cases import close, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401
from test_merging import Problem, problem

pytestmark = needs_kernels
#: Differences of cosines below this are rounding.
ROUNDING = 1e-5


def run(p: Problem) -> Merged:
    more = [p.more[name] for name in ("importance", "sizes", "cells", "owners")]
    return Merged(*native.functions.merge(p.x, p.keys, *more, p.plan.numbers, p.plan.protect))


def index_of(p: Problem, found: Merged) -> Tensor:
    """Where each patch went: who stands for its cell now."""
    plan, cells = p.plan, p.more["cells"]
    return found.owners.gather(1, torch.arange(plan.patches).expand(len(p.x), -1) if cells is None else cells)


def divided(p: Problem) -> tuple[Tensor, Tensor]:
    """The sources and the targets of each image."""
    importance = p.more["importance"]
    importance = None if importance is None else importance[:, p.plan.prefix :]
    return merging.divide(p.plan, importance, torch.empty(len(p.x), p.plan.patches))


def check_decision(p: Problem, index: Tensor) -> None:
    plan, cells = p.plan, p.more["cells"]
    sources, targets = divided(p)
    stays, n = plan.seeking - plan.r, plan.patches
    assert torch.equal(index.gather(1, targets), torch.arange(stays, n - plan.r).expand_as(targets))
    unit = torch.nn.functional.normalize(p.keys[:, plan.prefix :].double(), dim=-1)
    cosine = unit @ unit.transpose(1, 2)
    if plan.window:
        window = merging.windows(plan, torch.arange(n).expand(len(p.x), n) if cells is None else cells)
        cosine = cosine.masked_fill(window[:, :, None] != window[:, None], -torch.inf)
    for image in range(len(p.x)):
        likely = cosine[image][sources[image]][:, targets[image]]
        best = likely.amax(-1)
        likeness = best
        if plan.protect and p.more["importance"] is not None:
            likeness = best - plan.protect * p.more["importance"][image, plan.prefix + sources[image]].double().log()
        where = index[image, sources[image]]
        gone, staying = (where >= stays).nonzero()[:, 0], (where < stays).nonzero()[:, 0]
        assert len(gone) == plan.r
        partner = where[gone] - stays
        assert (likely[gone, partner] >= best[gone] - ROUNDING).all()
        assert (partner[best[gone] == -torch.inf] == 0).all()
        if len(gone) and len(staying):
            assert likeness[gone].min() >= likeness[staying].max() - ROUNDING
        assert torch.equal(where[staying], torch.arange(len(staying)))


def check_rest(p: Problem, found: Merged, index: Tensor) -> None:
    plan, cells = p.plan, p.more["cells"]
    importance = p.more["importance"][:, plan.prefix :] if plan.sources else None
    x, sizes = merging.join(p.x[:, plan.prefix :], index, plan.left, p.more["sizes"], importance)
    assert torch.equal(found.x[:, : plan.prefix], p.x[:, : plan.prefix])
    close(found.x[:, plan.prefix :], x)
    close(found.sizes, sizes)
    cells = torch.arange(plan.patches).expand(len(p.x), -1) if cells is None else cells
    places = torch.empty_like(found.cells)
    for part in divided(p):
        places = places.scatter(1, index.gather(1, part), cells.gather(1, part))
    assert torch.equal(found.cells, places)
    assert torch.equal(found.owners, merging.reowned(index, cells, p.more["owners"], plan.cells))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    side = st.integers(1, 6) | st.integers(6, 30)
    height, width, seed = draw(side), draw(side), draw(st.integers(0, 999))
    cells, draws = height * width, torch.Generator().manual_seed(seed)
    past, prefix, batch = (
        draw(st.integers(0, cells // 2)) * draw(st.booleans()),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 3)),
    )
    dim, D = draw(st.sampled_from([1, 3, 16, 37])), draw(st.sampled_from([1, 2, 8, 21, 64]))
    window = draw(st.sampled_from([0, 0, 1, 2, 3, 50]))
    protect = draw(st.sampled_from([0.0, 0.0, 0.3]))
    n = cells - past
    sources = draw(st.integers(0, n - 1)) * draw(st.booleans())
    most = sources or n // 2
    r = draw(st.integers(0, most) | st.just(most))
    plan = Merging(height, width, prefix, n, r, window, sources, protect)
    # Both are parts of something wider, as a model may have them.
    x, keys = (torch.randn(batch, prefix + n, 2 * c + 1, generator=draws)[..., 1 : c + 1] for c in (dim, D))
    if draw(st.booleans()):  # some alike, some nothing
        keys = keys[:, torch.randint(prefix + n, (prefix + n,), generator=draws)].round()
    sizes = cell = owners = None
    if past:
        cell = torch.stack([torch.randperm(cells, generator=draws)[:n] for _ in range(batch)])
        sizes = torch.randint(1, 4, (batch, n), generator=draws).float()
        owners = torch.randint(-1, n, (batch, cells), generator=draws)
        owners = owners.scatter(1, cell, torch.arange(n).expand(batch, n))
    importance = torch.rand(batch, prefix + n, generator=draws).clamp(min=0.01) if protect or sources else None
    return Problem(plan, x, keys, {"importance": importance, "sizes": sizes, "cells": cell, "owners": owners})


@given(p=problems(), count=thread_counts)
@sweep
def test_decides_and_merges_as_defined(path: str, p: Problem, count: int) -> None:
    with threads(count):
        found = run(p)
    index = index_of(p, found)
    check_decision(p, index)
    check_rest(p, found, index)


def test_large_images_are_shared_among_threads(path: str) -> None:
    """More patches than are held at once, in several pieces: the same on any number of threads."""
    for window, sources in ((0, 0), (5, 0), (0, 700)):
        p = problem(40, 40, 1, 300, window, sources=sources)
        p.x, p.keys = torch.randn(1, 1601, 150), p.keys[:1]
        p.more = {name: y if y is None else y[:1] for name, y in p.more.items()}
        found = run(p)
        check_decision(p, index_of(p, found))
        for count in (2, 3):
            with threads(count):
                assert all(torch.equal(a, b) for a, b in zip(run(p), found, strict=True))


def test_exact_ties(path: str) -> None:
    """Cosines of exactly 1 and 0, so there is no rounding: every decision is the definition's."""
    for seed in range(20):
        side = 36 if seed == 12 else 12  # once more patches than are held at once
        p = problem(side, side - 3, 1, 1 + 2 * seed, window=seed % 4, past=(seed % 2) * 20, seed=seed)
        draws = torch.Generator().manual_seed(seed)
        p.keys = torch.eye(20)[torch.randint(1 + seed, p.keys.shape[:2], generator=draws)]
        p.keys[:, 5] = 0
        for ours, defined in zip(run(p), p.merge(), strict=True):
            torch.testing.assert_close(ours, defined)


def test_equally_important_patches(path: str) -> None:
    """Of equally important patches the later are sources, as the definition says."""
    for seed in range(10):
        p = problem(8, 9, 1, 10, sources=30, seed=seed)
        p.more["importance"] = p.more["importance"].mul(4).round()
        assert torch.equal(run(p).owners, p.merge().owners)


def test_numbers_that_are_none(path: str) -> None:
    """Whatever comes out of NaN and infinity, it comes out, and is a way to merge."""
    values = (torch.nan, torch.inf, -torch.inf, 3e38, 1e-30, 0.0)
    for bad, sources in itertools.product(values, (0, 15)):
        for where in (slice(None), slice(0, 1), slice(3, 9), slice(7, 8)):
            p = problem(5, 6, 1, 7, protect=0.5, window=2 * (where.start == 3), sources=sources)
            p.keys[:, where] = bad
            p.more["importance"][:, where] = bad
            found = run(p)
            index = index_of(p, found)
            assert index.min() == 0
            assert index.max() == p.plan.left - 1
            assert (index.gather(1, divided(p)[0]) >= 15 - 7).sum() == 2 * 7
            check_rest(p, found, index)


def test_importance_of_nothing_goes_first() -> None:
    p = problem(4, 4, 1, 2, protect=0.5)
    p.more["importance"][:, [4, 12]] = 0
    assert torch.equal(run(p).owners, p.merge().owners)


def test_says_what_is_wrong() -> None:
    p = problem(4, 4, 1, 3, past=4)
    good = (p.x, p.keys, None, *(p.more[name] for name in ("sizes", "cells", "owners")), p.plan.numbers, 0.0)

    def refused(at: int, value: object, message: str) -> None:
        with pytest.raises(UserError, match=message):
            native.functions.merge(*good[:at], value, *good[at + 1 :])

    native.functions.merge(*good)
    refused(0, p.x[0], r"x must be \[B, N, C\], got \[13, 5\]")
    refused(1, p.keys[:, 1:], "keys must be")
    refused(1, p.keys[:, None, None], r"keys must be \[B, H, N, D\], got \[")
    refused(1, p.keys[..., :0], "keys must have at least one channel")
    refused(2, torch.ones(2, 12), "importance must be")
    refused(6, [4, 4, 1, 12, 3, 0, 5], "importance is missing: it chooses the sources")
    refused(6, [4, 4, 1, 12, 3, 0, 12], "12 of 12 patches cannot be sources")
    refused(3, torch.ones(2, 13), "sizes must be")
    for wrong in (-1, 16, 2**32):
        refused(4, p.more["cells"].index_fill(1, torch.tensor([3]), wrong), "cells must be from 0 to 15")
    for wrong in (-2, 12, 2**32):
        refused(5, p.more["owners"].index_fill(1, torch.tensor([3]), wrong), "owners must be from -1 to 11")
    refused(5, p.more["owners"].int(), r"a tensor of torch\.int64, got torch\.int32")
    refused(6, [4, 4, 1, 12, 7, 0], "7 of 12 patches cannot merge")
    refused(6, [4, 4, 1, 13, 3, 0], "as the plan says")
    refused(6, [1 << 13, 1 << 13, 1, 12, 3, 0], "the grid: 67108864 is too large")
    refused(6, [4, 4, 1, 12], r"plan must be 7 integers .*\(height, width, prefix, patches, r, window, sources\)")
    with pytest.raises(UserError, match="a grid of 6 cells has no place for 12 patches"):
        native.functions.merge(*good[:3], None, None, None, [2, 3, 1, 12, 3, 0], 0.0)


# As an operation -----------------------------------------------------------------------------------------------------


def merge(p: Problem) -> Merged:
    return operations.merge(p.x, p.keys, p.plan, **p.more)


def test_the_kernel_is_chosen_for_inference() -> None:
    plan = Merging(4, 4, 1, 16, 3)
    assert choose(Case("merge", plan, 1, 1, 64)).backend == "native"
    for dtype in (torch.float64, torch.bfloat16):
        assert choose(Case("merge", plan, 1, 1, 64, dtype)).backend == "torch"
    assert choose(Case("merge", plan, 1, 1, 64, device="cuda")).backend == "torch"
    with execution("torch"):
        assert choose(Case("merge", plan, 1, 1, 64)).backend == "torch"


def test_every_backend_computes_it() -> None:
    p = problem(6, 5, 1, 7, past=6, protect=0.2, window=3)
    for name in ("native", "torch"):
        with execution(name):
            found = merge(p)
        assert isinstance(found, Merged)
        for ours, defined in zip(found, p.merge(), strict=True):
            torch.testing.assert_close(ours, defined)


def test_gradients_are_the_definitions() -> None:
    p, q = (problem(6, 5, 1, 7, past=6) for _ in range(2))
    for one, call in ((p, merge), (q, Problem.merge)):
        one.x.requires_grad_()
        one.more["sizes"].requires_grad_()
        found = call(one)
        (found.x.square().sum() + found.sizes.square().sum()).backward()
    assert torch.equal(p.x.grad, q.x.grad)
    assert torch.equal(p.more["sizes"].grad, q.more["sizes"].grad)
    more = [p.more[name] for name in ("importance", "sizes", "cells", "owners")]
    with pytest.raises(UserError, match=r"for inference\. To train, call sparse\.merging\.merge"):
        torch.ops.attendless.merge(p.x, p.keys, *more, p.plan.numbers, 0.0)[0].sum().backward()
    p.x, p.more["sizes"] = p.x.detach(), p.more["sizes"].detach()
    p.keys.requires_grad_()  # a choice has no gradient
    assert not merge(p).x.requires_grad


# As a PyTorch operator -----------------------------------------------------------------------------------------------


def test_keeps_pytorchs_rules() -> None:
    for p in (problem(4, 3, 1, 2), problem(4, 3, 1, 2, past=3, protect=0.5)):
        more = [p.more[name] for name in ("importance", "sizes", "cells", "owners")]
        for dtype in (torch.float32, torch.bfloat16):
            arguments = (p.x.to(dtype), p.keys, *more, p.plan.numbers, p.plan.protect)
            torch.library.opcheck(torch.ops.attendless.merge, arguments)


class Twice(nn.Module):
    def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        first = operations.merge(x, keys, Merging(4, 5, 1, 20, 4))
        past = {"sizes": first.sizes, "cells": first.cells, "owners": first.owners}
        return tuple(operations.merge(first.x, keys[:, :17], Merging(4, 5, 1, 16, 4), **past))


def test_compile_and_export_trace_through() -> None:
    x, keys = torch.randn(2, 21, 6), torch.randn(2, 21, 4)
    with torch.no_grad():
        expected = Twice()(x, keys)
        program = torch.export.export(Twice(), (x, keys))
        assert str(program.graph).count("torch.ops.attendless.merge.default") == 2
        compiled = torch.compile(Twice(), fullgraph=True, backend="aot_eager")
        for found in (program.module()(x, keys), compiled(x, keys)):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_autocast_computes_in_single_precision() -> None:
    p = problem(4, 4, 1, 3)
    p.keys = p.keys.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = merge(p)
    assert found.x.dtype == torch.float32
    assert torch.equal(found.x, run(p).x)


def test_operations_are_counted() -> None:
    for window in (0, 2):
        p = problem(4, 4, 1, 3, window)
        with FlopCounterMode(display=False) as counter:
            merge(p)
        assert counter.get_total_flops() == 2 * 2 * merging.macs(p.plan, 4)


def test_the_keys_of_several_heads_count_by_their_mean() -> None:
    draws = torch.Generator().manual_seed(0)
    for batch, heads, n in ((1, 3, 49), (5, 2, 12), (2, 1, 30)):
        packed = torch.randn(batch, 1 + n, 2, heads, 20, generator=draws)
        keys, x = packed[:, :, 1].transpose(1, 2), torch.randn(batch, 1 + n, 24, generator=draws)
        plan = Merging(1, n, 1, n, n // 4)
        for found in (operations.merge(x, keys, plan), merging.merge(x, keys, plan)):
            for one, other in zip(found, merging.merge(x, keys.mean(1), plan), strict=True):
                torch.testing.assert_close(one, other)
