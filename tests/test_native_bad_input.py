"""Whatever the kernels are given, they throw or are right; they never read or write what is not theirs.

Valid problems with a few things wrong with them, through `torch.ops.attendless.*` and straight into the compiled
module; what is not refused is compared with a slow reference. It means most with the sanitizers watching: see
test_native_sanitized.py, which runs this file again. $ATTENDLESS_EXAMPLES says how many calls each test draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from attendless.errors import UserError
from attendless.sparse import (  # noqa: F401
    foveal,
    gather,
    merging,
    native,
    ops,
)
from attendless.sparse.descriptions import Operation
from attendless.sparse.table import OPERATIONS
from native_cases import needs_kernels, sweep, thread_counts, threads

pytestmark = needs_kernels
Arguments = dict[str, Any]
SCALE = 0.3
HUGE = [2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62]
TYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, "strided"]
NUMBERS = [0, -1, 1, 2, 3, 5, 17, *HUGE, *(-x for x in HUGE)]


# Valid problems: arguments by name, in the order the functions take them ---------------------------------------------


@dataclasses.dataclass
class Sizes:
    """Of a problem; the numbers come from `seed`."""

    batch: int
    heads: int
    tokens: int
    width: int
    value_width: int
    seed: int

    def tensor(self, *shape: int) -> Tensor:
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def number(self, low: int, high: int, *shape: int) -> Tensor:
        self.seed += 1
        random = torch.Generator().manual_seed(self.seed)
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

    def heads_of(self, width: int) -> Tensor:
        return self.tensor(self.batch, self.heads, self.tokens, width)

    def qkv(self, biased: bool) -> Arguments:
        q, k = self.heads_of(self.width), self.heads_of(self.width)
        bias = self.tensor(self.batch, self.tokens) if biased else None
        return {"q": q, "k": k, "v": self.heads_of(self.value_width), "key_bias": bias}

    def results(self) -> Arguments:
        shape = (self.batch, self.heads, self.tokens)
        return {"out": torch.zeros(*shape, self.value_width), "lse": torch.zeros(shape)}

    def gradients(self, biased: bool) -> Arguments:
        q, v = self.heads_of(self.width), self.heads_of(self.value_width)
        bias = torch.zeros(self.batch, self.heads, self.tokens) if biased else None
        return {"out_grad": v, "q_grad": q, "k_grad": q.clone(), "v_grad": v.clone(), "key_bias_grad": bias}


@st.composite
def some_sizes(draw: st.DrawFn) -> Sizes:
    widths = st.sampled_from([1, 3, 8, 17])
    counts = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 20)))
    return Sizes(*counts, draw(widths), draw(widths), draw(st.integers(0, 999)))


@st.composite
def foveal_problems(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    sizes, biased = draw(some_sizes()), draw(st.booleans())
    cell = draw(st.integers(1, 3))
    grid = (draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 2)))
    sides = {"cell": cell, "tile": draw(st.integers(1, 4)), "coarse": cell * draw(st.integers(0, 2))}
    plan = foveal.layout(*grid, keep=0.3, **sides, order=draw(st.integers(0, 1)))
    sizes.tokens, places = plan.prefix + plan.patches, None
    if draw(st.booleans()):
        left = max(1, plan.patches // 2)
        sizes.tokens, places = plan.prefix + left, sizes.number(0, plan.patches, sizes.batch, left)
    shared = sizes.qkv(biased) | {"places": places, "layout": list(dataclasses.astuple(plan)), "scale": SCALE}
    q, k = shared["q"], shared["k"]
    chosen = foveal.select(q, k, plan, scale=SCALE, key_bias=shared["key_bias"], places=places).int()
    rest = sizes.results() | sizes.gradients(biased)
    return shared, {"chosen": chosen, **rest}


@st.composite
def block_problems(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    sizes, biased = draw(some_sizes()), draw(st.booleans())
    tiles = draw(st.integers(1, 4))
    lists = tiles * draw(st.sampled_from([1, sizes.heads]))
    cuts = sorted(draw(st.lists(st.integers(0, sizes.tokens), min_size=tiles - 1, max_size=tiles - 1)))
    lengths = draw(st.lists(st.integers(0, 30), min_size=lists, max_size=lists))
    shared = sizes.qkv(biased) | {
        "query_start": torch.tensor([0, *cuts, sizes.tokens], dtype=torch.int32),
        "queries": sizes.tensor(sizes.tokens).argsort().int(),
        "key_start": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        "keys": sizes.number(0, sizes.tokens, sum(lengths)),
        "scale": SCALE,
    }
    return shared, sizes.results() | sizes.gradients(biased)


@st.composite
def gather_problems(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    sizes, biased, longest = draw(some_sizes()), draw(st.booleans()), draw(st.integers(0, 20))
    shape = (sizes.batch, sizes.heads, sizes.tokens)
    counts = sizes.number(0, longest + 1, *shape) if draw(st.booleans()) else None
    indices = sizes.number(0, sizes.tokens, *shape, longest)
    shared = sizes.qkv(biased) | {"indices": indices, "counts": counts, "scale": SCALE}
    return shared, sizes.results() | sizes.gradients(biased)


@st.composite
def sparsifiner_problems(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    sizes, ranks, tail = draw(some_sizes()), draw(st.integers(1, 18)), draw(st.booleans())
    images = draw(st.sampled_from([1, sizes.batch]))
    pooled = sizes.tensor(sizes.batch, sizes.heads, ranks, sizes.value_width)
    shared = sizes.qkv(draw(st.booleans())) | {
        "coefficients": sizes.heads_of(ranks).relu(),
        "basis": sizes.tensor(images, ranks, sizes.tokens).relu(),
        "tail_scores": sizes.heads_of(ranks) if tail else None,
        "tail_values": pooled if tail else None,
        "share": sizes.number(0, 65, images, sizes.tokens, ranks) / 64 if tail else None,
        "budget": draw(st.integers(1, sizes.tokens)),
        "prefix": draw(st.integers(0, 3)),
        "tau": 0.0,
        "top": draw(st.sampled_from([0, 0, 2])),
        "scale": SCALE,
    }
    indices = torch.zeros(sizes.batch, sizes.heads, sizes.tokens, shared["budget"], dtype=torch.int32)
    return shared, sizes.results() | {"indices": indices, "counts": indices[..., 0].contiguous()}


@st.composite
def merge_problems(draw: st.DrawFn) -> tuple[Arguments, Arguments]:
    sizes, past = draw(some_sizes()), draw(st.booleans())
    height, width, prefix = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 2))
    B, cells = sizes.batch, height * width
    n = draw(st.integers(1, cells)) if past else cells
    r = draw(st.integers(0, n // 2))
    places = torch.stack([sizes.tensor(cells).argsort()[:n] for _ in range(B)])
    owners = sizes.number(-1, n, B, cells).long().scatter(1, places, torch.arange(n).expand(B, n))
    shared = {
        "x": sizes.tensor(B, prefix + n, sizes.value_width),
        "keys": sizes.tensor(B, sizes.heads, prefix + n, sizes.width),
        "importance": sizes.tensor(B, prefix + n).abs() if draw(st.booleans()) else None,
        "sizes": sizes.number(1, 4, B, n).float() if past else None,
        "cells": places if past else None,
        "owners": owners if past else None,
        "plan": [height, width, prefix, n, r, draw(st.sampled_from([0, 0, 1, 2, 9]))],
        "protect": draw(st.sampled_from([0.0, 0.5])),
    }
    left = torch.zeros(B, n - r)
    out = torch.zeros(B, prefix + n - r, sizes.value_width)
    results = {"sizes_out": left, "cells_out": left.long(), "owners_out": torch.zeros(B, cells).long()}
    return shared, {"out": out, **results}


# What may be wrong with an argument ----------------------------------------------------------------------------------


def spoil(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() > 2**20:  # the memory is not there
            return value
        return draw(st.sampled_from([spoil_shape, spoil_type, spoil_entries, spoil_entries]))(draw, value)
    if isinstance(value, list):
        at = draw(st.integers(0, len(value)))
        return [*value[:at], *([draw(st.sampled_from(NUMBERS))] if at < len(value) else []), *value[at + 1 :]][
            : draw(st.sampled_from([None, None, None, -1]))
        ]
    if isinstance(value, float):
        return draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300]))
    return draw(st.sampled_from(NUMBERS))


def spoil_shape(draw: st.DrawFn, x: Tensor) -> Tensor:
    axis, how = (
        draw(st.integers(0, x.ndim - 1)),
        draw(st.sampled_from(["less", "none", "more", "wraps", "flat", "deep"])),
    )
    if how == "less":
        return x.narrow(axis, 0, max(0, x.shape[axis] - 1))
    if how == "none":
        return x.narrow(axis, 0, 0)
    if how == "more":
        return torch.cat([x, x.narrow(axis, 0, min(1, x.shape[axis]))], axis)
    if how == "wraps" and x.shape[axis] == 1:  # without any memory
        return x.expand([2**32 + 1 if i == axis else size for i, size in enumerate(x.shape)])
    return x.flatten() if how == "flat" else x[None]


def spoil_type(draw: st.DrawFn, x: Tensor) -> Tensor:
    how = draw(st.sampled_from(TYPES))
    return x.repeat_interleave(2, -1)[..., ::2] if how == "strided" else x.to(how)


def spoil_entries(draw: st.DrawFn, x: Tensor) -> Tensor:
    if x.is_floating_point() and x.numel():
        x = x.clone()
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
        return x
    x = x.long()
    if x.numel():
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(
            st.sampled_from([-1, 0, 1, 2, 3, 20, 40, *HUGE, -(2**31)])
        )
    if draw(st.booleans()):
        x = x + draw(st.sampled_from([0, 2**32, -(2**32)]))
    return x.int() if draw(st.booleans()) else x


def spoiled(draw: st.DrawFn, arguments: Arguments) -> Arguments:
    arguments = dict(arguments)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        name = draw(st.sampled_from([name for name, x in arguments.items() if x is not None]))
        if draw(st.integers(0, 9)):
            arguments[name] = spoil(draw, arguments[name])
        else:  # as if it had been forgotten
            arguments[name] = None
    return arguments


# References ----------------------------------------------------------------------------------------------------------


def finite(arguments: Arguments) -> bool:
    numbers = [x for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()]
    reals = [x for x in arguments.values() if isinstance(x, float)]
    return all(x.isfinite().all() and x.abs().max() < 1e3 for x in numbers if x.numel()) and all(
        math.isfinite(x) and abs(x) < 1e3 for x in reals
    )


def dense(a: Arguments, counts: Tensor) -> Tensor:
    """Attention in which query i sees key j `counts[…, i, j]` times."""
    score = a["scale"] * a["q"].float() @ a["k"].float().transpose(-2, -1)
    if a["key_bias"] is not None:
        score = score + a["key_bias"].float()[:, None, None]
    score = score.masked_fill(counts == 0, -math.inf)
    weight = counts * torch.exp(score - score.detach().amax(-1, keepdim=True).clamp(min=-1e30))
    return weight @ a["v"].float() / weight.sum(-1, keepdim=True).clamp(min=1e-30)


def times_seen(a: Arguments) -> Tensor:
    B, H, N, _ = a["q"].shape
    counts = torch.zeros(H, N, N)
    tiles = len(a["query_start"]) - 1
    for h in range(H):
        for t in range(tiles):
            at = t + (h * tiles if len(a["key_start"]) - 1 > tiles else 0)
            mine = a["queries"][a["query_start"][t] : a["query_start"][t + 1]].long()
            keys = a["keys"][a["key_start"][at] : a["key_start"][at + 1]].long()
            counts[h, mine] = torch.bincount(keys, minlength=N).float()
    return counts.expand(B, H, N, N)


def check(out: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if out.dtype in (torch.float16, torch.bfloat16) else 2e-4
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance * scale, rtol=tolerance)


def check_foveal(out: Tensor, qkv: list[Tensor], chosen: Tensor, plan: foveal.Layout, **more: Any) -> None:
    if not plan.int8:  # test_native_int8.py compares int8, which is coarser
        check(out, foveal.attend(*qkv, chosen.long(), plan, **more))


def check_merged(a: Arguments, x: Tensor, sizes: Tensor, cells: Tensor, owners: Tensor) -> None:
    """What comes out is a way to merge; the rest is what follows from that, as far as the owners tell."""
    plan = merging.Merging(*a["plan"])
    assert ((owners >= -1) & (owners < max(1, plan.left))).all()
    assert ((cells >= 0) & (cells < plan.cells)).all()
    places = torch.arange(plan.patches).expand(len(x), -1) if a["cells"] is None else a["cells"]
    before = merging.reowned(torch.arange(plan.patches).expand_as(places), places, a["owners"], plan.cells)
    if torch.equal(before.gather(1, places), torch.arange(plan.patches).expand_as(places)):
        index = owners.gather(1, places)
        means, totals = merging.join(a["x"][:, plan.prefix :].float(), index, plan.left, a["sizes"])
        check(x[:, plan.prefix :], means)
        check(sizes, totals)


class Calls:
    """How many there were, and how many of them were refused."""

    made = refused = 0


@pytest.fixture(autouse=True, scope="module")
def _count() -> Iterator[None]:
    yield
    print(f"\n{Calls.made} calls, {Calls.refused} refused")


def attempt(call: Callable[[], Any], allowed: tuple[type[Exception], ...]) -> Any:
    Calls.made += 1
    try:
        return call()
    except allowed:
        Calls.refused += 1
        return None


def comparable(arguments: Arguments) -> bool:
    tensors = [arguments[name] for name in "qkv"]
    return finite(arguments) and all(x.is_floating_point() and x.numel() > 0 for x in tensors)


# As operators. PyTorch itself refuses what does not fit a signature, or memory ---------------------------------------

OPERATOR = (UserError, RuntimeError, TypeError, NotImplementedError)


def operate(name: str, *arguments: Any) -> Any:
    return attempt(lambda: getattr(torch.ops.attendless, name)(*arguments), OPERATOR)


@given(data=st.data())
@sweep
def test_foveal_operators(data: st.DataObject) -> None:
    shared, rest = data.draw(foveal_problems())
    a = spoiled(data.draw, shared | {"chosen": rest["chosen"]})
    chosen, q, k, v = a.pop("chosen"), a["q"], a["k"], a["v"]
    extras = [a["key_bias"], a["places"], a["layout"], a["scale"]]
    with threads(data.draw(thread_counts)):
        operate("foveal_select", q, k, *extras)
        found = operate("foveal", q, k, v, *extras)
        attended = operate("foveal_attend", q, k, v, *extras, chosen)
        if found is not None:
            operate("foveal_backward", rest["out_grad"], q, k, v, *found, *extras, True)
    for out, cells in [(found and found[0], found and found[2]), (attended and attended[0], chosen)]:
        if out is not None and cells is not None and comparable(a):
            plan = foveal.Layout(*a["layout"])
            floats = [x.float() for x in (q, k, v)]
            bias = None if a["key_bias"] is None else a["key_bias"].float()
            places = None if a["places"] is None else a["places"].long()
            check_foveal(out, floats, cells, plan, scale=a["scale"], key_bias=bias, places=places)


@given(data=st.data())
@sweep
def test_block_operators(data: st.DataObject) -> None:
    shared, rest = data.draw(block_problems())
    a = spoiled(data.draw, shared)
    lists = [a[name] for name in ("query_start", "queries", "key_start", "keys")]
    lists = lists[: data.draw(st.sampled_from([4, 4, 4, 4, 4, 3]))]
    q, k, v, bias, scale = (a[name] for name in ("q", "k", "v", "key_bias", "scale"))
    with threads(data.draw(thread_counts)):
        found = operate("block_attend", q, k, v, bias, lists, scale)
        if found is not None and comparable(a):
            leaves = [x.float().requires_grad_() for x in (q, k, v)]
            expected = dense(a | dict(zip("qkv", leaves, strict=True)), times_seen(a))
            check(found[0], expected.detach())
            seed = rest["out_grad"]
            grads = operate("block_backward", seed, q, k, v, *found, bias, lists, scale, False)
            if q.dtype is torch.float32 and grads is not None:
                for ours, wanted in zip(grads, torch.autograd.grad(expected, leaves, seed), strict=False):
                    check(ours, wanted)


@given(data=st.data())
@sweep
def test_gather_operators(data: st.DataObject) -> None:
    shared, rest = data.draw(gather_problems())
    a = spoiled(data.draw, shared)
    q, k, v, bias, *lists = (a[name] for name in ("q", "k", "v", "key_bias", "indices", "counts", "scale"))
    with threads(data.draw(thread_counts)):
        found = operate("gather_attend", q, k, v, bias, *lists)
        if found is not None:
            operate("gather_backward", rest["out_grad"], q, k, v, *found, bias, *lists, True)
    if found is not None and comparable(a):
        floats = [x.float() for x in (q, k, v)]
        bias = None if bias is None else bias.float()
        check(found[0], gather.attend(*floats, a["indices"], a["counts"], scale=a["scale"], key_bias=bias))


@given(data=st.data())
@sweep
def test_sparsifiner_operators(data: st.DataObject) -> None:
    shared, _ = data.draw(sparsifiner_problems())
    a = spoiled(data.draw, shared)
    with threads(data.draw(thread_counts)):
        choice = [a[name] for name in ("coefficients", "basis", "budget", "prefix", "tau", "top")]
        lists = operate("sparsifiner_select", *choice)
        out = operate("sparsifiner", *a.values())
    if lists is not None:
        indices, counts = lists
        assert ((indices >= 0) & (indices < max(1, indices.shape[2]))).all()
        assert ((counts >= 0) & (counts <= a["budget"])).all()
    if out is not None and comparable(a) and a["share"] is None:
        seen = torch.zeros(*indices.shape[:3], indices.shape[2])
        beyond = torch.arange(indices.shape[3]) >= counts[..., None]
        seen.scatter_add_(3, indices.long(), (~beyond).float())
        seen[:, :, : a["prefix"]] = 1
        check(out, dense(a, seen))


@given(data=st.data())
@sweep
def test_merge_operator(data: st.DataObject) -> None:
    shared, _ = data.draw(merge_problems())
    a = spoiled(data.draw, shared)
    with threads(data.draw(thread_counts)):
        found = operate("merge", *a.values())
    if found is not None and finite(a) and a["x"].is_floating_point():
        check_merged(a, *found)


# Straight into the module --------------------------------------------------------------------------------------------

PROBLEMS = {
    "foveal": foveal_problems,
    "block": block_problems,
    "gather": gather_problems,
    "sparsifiner": sparsifiner_problems,
    "merge": merge_problems,
}


def parameters(op: Operation) -> list[str]:
    """The names of what the module's function of an operation takes, in order."""
    tensors = {tensor.name for tensor in op.tensors} | {attribute.name for attribute in op.attributes}
    return [x.name for x in op.flat if x.name in tensors] + ["threads"] + [result.name for result in op.results]


def raw(name: str, *arguments: Any) -> Any:
    """Call the module's function, with DLPack capsules for tensors. None if it refused."""
    capsules = [to_dlpack(x) if isinstance(x, Tensor) else x for x in arguments]

    def call() -> bool:
        getattr(native.kernels(), name)(*capsules)
        return True

    return attempt(call, (ValueError, TypeError, MemoryError))


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
@given(data=st.data())
@sweep
def test_functions_of_the_module(op: Operation, data: st.DataObject) -> None:
    name, names = op.name, parameters(op)
    shared, rest = data.draw(PROBLEMS[name.split("_")[0]]())
    everything = shared | rest
    number = data.draw(st.sampled_from([-1, 0, 1, 1, 1, 2, 4]))  # not spoiled: far too many have a test of their own
    a = spoiled(data.draw, {x: everything[x] for x in names if x != "threads"})
    done = raw(name, *(number if x == "threads" else a[x] for x in names))
    if done and finite({x: y for x, y in a.items() if "grad" not in x}) and a.get("out", torch.ones(1)).numel():
        if "q" in a and "out" in a and a["q"].dtype is torch.bfloat16:  # then all products are bf16
            a["out"] = a["out"].bfloat16()
        a |= {x: a[x].float() for x in "qkv" if x in a}
        if name == "merge":
            check_merged(a, a["out"], a["sizes_out"], a["cells_out"], a["owners_out"])
        if name == "block_attend":
            check(a["out"], dense(a, times_seen(a)))
        if name == "gather_attend":
            check(
                a["out"],
                gather.attend(
                    a["q"], a["k"], a["v"], a["indices"], a["counts"], scale=a["scale"], key_bias=a["key_bias"]
                ),
            )
        if name in ("foveal", "foveal_attend", "foveal_forward") and a["chosen"] is not None:
            plan, places = foveal.Layout(*a["layout"]), None if a["places"] is None else a["places"].long()
            floats, bias = [a["q"], a["k"], a["v"]], a["key_bias"]
            check_foveal(a["out"], floats, a["chosen"], plan, scale=a["scale"], key_bias=bias, places=places)


# Once for each thing that went wrong before --------------------------------------------------------------------------


def refused(name: str, *arguments: Any) -> None:
    assert raw(name, *arguments) is None


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_places_of_fewer_images_than_there_are() -> None:
    """The places of images that are not there were looked up."""
    two, chosen = zeros(2, 1, 4, 8), torch.zeros(2, 1, 1, 1, dtype=torch.int32)
    refused("foveal_select", two, two, None, ints(0, 1, 2, 3)[None], [2, 2, 0, 2, 2, 0, 1, 0], 1.0, 1, chosen)


@pytest.mark.parametrize("start", [(0, 9, 4), (0, 2**31 - 1, 4), (0, -(2**31), 4), (0, 3, 1, 4)])
def test_lists_that_leave_their_array(start: tuple[int, ...]) -> None:
    q, all_four = zeros(1, 1, 4, 8), ints(0, 1, 2, 3)
    good = ints(*range(len(start) - 1), 4)
    good[0] = 0
    for lists in ((ints(*start), all_four, good, all_four), (good, all_four, ints(*start), all_four)):
        refused("block_attend", q, q, q, None, *lists, 1.0, 1, q.clone(), zeros(1, 1, 4))


def test_sizes_whose_product_wraps() -> None:
    """Products of 32 bits were 0, as is the size of an empty array."""
    many = zeros(1, 1, 1, 1).expand(1 << 16, 1 << 16, 1, 1)
    none = torch.zeros(0, 1, 1, 1, dtype=torch.int32)
    refused("sparsifiner_select", many, zeros(1, 1, 1), 1, 0, 0.0, 0, 1, none, none[..., 0])


def test_sizes_that_are_cut_to_32_bits() -> None:
    q, lse = zeros(1, 1, 1, 8), zeros(1, 1, 1)
    odd = q.expand(2**32 + 1, 1, 1, 8)
    refused("gather_attend", odd, q, q, None, ints(0)[None, None, None], None, 1.0, 1, q.clone(), lse)


@pytest.mark.parametrize(
    "layout",
    [
        [1 << 16, 1 << 16, 1, 1 << 16, 1 << 16, 0, 1, 0],  # 2³² places were none
        [1, 1, 0, 2**31 - 1, 1, 0, 1, 0],  # the cells across a row were fewer than none
        [1, 1, 0, 1, 2**31 - 1, 0, 1, 0],
        [1, 1, 0, 1, 1, 2**31 - 1, 1, 0],
        [2**31 - 1, 2, 2**31 - 1, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 1, 2],  # there is no second order
    ],
)
def test_layouts_that_wrap(layout: list[int]) -> None:
    q = zeros(1, 1, 1, 8)
    refused("foveal_forward", q, q, q, None, None, layout, 1.0, 1, q.clone(), zeros(1, 1, 1), None)
    with pytest.raises(UserError):
        torch.ops.attendless.foveal(q, q, q, None, None, layout, 1.0)


@pytest.mark.parametrize(
    "plan",
    [
        [1 << 16, 1 << 16, 0, 4, 1, 0],  # 2³² cells were none
        [0, 4, 0, 4, 1, 0],  # no cell to stand in
        [2, 2, 2**31, 4, 1, 0],
        [2, 2, 0, 4, 3, 0],  # more than have a partner
        [2, 2, 0, 4, -1, 0],
        [2, 2, 0, 4, 1, -1],
        [2, 2, 0, 4, 1, 2**32],
    ],
)
def test_merging_plans_that_wrap(plan: list[int]) -> None:
    x, cells = zeros(1, 4, 8), torch.zeros(1, 4, dtype=torch.int64)
    refused(
        "merge",
        x,
        x[:, None],
        None,
        None,
        cells,
        None,
        plan,
        0.0,
        1,
        zeros(1, 3, 8),
        zeros(1, 3),
        cells[:, :3].clone(),
        cells,
    )
    with pytest.raises(UserError):
        torch.ops.attendless.merge(x, x, None, None, cells, None, plan, 0.0)


def test_nothing_wide() -> None:
    """Rows of no channels divided by zero, and counted from a null pointer."""
    q, none, lse = zeros(1, 1, 4, 8), zeros(1, 1, 4, 0), zeros(1, 1, 4)
    refused("sparsifiner", none, none, none, None, q, zeros(1, 8, 4), *[None] * 3, 2, 0, 0.0, 0, 1.0, 1, none, lse)
    refused("sparsifiner_select", none, zeros(1, 0, 4), 2, 0, 0.0, 0, 1, ints(*[0] * 8).view(1, 1, 4, 2), lse.int())
    lists = (ints(0, 4), ints(0, 1, 2, 3)) * 2
    for q_, v in ((none, q), (q, none)):
        refused("block_attend", q_, q_, v, None, *lists, 1.0, 1, torch.empty_like(v), lse)
        with pytest.raises(UserError, match="at least one channel"):
            torch.ops.attendless.block_attend(q_, q_, v, None, lists, 1.0)


def test_indices_that_would_wrap() -> None:
    """2³² + 3 is not 3."""
    q, wrap = zeros(1, 1, 4, 8), 2**32
    indices, four = torch.full((1, 1, 4, 2), 3), torch.arange(4)
    for odd in (indices + wrap, indices - wrap):
        with pytest.raises(UserError, match="indices must be tokens"):
            torch.ops.attendless.gather_attend(q, q, q, None, odd, None, 1.0)
    with pytest.raises(UserError, match="counts from 0 to 2"):
        torch.ops.attendless.gather_attend(q, q, q, None, indices, torch.full((1, 1, 4), 1 + wrap), 1.0)
    # Behind the count anything may stand.
    torch.ops.attendless.gather_attend(q, q, q, None, indices + wrap, torch.zeros(1, 1, 4).long(), 1.0)
    with pytest.raises(UserError):
        torch.ops.attendless.foveal(q, q, q, None, four[None] + wrap, [2, 2, 0, 2, 2, 0, 1, 0], 1.0)
    with pytest.raises(UserError, match="ascending"):
        torch.ops.attendless.foveal_attend(
            q, q, q, None, None, [2, 2, 0, 2, 2, 0, 1, 0], 1.0, torch.full((1, 1, 1, 1), wrap)
        )
    start = torch.tensor([0, 4])
    for at in range(4):
        lists = [start, four, start, four]
        lists[at] = lists[at] + wrap
        with pytest.raises(UserError):
            torch.ops.attendless.block_attend(q, q, q, None, lists, 1.0)
    with pytest.raises(UserError, match=r"torch\.float32"):
        torch.ops.attendless.gather_attend(q, q, q, None, indices.float(), None, 1.0)


def test_more_threads_than_there_can_be() -> None:
    q = zeros(1, 1, 4, 8)
    out = q.clone()
    assert raw("gather_attend", q, q, q, None, torch.zeros(1, 1, 4, 1).int(), None, 1.0, 2**31 - 1, out, zeros(1, 1, 4))


def test_a_key_listed_twice_counts_twice() -> None:
    """Also backward, where several rows are added to at once."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind(0)
    keys = ints(*[5, 5, 5, 7, 5, 3, 5] * 9)
    lists = [ints(0, 20), ints(*range(20)), ints(0, len(keys)), keys]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = torch.ops.attendless.block_attend(*leaves, None, lists, SCALE)
    expected = dense(
        {"q": q, "k": k, "v": v, "key_bias": None, "scale": SCALE},
        torch.bincount(keys.long(), minlength=20).float().expand(1, 2, 20, 20),
    )
    check(out, expected)
    seed = torch.randn(out.shape)
    for ours, wanted in zip(
        torch.autograd.grad(out, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True
    ):
        check(ours, wanted)
