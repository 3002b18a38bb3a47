"""What the tests of the native kernels share: every instruction set, random problems, and the way to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from attendless.sparse import foveal, native

#: How random problems are drawn. Slow builds of the kernels try fewer.
sweep = settings(
    max_examples=int(os.environ.get("ATTENDLESS_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
#: Mostly one: more than there are processors wait for each other.
thread_counts = st.sampled_from([1, 1, 1, 1, 2, 3, 4])
needs_kernels = pytest.mark.skipif(not native.available, reason=native.reason or "the kernels are here")


@pytest.fixture(name="path", params=native.instruction_sets() or ["none"])
def every_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test that asks for it runs once on every instruction set this machine has."""
    with native.forced(request.param):
        yield request.param


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Case:
    """A foveal problem: everything but the numbers in the tensors, which come from `seed`."""

    layout: foveal.Layout
    batch: int
    heads: int
    width: int
    value_width: int
    biased: bool
    reduced: float  # share of patches that are left; 1 for a full grid
    seed: int
    threads: int = 1

    @property
    def sizes(self) -> list[int]:
        return list(dataclasses.astuple(self.layout))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v, key_bias, places. q and k are views of a packed tensor, as a model makes them."""
        generator = torch.Generator().manual_seed(self.seed)
        left = max(1, round(self.reduced * self.layout.patches))
        N = self.layout.prefix + left
        packed = torch.randn(self.batch, N, 2, self.heads, self.width, generator=generator)
        q, k = packed.permute(2, 0, 3, 1, 4)
        v = torch.randn(self.batch, self.heads, N, self.value_width, generator=generator)
        bias = 3 * torch.rand(self.batch, N, generator=generator) if self.biased else None
        places = torch.rand(self.batch, self.layout.patches, generator=generator).argsort(1)[:, :left]
        return q, k, v, bias, places if self.reduced < 1 else None


@st.composite
def cases(draw: st.DrawFn, longest: int = 11) -> Case:
    sides = st.integers(1, longest) | st.integers(longest, 2 * longest)
    height, width = draw(sides), draw(sides)
    cell = draw(st.integers(1, 4))
    layout = foveal.layout(
        height,
        width,
        draw(st.sampled_from([0, 1, 2, 6])),
        keep=draw(st.sampled_from([0.0, 0.1, 0.3, 1.0])),
        cell=cell,
        tile=draw(st.integers(1, 6)),
        coarse=cell * draw(st.integers(0, 3)),
        order=draw(st.integers(0, 1)),
    )
    return Case(
        layout,
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        width=draw(st.sampled_from([1, 8, 16, 24, 33, 64, 128])),
        value_width=draw(st.sampled_from([1, 5, 16, 40, 64, 128])),
        biased=draw(st.booleans()),
        reduced=draw(st.sampled_from([1.0, 1.0, 0.5])),
        seed=draw(st.integers(0, 2**16)),
        threads=draw(thread_counts),
    )


def close(ours: Tensor, reference: Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to the rounding of sums of such numbers."""
    torch.testing.assert_close(ours, reference, atol=tolerance * max(1.0, reference.abs().max().item()), rtol=1e-5)
