"""Attention over each query's own list of keys, against loops over the definition and PyTorch's gradients."""

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
from attendless.sparse import execution, gather, native, operations
from native_cases import close, every_path, needs_kernels, sweep, thread_counts, threads  # noqa: F401


@dataclasses.dataclass(frozen=True)
class Lists:
    """A problem: everything but the numbers in the tensors, which come from `seed`."""

    batch: int = 2
    heads: int = 3
    tokens: int = 50
    longest: int = 13
    width: int = 64
    value_width: int = 64
    biased: bool = True
    counted: bool = True
    repeats: bool = True
    seed: int = 0
    threads: int = 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """q, k, v, key_bias, indices, counts. q and k are views of a packed tensor, as a model makes them."""
        random = torch.Generator().manual_seed(self.seed)
        B, H, N = shape = (self.batch, self.heads, self.tokens)
        q, k = torch.randn(B, N, 2, H, self.width, generator=random).permute(2, 0, 3, 1, 4)
        v = torch.randn(*shape, self.value_width, generator=random)
        bias = 3 * torch.rand(B, N, generator=random) if self.biased else None
        indices = torch.rand(*shape, N, generator=random).argsort(-1)[..., : self.longest]
        if self.repeats:
            indices = torch.randint(N, (*shape, self.longest), generator=random)
        counts = torch.randint(self.longest + 1, shape, generator=random) if self.counted else None
        return q, k, v, bias, indices.int(), None if counts is None else counts.int()


@st.composite
def problems(draw: st.DrawFn, most: int = 200) -> Lists:
    tokens = draw(st.integers(1, 40) | st.integers(1, most))
    repeats = draw(st.booleans())
    return Lists(
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        tokens=tokens,
        longest=draw(st.integers(0, 60 if repeats else tokens)),
        width=draw(st.sampled_from([1, 8, 16, 24, 33, 64, 128])),
        value_width=draw(st.sampled_from([1, 5, 16, 40, 64, 128])),
        biased=draw(st.booleans()),
        counted=draw(st.booleans()),
        repeats=repeats,
        seed=draw(st.integers(0, 2**16)),
        threads=draw(thread_counts),
    )


def attend(problem: tuple, scale: float = 0.2) -> Tensor:
    q, k, v, bias, indices, counts = problem
    return gather.attend(q, k, v, indices, counts, scale=scale, key_bias=bias)


@given(lists=problems(most=40))
@example(lists=Lists(tokens=1, longest=0))
@sweep
def test_the_reference_is_its_definition(lists: Lists) -> None:
    """One query at a time, in plain Python."""
    q, k, v, bias, indices, counts = problem = lists.tensors()
    expected = torch.zeros(*q.shape[:3], v.shape[3])
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = indices[b, h, i, : lists.longest if counts is None else counts[b, h, i]].tolist()
        score = [0.2 * float(q[b, h, i] @ k[b, h, j]) + (0 if bias is None else float(bias[b, j])) for j in seen]
        weight = [math.exp(s) for s in score]
        for w, j in zip(weight, seen, strict=True):
            expected[b, h, i] += w / sum(weight) * v[b, h, j]
    close(attend(problem), expected, tolerance=1e-5)


@needs_kernels
@given(lists=problems())
@example(lists=Lists())
@example(lists=Lists(tokens=1, longest=1))
@example(lists=Lists(tokens=197, longest=197, batch=1, counted=False, repeats=False))
@sweep
def test_attends_and_differentiates_as_defined(path: str, lists: Lists) -> None:
    q, k, v, bias, indices, counts = lists.tensors()
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias) if x is not None]
    q, k, v, bias = [*leaves, None][:4]
    expected = attend((q, k, v, bias, indices, counts))
    with threads(lists.threads):
        out, lse = native.functions.gather_attend(q, k, v, bias, indices, counts, 0.2)
    close(out, expected)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, leaves, seed)
    with threads(lists.threads):
        ours = native.functions.gather_backward(seed, q, k, v, out, lse, bias, indices, counts, 0.2, bias is not None)
    for gradient, truth in zip(ours[: len(leaves)], wanted, strict=True):
        close(gradient, truth, tolerance=5e-5)


@needs_kernels
def test_every_key_listed_is_full_attention(path: str) -> None:
    q, k, v, _, indices, _ = Lists(longest=50, repeats=False).tensors()
    out, lse = native.functions.gather_attend(q, k, v, None, indices, None, 0.125)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, torch.logsumexp(0.125 * q @ k.transpose(-2, -1), -1), atol=2e-6, rtol=1e-6)


@needs_kernels
def test_takes_any_strides(path: str) -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    wanted, _ = native.functions.gather_attend(*(x.contiguous() for x in (q, k, v)), bias, indices, counts, 0.125)
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    sliced = [torch.cat([x, x], 3)[..., : x.shape[3]] for x in (q, k, v)]
    wide = torch.cat([indices, indices], 3)[..., : indices.shape[3]]
    for views in (columns, sliced):
        assert torch.equal(native.functions.gather_attend(*views, bias, wide.long(), counts, 0.125)[0], wanted)


@needs_kernels
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_shows_as_in_dense(path: str, where: str, value: float) -> None:
    tensors = dict(zip("qkv", (x.clone() for x in Lists().tensors()[:3]), strict=True))
    tensors[where][0, 1, 37, 5] = value
    q, k, v = tensors.values()
    indices = Lists(longest=50, repeats=False).tensors()[4]
    out, _ = native.functions.gather_attend(q, k, v, None, indices, None, 0.125)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), equal_nan=True, atol=2e-6, rtol=1e-5)


@needs_kernels
def test_huge_scores(path: str) -> None:
    q, k, v, _, indices, counts = Lists().tensors()
    out, _ = native.functions.gather_attend(300 * q, k, v, None, indices, counts, 1.0)
    expected = attend((300 * q, k, v, None, indices, counts), scale=1.0)
    torch.testing.assert_close(out, expected, atol=3e-3, rtol=0)  # scores of 10⁴ carry errors of 10⁻³


@needs_kernels
def test_keys_that_stand_for_nothing_vanish(path: str) -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    bias[:, :25] = -torch.inf
    close(
        native.functions.gather_attend(q, k, v, bias, indices, counts, 0.2)[0], attend((q, k, v, bias, indices, counts))
    )
    nothing = torch.full_like(bias, -torch.inf)
    out, lse = native.functions.gather_attend(q, k, v, nothing, indices, counts, 0.2)
    assert (out == 0).all(), "as PyTorch's own attention does"
    assert (lse == -torch.inf).all()
    grads = native.functions.gather_backward(
        torch.ones_like(out), q, k, v, out, lse, nothing, indices, counts, 0.2, True
    )
    assert all((g == 0).all() for g in grads)


@needs_kernels
def test_same_numbers_every_time_and_on_any_number_of_threads(path: str) -> None:
    q, k, v, bias, indices, counts = Lists(tokens=130).tensors()

    def everything() -> list[Tensor]:
        out, lse = native.functions.gather_attend(q, k, v, bias, indices, counts, 0.125)
        return [out, lse, *native.functions.gather_backward(out, q, k, v, out, lse, bias, indices, counts, 0.125, True)]

    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(everything())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


@needs_kernels
def test_beyond_the_count_anything_may_stand(path: str) -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    wanted, _ = native.functions.gather_attend(q, k, v, bias, indices, counts, 0.2)
    beyond = torch.arange(indices.shape[3]) >= counts[..., None]
    odd = indices.masked_fill(beyond, -7)
    assert torch.equal(native.functions.gather_attend(q, k, v, bias, odd, counts, 0.2)[0], wanted)
    close(attend((q, k, v, bias, odd, counts)), wanted)


@needs_kernels
def test_says_what_is_wrong() -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    for odd in (indices - 50, indices + 50, indices.clone().fill_(2**31 - 1)):
        with pytest.raises(UserError, match="indices must be tokens, from 0 to 49, and counts from 0 to 13"):
            native.functions.gather_attend(q, k, v, bias, odd, None, 0.2)
    for odd in (counts + 14, counts - 14):
        with pytest.raises(UserError, match="counts from 0 to 13"):
            native.functions.gather_attend(q, k, v, bias, indices, odd, 0.2)
    with pytest.raises(UserError, match=r"indices must be \[batch, heads, tokens, keys\]"):
        native.functions.gather_attend(q, k, v, bias, indices[:, :1], counts, 0.2)
    with pytest.raises(UserError, match=r"counts must be \[batch, heads, tokens\]"):
        native.functions.gather_attend(q, k, v, bias, indices, counts[:1], 0.2)


@pytest.mark.parametrize("policy", ["auto", "torch"])
def test_queries_and_keys_of_different_numbers_are_refused_with_their_shapes(policy: str) -> None:
    q, k, v, _, indices, counts = Lists().tensors()
    with (
        execution(policy),
        pytest.raises(UserError, match=r"q \[2, 3, 50, 64\], k \[2, 3, 49, 64\].* as many queries"),
    ):
        operations.gather(q, k[:, :, :-1], v[:, :, :-1], indices, scale=0.2)
    with execution(policy), pytest.raises(UserError, match=r"counts \[1, 3, 50\] were given"):
        operations.gather(q, k, v, indices, counts[:1], scale=0.2)


@needs_kernels
def test_a_refusal_of_a_kernel_shows_the_shapes() -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    with pytest.raises(UserError, match=r"; given q \[2, 3, 50, 64\], k \[2, 3, 49, 64\], v \[2, 3, 50, 64\]"):
        native.functions.gather_attend(q, k[:, :, :-1], v, bias, indices, counts, 0.2)


def test_operations_of_the_definition_are_counted() -> None:
    q, k, v, _, indices, _ = Lists(value_width=40).tensors()
    with FlopCounterMode(display=False) as counter, execution("torch"):
        operations.gather(q, k, v, indices, scale=0.2)
    assert counter.get_total_flops() == 2 * indices.numel() * (64 + 40)


# As an operator ------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_keeps_pytorchs_rules() -> None:
    q, k, v, bias, indices, counts = Lists(tokens=9).tensors()
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v, bias))
    torch.library.opcheck(torch.ops.attendless.gather_attend, (*leaves, indices, counts, 0.2))
    torch.library.opcheck(torch.ops.attendless.gather_attend, (*leaves[:3], None, indices, None, 0.2))


def test_the_function_is_the_same_whoever_computes_it() -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]

    def everything() -> list[Tensor]:
        out = operations.gather(*leaves[:3], indices, counts, scale=0.2, key_bias=leaves[3])
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    ours = everything()
    with execution("torch"):
        theirs = everything()
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, tolerance=5e-5)


def test_gradients_of_the_reference_by_differences() -> None:
    q, k, v, bias, indices, counts = Lists(batch=1, heads=2, tokens=5, longest=4, width=3, value_width=2).tensors()
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, bias)]
    assert torch.autograd.gradcheck(lambda *x: attend((*x, indices, counts)), leaves)


@needs_kernels
def test_autocast_computes_in_single_precision() -> None:
    q, k, v, bias, indices, counts = Lists().tensors()
    low = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = torch.ops.attendless.gather_attend(*low, bias, indices, counts, 0.2)
    assert torch.equal(out, native.functions.gather_attend(*(x.float() for x in low), bias, indices, counts, 0.2)[0])


@needs_kernels
def test_operations_are_counted() -> None:
    q, k, v, _, indices, counts = Lists(value_width=40).tensors()
    q.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out, _ = torch.ops.attendless.gather_attend(q, k, v, None, indices, counts, 0.2)
    assert forward.get_total_flops() == 2 * int(counts.sum()) * (64 + 40)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * int(counts.sum()) * (3 * 64 + 2 * 40)
