"""Cross-covariance attention against loops over channels, against timm's XCiT, and its local patch interaction."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from timm.layers import DropPath, LayerScale
from timm.models.xcit import LPI, XCABlock
from timm.models.xcit import XCA as TimmXCA
from torch import Tensor, nn

from attendless import (
    Attention,
    Context,
    Grid,
    UserError,
    create,
)
from attendless.backbones import Columnar, Pyramid
from attendless.backbones.block import Block
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


def test_a_whole_block_of_xcits_from_its_weights() -> None:
    """LayerScale on all three branches: the backbone's two, and γ₃ here."""
    norm, grid = partial(nn.LayerNorm, eps=1e-6), Grid(4, 6)
    theirs = XCABlock(16, 2, qkv_bias=True, eta=0.5, norm_layer=norm).eval()
    for value in (*theirs.parameters(), theirs.local_mp.bn.running_mean):
        value.data.add_(0.3 * torch.randn_like(value))
    attn = create("xca:lpi,gamma=1", 16, 2, grid=grid)
    ours = Block(attn, norm(16), norm(16), theirs.mlp, ls1=LayerScale(16), ls2=LayerScale(16))
    names = {"norm3.": "attn.lpi.norm.", "local_mp.": "attn.lpi.", "gamma3": "attn.lpi.gamma3"}
    names |= {"gamma1": "ls1.gamma", "gamma2": "ls2.gamma"}
    weights = theirs.state_dict()
    for old, new in names.items():
        weights = {name.replace(old, new) if name.startswith(old) else name: value for name, value in weights.items()}
    ours.load_state_dict(weights)
    x = torch.randn(2, 24, 16)
    torch.testing.assert_close(ours.eval()(x, Context(grid))[0], theirs(x, 4, 6), atol=1e-5, rtol=1e-5)


def test_gamma_scales_the_local_patch_interaction_and_only_that() -> None:
    grid, x = Grid(4, 4, 1), torch.randn(1, 17, 16)
    plain, scaled = create("xca:lpi", 16, 2, grid=grid).eval(), create("xca:lpi,gamma=0.25", 16, 2, grid=grid).eval()
    assert set(scaled.state_dict()) - set(plain.state_dict()) == {"lpi.gamma3"}
    scaled.load_state_dict(plain.state_dict(), strict=False)
    change = plain.refine(x, Context(grid)) - x
    torch.testing.assert_close(scaled.refine(x, Context(grid)) - x, 0.25 * change, atol=1e-6, rtol=1e-5)
    with pytest.raises(UserError, match=r"gamma=1\.0 needs lpi"):
        create("xca:gamma=1", 16, 2, grid=grid)


@pytest.mark.parametrize(("spec", "dropped"), [("xca:lpi,gamma=1", True), ("xca:lpi", False)])
def test_xcits_form_drops_its_branch_as_often_as_the_blocks_others(spec: str, dropped: bool) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "num_heads": 2, "num_classes": 0, "drop_path_rate": 0.5}
    column = Columnar(**sizes, embed_dim=16, depth=3, attention=spec)
    row = Pyramid(**{**sizes, "num_heads": (2,)}, embed_dims=(16,), depths=(3,), attention=spec)
    for model in (column, row):
        rates = [m.drop_prob for block in model.blocks for m in block.attn.modules() if isinstance(m, DropPath)]
        assert rates == ([0.0, 0.25, 0.5] if dropped else [])
    lpi, grid = row.blocks[2].attn.lpi.train(), Grid(4, 4)
    out = lpi(torch.randn(200, 16, 16), grid)
    share = (out == 0).all(dim=(1, 2)).float().mean() if dropped else 0
    assert (0.3 < share < 0.7) == dropped


@pytest.mark.parametrize("spec", ["xca", "xca:plain", "xca:lpi,gamma=1"])
def test_double_precision_is_kept(spec: str) -> None:
    grid, merged = Grid(2, 3, 1), Grid(2, 3, 1, cells=torch.tensor([[0, 1]]), sizes=torch.tensor([[3, 1]]))
    module = build(spec, grid, dim=8).double()
    for where in [grid] if module.options.lpi else [grid, merged]:
        x = torch.randn(2 if where is grid else 1, where.tokens, 8, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(lambda x, where=where: module(x, Context(where))[0], x)
    if module.options.lpi:
        torch.autograd.gradcheck(lambda x: module.refine(x, Context(grid)), x)
    assert module.map(x, Context(where)).dtype == torch.float64


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
