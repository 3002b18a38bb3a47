"""Foveal attention through FlexAttention against the definition, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch.nn.attention.flex_attention import flex_attention

from attendless.sparse import foveal
from attendless.sparse.backends import flex
from native_cases import Case, cases, close

#: Uncompiled, it lays out every score; equal results are all that is asked of it here.
uncompiled = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
TWO_BLOCKS = Case(foveal.layout(14, 13, 1, keep=0.1, cell=2, tile=4, coarse=4), 2, 2, 16, 16, False, 1.0, 0)
REDUCED = Case(foveal.layout(14, 13, 1, keep=0.1, cell=2, tile=4, coarse=4), 2, 2, 16, 16, True, 0.7, 0)


def both(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, bias, places = case.tensors()
    scale = case.width**-0.5
    chosen = foveal.select(q, k, case.layout, scale=scale, key_bias=bias, places=places)
    arguments = {"scale": scale, "key_bias": bias, "places": places}
    return (
        flex.attend(q, k, v, chosen, case.layout, **arguments),
        foveal.attend(q, k, v, chosen, case.layout, **arguments),
    )


@uncompiled
@given(case=cases())
@example(case=TWO_BLOCKS)
@example(case=REDUCED)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_function(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    ours, wanted = both(case)
    close(ours, wanted)


def test_blocks_that_hold_nothing_seen_are_left_out() -> None:
    """Every seen pair lies in a listed block, and a sparse choice lists few."""
    layout = foveal.layout(32, 32, 1, keep=0.05, cell=2, tile=4, coarse=4)
    q, k = torch.randn(2, 1, 2, 1025, 16, generator=torch.Generator().manual_seed(0))
    chosen = foveal.select(q, k, layout, scale=0.25)
    tile_of, _ = flex._in_order(foveal.block_of(layout, 4), 1)
    cell_of, _ = flex._in_order(foveal.block_of(layout, 2), 1)
    means = torch.arange(257, 257 + 256 + 64)[None]
    group_of = torch.cat([cell_of, means], dim=1)
    sees = flex._sees(chosen, layout)
    mask = flex._block_mask(sees, tile_of, group_of)
    pairs = sees[:, :, tile_of[0]][..., group_of[0]]
    side = [-(-n // 128) for n in pairs.shape[2:]]
    wanted = torch.zeros(1, 2, side[0] * 128, side[1] * 128, dtype=torch.bool)
    wanted[:, :, : pairs.shape[2], : pairs.shape[3]] = pairs
    wanted = wanted.unflatten(2, (side[0], 128)).unflatten(4, (side[1], 128)).any(5).any(3)
    listed = torch.zeros_like(wanted).scatter(
        3, mask.kv_indices.long(), torch.arange(side[1]) < mask.kv_num_blocks[..., None]
    )
    assert torch.equal(listed, wanted)
    assert listed[:, :, 1:].float().mean() < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_once_for_whatever_is_chosen() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(3):
        case = Case(foveal.layout(16, 16, 1, keep=0.1, cell=2, tile=4, coarse=4), 1, 2, 32, 32, False, 1.0, seed)
        with torch.no_grad():
            close(*both(case), tolerance=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
