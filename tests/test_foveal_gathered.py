"""Foveal attention by gathering computes what its definition does."""

from __future__ import annotations

import pytest
import torch

from attendless.sparse import foveal, foveal_gathered
from attendless.sparse.foveal import Layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(8, 8, 1, 2, 4, 0, 6, 1),
        Layout(8, 8, 0, 2, 2, 0, 5, 0),
        Layout(9, 7, 1, 2, 3, 0, 7, 1),
        Layout(9, 14, 5, 2, 4, 4, 9, 1),
        Layout(8, 12, 0, 2, 4, 8, 4, 0),
        Layout(7, 5, 2, 4, 2, 0, 4, 1),
        Layout(6, 6, 1, 2, 2, 0, 9, 1),
    ],
    ids=str,
)
def test_it_is_foveal_attention(layout: Layout) -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, layout.tokens, width, generator=draws) for width in (16, 16, 24))
    chosen = foveal.select(q, k, layout, scale=0.3)
    expected = foveal.attend(q, k, v, chosen, layout, scale=0.3)
    torch.testing.assert_close(foveal_gathered.attend(q, k, v, layout, scale=0.3), expected, atol=1e-5, rtol=1e-5)


def test_it_pays_where_queries_share_few_keys() -> None:
    assert foveal_gathered.pays(foveal.layout(64, 64, 1, keep=0.1))
    assert not foveal_gathered.pays(foveal.layout(14, 14, 1, keep=0.1, tile=1))
    assert not foveal_gathered.pays(foveal.layout(14, 14, 1, keep=0.9, tile=4))
