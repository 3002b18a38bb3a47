"""Cross-covariance attention against loops over channels, against timm's XCiT, and its local patch interaction."""

from __future__ import annotations

import pytest
import torch
from timm.models.xcit import LPI
from timm.models.xcit import XCA as TimmXCA
from torch import Tensor

from attendless import Attention, Context, Grid, UserError, create
from attendless.backbones.columnar import Columnar
from attention_checks import assert_equals, build


def reference(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """One channel at a time: its scores with all channels, then the mixture of their values."""
    plain, D = module.options.plain, q.shape[-1]
    channels = []
    for i in range(D):
        scores = []
        for j in range(D):
            a, b = q[..., i], k[..., j]
            if plain:
                scores.append((a * b).sum(-1) / grid.tokens**0.5)
            else:
                cosine = (a * b).sum(-1) / (a.square().sum(-1).sqrt() * b.square().sum(-1).sqrt())
                scores.append(module.temperature[:, 0, 0] * cosine)
        weights = torch.softmax(torch.stack(scores, -1), -1)
        channels.append(sum(weights[..., j, None] * v[..., j] for j in range(D)))
    return torch.stack(channels, -1)


@pytest.mark.parametrize("spec", ["xca", "xca:plain"])
@pytest.mark.parametrize("grid", [Grid(4, 5), Grid(3, 3, 2)], ids=str)
def test_equals_the_reference(spec: str, grid: Grid) -> None:
    assert_equals(build(spec, grid), grid, reference)


def test_timms_xca() -> None:
    theirs = TimmXCA(32, 4, qkv_bias=True).eval()
    torch.nn.init.uniform_(theirs.temperature, 0.5, 2)
    grid = Grid(5, 6, 1)
    ours = create("xca", 32, 4, grid=grid).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, grid.tokens, 32)
    torch.testing.assert_close(ours(x, Context(grid))[0], theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["xca", "xca:plain"])
def test_a_merged_token_counts_as_many_as_it_stands_for(spec: str) -> None:
    whole, merged = Grid(1, 6), Grid(1, 6, cells=torch.tensor([[0, 1, 2]]), sizes=torch.tensor([[3, 1, 2]]))
    module = build(spec, whole)
    few = torch.randn(1, 3, 16)
    many = few.repeat_interleave(torch.tensor([3, 1, 2]), dim=1)
    expected = module(many, Context(whole))[0][:, [0, 3, 4]]
    torch.testing.assert_close(module(few, Context(merged))[0], expected, atol=1e-5, rtol=1e-5)


def test_local_patch_interaction_is_xcits_and_leaves_prefix_tokens_alone() -> None:
    theirs, grid = LPI(16).eval(), Grid(4, 6, 1)
    theirs.bn.running_mean.normal_()
    theirs.bn.weight.data.normal_()
    module = build("xca:lpi", grid)
    module.lpi.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(2, grid.tokens, 16)
    y = module.refine(x, Context(grid))
    patches = x[:, 1:]
    torch.testing.assert_close(y[:, 1:], patches + theirs(module.lpi.norm(patches), 4, 6), atol=1e-5, rtol=1e-5)
    assert torch.equal(y[:, :1], x[:, :1])


def test_local_patch_interaction_runs_in_a_model_after_the_residual() -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 0}
    model = Columnar(**sizes, attention="xca:lpi").eval()
    block = model.blocks[0]
    x, context = model.embed(torch.randn(1, 3, 32, 32))
    y = x + block.attn(block.norm1(x), context)[0]
    patches = y[:, 1:]
    y = torch.cat([y[:, :1], patches + block.attn.lpi(patches, context.grid)], dim=1)
    torch.testing.assert_close(block(x, context)[0], y + block.mlp(block.norm2(y)))


def test_local_patch_interaction_costs_two_depthwise_convolutions_and_needs_all_patches() -> None:
    grid = Grid(4, 4, 1)
    with_it, without = create("xca:lpi", 16, 2, grid=grid), create("xca", 16, 2, grid=grid)
    assert with_it.macs(grid).total - without.macs(grid).total == 2 * 16 * 9 * 16
    reduced = Grid(4, 4, 1, cells=torch.arange(9)[None])
    assert without.refuses(reduced) is None
    with pytest.raises(UserError, match="needs every patch in its place"):
        with_it.check(reduced)


def test_the_map_shows_each_tokens_share_in_the_covariance() -> None:
    grid = Grid(3, 3)
    module = build("xca", grid)
    x = torch.randn(1, 9, 16)
    x[:, 4] = 0
    module.qkv.bias.data.zero_()
    shown = module.map(x, Context(grid))
    assert shown.shape == (1, 2, 9, 9)
    torch.testing.assert_close(shown.sum(-1), torch.ones(1, 2, 9))
    assert (shown[..., 4] == 0).all(), "a token without content adds nothing"
    assert torch.equal(shown[:, :, 0], shown[:, :, 8])


@pytest.mark.parametrize("spec", ["xca", "xca:plain"])
def test_fp16_does_not_overflow(spec: str) -> None:
    grid = Grid(64, 64)
    module = build(spec, grid).half()
    q = torch.full((1, 2, grid.tokens, 8), 40.0, dtype=torch.float16)
    out, _ = module.attend(q, q, q, Context(grid))
    torch.testing.assert_close(out, q)
