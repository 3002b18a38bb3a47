"""Sparsifiner's fused attention, against loops over its definition."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from attendless.errors import UserError
from attendless.sparse import native
from attendless.sparse.operations import gather as gather_attend
from native_cases import close, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401

pytestmark = needs_kernels
SCALE = 0.2


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: everything but the numbers in the tensors, which come from `seed`."""

    batch: int = 2
    heads: int = 3
    tokens: int = 50
    ranks: int = 7
    budget: int = 13
    prefix: int = 1
    width: int = 64
    value_width: int = 64
    dense: float = 0.3  # share of the coefficients, and of the basis, that is not 0
    levels: int = 0  # different values of the numbers that are not 0; few make ties; 0: any
    biased: bool = True
    tail: bool = True
    own: bool = False  # a basis for each image, and shares
    seed: int = 0
    threads: int = 1

    def tensors(self) -> dict[str, Tensor | None]:
        random = torch.Generator().manual_seed(self.seed)
        B, H, N, R = self.batch, self.heads, self.tokens, self.ranks
        images = (B,) if self.own else ()

        def sparse(*shape: int) -> Tensor:
            x = torch.rand(*shape, generator=random) + 0.01
            if self.levels:  # eighths add up exactly, in any order
                x = torch.randint(1, self.levels + 1, shape, generator=random) / 8
            return x * (torch.rand(*shape, generator=random) < self.dense)

        q, k = torch.randn(B, N, 2, H, self.width, generator=random).permute(2, 0, 3, 1, 4)
        return {
            "q": q,
            "k": k,
            "v": torch.randn(B, H, N, self.value_width, generator=random),
            "key_bias": 3 * torch.rand(B, N, generator=random) if self.biased else None,
            "coefficients": sparse(B, H, N, R),
            "basis": sparse(*images, R, N),
            "tail_scores": torch.randn(B, H, N, R, generator=random) if self.tail else None,
            "tail_values": torch.randn(B, H, R, self.value_width, generator=random) if self.tail else None,
            # Of 64 parts: what is left of an average is a difference, and must not be one of rounding errors.
            "share": torch.randint(65, (*images, N, R), generator=random) / 64 if self.tail else None,
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(1, 70))
    return Case(
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        tokens=tokens,
        ranks=draw(st.integers(1, 34)),
        budget=draw(st.integers(1, tokens)),
        prefix=draw(st.integers(0, min(6, tokens))),
        width=draw(st.sampled_from([1, 8, 16, 24, 33, 64, 2000])),  # wide rows are attended to by ranges of keys
        value_width=draw(st.sampled_from([1, 5, 16, 40, 64, 1500])),
        dense=draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])),
        levels=draw(st.sampled_from([0, 1, 3])),
        biased=draw(st.booleans()),
        tail=draw(st.booleans()),
        own=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        threads=draw(thread_counts),
    )


def chosen(connectivity: list[float], budget: int) -> list[int]:
    best = sorted(range(len(connectivity)), key=lambda j: (-connectivity[j], j))
    return sorted(j for j in best[:budget] if connectivity[j] > 0)


def connectivities(t: dict) -> Tensor:
    """Coefficients × basis in 64 bits: [B, H, N, N]."""
    basis = t["basis"].double()
    return t["coefficients"].double() @ (basis if basis.ndim == 2 else basis[:, None])


def definition(t: dict, lists: dict[tuple, list[int]], prefix: int) -> Tensor:
    """One query at a time, in plain Python, over the keys given."""
    B, H, N, R = t["coefficients"].shape
    out = torch.zeros(B, H, N, t["v"].shape[3])
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, N))).tolist():
        keys = range(N) if i < prefix else lists[b, h, i]
        bias = [0.0] * N if t["key_bias"] is None else t["key_bias"][b].tolist()
        score = [SCALE * float(t["q"][b, h, i] @ t["k"][b, h, j]) + bias[j] for j in keys]
        value = [t["v"][b, h, j] for j in keys]
        if t["share"] is not None and i >= prefix:
            outside = sorted(set(range(N)) - set(keys))
            for r in range(R):
                left = float(t["share"].expand(B, N, R)[b, outside, r].sum())
                if left > 0:
                    score.append(float(t["tail_scores"][b, h, i, r]) + math.log(left))
                    value.append(t["tail_values"][b, h, r])
        weight = [math.exp(s) for s in score]
        for w, x in zip(weight, value, strict=True):
            out[b, h, i] += w / sum(weight) * x
    return out


def select(t: dict, case: Case, tau: float = 0.0, top: int = 0) -> tuple[Tensor, Tensor]:
    return native.functions.sparsifiner_select(t["coefficients"], t["basis"], case.budget, case.prefix, tau, top)


def arguments(t: dict, case: Case, tau: float = 0.0, top: int = 0) -> tuple:
    tail = (t["tail_scores"], t["tail_values"], t["share"])
    heads = (t["q"], t["k"], t["v"], t["key_bias"], t["coefficients"], t["basis"])
    return (*heads, *tail, case.budget, case.prefix, tau, top, SCALE)


def as_lists(indices: Tensor, counts: Tensor) -> dict[tuple, list[int]]:
    where = torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist()
    return {(b, h, i): indices[b, h, i, : counts[b, h, i]].tolist() for b, h, i in where}


@given(case=cases())
@example(case=Case(tokens=1, budget=1, prefix=0))
@example(case=Case(tokens=1, budget=1, prefix=1))
@example(case=Case(tokens=70, budget=70, dense=1.0))
@example(case=Case(dense=0.0))
@example(case=Case(own=True))
@example(case=Case(tokens=197, budget=20, batch=1, ranks=32, levels=1))
@example(case=Case(batch=1, tokens=120, budget=40, width=1000))
@example(case=Case(batch=1, tokens=100, budget=100, dense=1.0, value_width=1000))
@sweep
def test_chooses_and_attends_as_defined(path: str, case: Case) -> None:
    t = case.tensors()
    with threads(case.threads):
        indices, counts = select(t, case)
        out = native.functions.sparsifiner(*arguments(t, case))
    lists = as_lists(indices, counts)
    if case.levels:  # exact sums, so the choice is the definition's own, ties included
        connectivity = connectivities(t).tolist()
        for (b, h, i), found in lists.items():
            assert found == (chosen(connectivity[b][h][i], case.budget) if i >= case.prefix else [])
    else:
        check_choice(t, lists, case)
    assert (indices >= 0).all()
    assert (indices < case.tokens).all()
    close(out, definition(t, lists, case.prefix), tolerance=1e-5)


def check_choice(t: dict, lists: dict[tuple, list[int]], case: Case) -> None:
    """Up to rounding, nothing left out connects more than what was taken, and everything that can be taken is."""
    connectivity = connectivities(t)
    for (b, h, i), found in lists.items():
        row = connectivity[b, h, i]
        assert len(found) == (min(case.budget, int((row > 0).sum())) if i >= case.prefix else 0)
        assert found == sorted(set(found))
        if found:
            left = row.clone()
            left[found] = -1
            assert row[found].min() > 0
            assert row[found].min() >= left.max() * (1 - 1e-5)


def test_large_and_on_many_threads(path: str) -> None:
    case = Case(batch=1, tokens=700, ranks=32, budget=70, dense=0.2, prefix=5)
    t = case.tensors()
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append((native.functions.sparsifiner(*arguments(t, case)), *select(t, case)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
    check_choice(t, as_lists(*runs[0][1:]), case)


def test_is_its_two_halves_and_dense_where_it_can_see_everything(path: str) -> None:
    case = Case(tail=False, prefix=0)
    t = case.tensors()
    attended = gather_attend(t["q"], t["k"], t["v"], *select(t, case), scale=SCALE, key_bias=t["key_bias"])
    close(native.functions.sparsifiner(*arguments(t, case)), attended)
    case = dataclasses.replace(case, budget=50, dense=1.0, biased=False, prefix=2)
    t = case.tensors()
    full = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], scale=SCALE)
    close(native.functions.sparsifiner(*arguments(t, case)), full)
    tail = {"tail_scores": torch.zeros(2, 3, 50, 7), "tail_values": torch.ones(2, 3, 7, 64)}
    # Everything was chosen, so nothing is left of any share but rounding.
    close(native.functions.sparsifiner(*arguments({**t, **tail, "share": torch.rand(50, 7)}, case)), full)


def test_small_coefficients_count_as_nothing(path: str) -> None:
    case = Case(dense=1.0)
    t = case.tensors()
    cut = {**t, "coefficients": t["coefficients"] * (t["coefficients"] > 0.5)}
    assert torch.equal(select(t, case, tau=0.5)[0], select(cut, case)[0])
    assert torch.equal(
        native.functions.sparsifiner(*arguments(t, case, 0.5)), native.functions.sparsifiner(*arguments(cut, case))
    )


@given(case=cases(), top=st.integers(1, 40), low=st.sampled_from([1e-2, 1e-12, 1e-40]))
@example(case=Case(tokens=9, budget=4, ranks=3, dense=1.0, levels=1), top=2, low=1e-2)  # all equal: all are largest
@sweep
def test_only_the_largest_coefficients_count(path: str, case: Case, top: int, low: float) -> None:
    t = case.tensors()
    if not case.levels:  # as far apart as softmax makes them
        t["coefficients"] = t["coefficients"] ** 8 * low
    least = t["coefficients"].topk(min(top, case.ranks)).values[..., -1:]
    cut = {**t, "coefficients": t["coefficients"].where(t["coefficients"] >= least, 0)}
    assert all(torch.equal(x, y) for x, y in zip(select(t, case, top=top), select(cut, case), strict=True))
    assert torch.equal(
        native.functions.sparsifiner(*arguments(t, case, top=top)), native.functions.sparsifiner(*arguments(cut, case))
    )


def test_takes_any_strides(path: str) -> None:
    case = Case()
    t = case.tensors()
    wanted = native.functions.sparsifiner(*arguments(t, case))
    for change in (
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    ):
        views = {name: change(x) if x is not None and x.ndim == 4 else x for name, x in t.items()}
        views["share"] = t["share"].T.contiguous().T
        assert torch.equal(native.functions.sparsifiner(*arguments(views, case)), wanted)
        assert all(torch.equal(x, y) for x, y in zip(select(views, case), select(t, case), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", ["coefficients", "basis"])
def test_what_is_not_a_number_stays_where_it_is(path: str, where: str, value: float) -> None:
    case = Case(tail=False)
    t = case.tensors()
    odd = {**t, where: t[where].masked_fill(t[where] > 0.9, value)}
    indices, counts = select(odd, case)
    assert ((indices >= 0) & (indices < case.tokens)).all()
    assert ((counts >= 0) & (counts <= case.budget)).all()
    assert native.functions.sparsifiner(*arguments(odd, case)).isfinite().all()
    if where == "coefficients":  # rows without any are as they were
        same = (odd[where] == t[where]).all(-1)
        assert torch.equal(indices[same], select(t, case)[0][same])


def test_says_what_is_wrong() -> None:
    case = Case()
    t = case.tensors()

    def attempt(basis: Tensor, budget: int = 5) -> None:
        native.functions.sparsifiner_select(t["coefficients"], basis, budget, 1, 0.0, 0)

    with pytest.raises(UserError, match="budget must be from 1 to 50, got 51"):
        attempt(t["basis"], budget=51)
    for wrong in (t["basis"][:-1], t["basis"][:, :-1], t["basis"].T, t["basis"].expand(3, -1, -1)):
        with pytest.raises(UserError, match="a row for each coefficient and a column for each token"):
            attempt(wrong)
    with pytest.raises(UserError, match="come together or not at all"):
        native.functions.sparsifiner(*arguments({**t, "share": None}, case))
    with pytest.raises(UserError, match=r"share must be \[tokens, ranks\]"):
        native.functions.sparsifiner(*arguments({**t, "share": t["share"].T}, case))


# As operators --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operators_keep_pytorchs_rules() -> None:
    case = Case(tokens=9, budget=3)
    for t in (case.tensors(), dataclasses.replace(case, tail=False, biased=False).tensors()):
        torch.library.opcheck(torch.ops.attendless.sparsifiner, arguments(t, case))
        torch.library.opcheck(torch.ops.attendless.sparsifiner_select, (t["coefficients"], t["basis"], 3, 1, 0.0, 2))


def test_has_no_gradient_and_says_so() -> None:
    case = Case()
    t = case.tensors()
    t["v"].requires_grad_()
    with torch.no_grad():
        assert not torch.ops.attendless.sparsifiner(*arguments(t, case)).requires_grad
    out = torch.ops.attendless.sparsifiner(*arguments(t, case))
    with pytest.raises(UserError, match="it is for inference"):
        out.sum().backward()


def test_autocast_computes_in_single_precision() -> None:
    case = Case()
    t = case.tensors()
    low = {name: x.bfloat16() if name in "qkv" else x for name, x in t.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.ops.attendless.sparsifiner(*arguments(low, case))
    wide = {name: x.float() if name in "qkv" else x for name, x in low.items()}
    assert torch.equal(out, native.functions.sparsifiner(*arguments(wide, case)))


def test_operations_are_counted() -> None:
    case = Case(value_width=40)
    t = case.tensors()
    with FlopCounterMode(display=False) as counter:
        torch.ops.attendless.sparsifiner(*arguments(t, case))
    choosing = 49 * 7 * 50
    assert counter.get_total_flops() == 2 * 2 * 3 * (choosing + (49 * 13 + 50) * (64 + 40) + 49 * 7 * 40)
