"""`rank`: the least important patches merge into the most similar of the others, in a whole model against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attendless import UserError, execution
from attendless.attention import Context, Grid
from attendless.attention.provided import POOLED, class_attention
from attendless.backbones import Columnar
from attendless.convert import convert
from attendless.tokens import create_reducers, parse_tokens
from native_cases import needs_kernels

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 7}


def merged_by_loops(x: Tensor, weight: Tensor, sizes: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """One image x [N, C]: of the 1.5 r patches with the least weight (at most 35 % of all, or r), the r that are most
    similar to one of the others, less 0.1 log weight, join it."""
    patches = list(range(prefix, len(x)))
    most = min(round(1.5 * r), max(r, int(0.35 * len(patches))))
    candidates = sorted(patches, key=lambda i: (float(weight[i]), -i))[:most]
    others = [i for i in patches if i not in candidates]
    pairs = []
    for i in candidates:
        cosines = {j: float(torch.cosine_similarity(x[i], x[j], dim=0)) for j in others}
        partner = max(others, key=lambda j: cosines[j])
        pairs.append((cosines[partner] - 0.1 * math.log(weight[i]), i, partner))
    joins = {i: partner for _, i, partner in sorted(pairs, reverse=True)[:r]}
    rows, total = [*x[:prefix]], []
    for kept in [i for i in sorted(candidates) if i not in joins] + others:
        group = [kept, *(i for i, partner in joins.items() if partner == kept)]
        share = weight[group] / weight[group].sum()
        mean, length = share @ x[group], share @ x[group].norm(dim=1)
        rows.append(mean * min(2.0, float(length / mean.norm())))
        total.append(sum(float(sizes[j - prefix]) for j in group))
    return torch.stack(rows), torch.tensor(total)


def logits_by_loops(model: Columnar, images: Tensor, schedule: list[int]) -> Tensor:
    """A ViT's logits with `rank`, one image at a time, from its weights."""
    found = []
    for image in images:
        x = model.patch_embed(image[None]).flatten(0, 1)
        x = torch.cat([model.cls_token[0], x]) + model.pos_embed[0]
        sizes = torch.ones(len(x) - 1)
        for block, r in zip(model.blocks, schedule, strict=True):
            y, attn = block.norm1(x), block.attn
            q, k, v = attn.qkv(y).reshape(len(x), 3, attn.num_heads, attn.head_dim).permute(1, 2, 0, 3)
            bias = torch.cat([torch.zeros(1), sizes.log()])
            weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(attn.head_dim) + bias, dim=-1)
            x = x + attn.proj((weights @ v).transpose(0, 1).flatten(1))
            x, sizes = merged_by_loops(x, weights[:, 0].mean(0), sizes, r, prefix=1)
            x = x + block.mlp(block.norm2(x))
        found.append(model.head(model.norm(x)[0]))
    return torch.stack(found)


@pytest.fixture(scope="module")
def model() -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**SHAPE, attention="full").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("policy", ["off", pytest.param("native", marks=needs_kernels)])
def test_a_model_equals_loops_over_its_images(model: Columnar, policy: str) -> None:
    images = torch.randn(3, 3, 32, 32)
    fast = convert(model, tokens="rank:r=0/5/3/0").eval()
    with torch.inference_mode(), execution(policy):
        torch.testing.assert_close(fast(images), logits_by_loops(model, images, [0, 5, 3, 0]), atol=2e-5, rtol=1e-4)


def test_one_patch_at_least_remains(model: Columnar) -> None:
    fast = convert(model, tokens="rank:r=99").eval()
    with torch.inference_mode():
        counts = [step.x.shape[1] for step in fast.walk(*fast.embed(torch.randn(1, 3, 32, 32)))]
    assert counts == [17, 2, 2, 2, 2]


def test_patches_that_remain_can_be_joined() -> None:
    """A layer that removes many patches has no more candidates than it merges: all others are there to be joined."""
    _, reducer = create_reducers(parse_tokens("rank:r=0/70"), 24, 12, 2).popitem()
    assert [reducer.plan(Grid(*side)).sources for side in ((10, 10), (20, 20), (40, 40))] == [70, 105, 105]


def test_schedules_and_layers() -> None:
    spec = parse_tokens("rank:keep=0.25,start=1,until=3")
    assert spec is not None
    assert sorted(create_reducers(spec, 24, 12, 4)) == [1, 2, 3]
    default = parse_tokens("rank:r=8")
    assert default is not None
    assert sorted(create_reducers(default, 24, 12, 12)) == [*range(2, 12)], (
        "the first sixth of the layers is left alone"
    )
    assert sorted(create_reducers(default.replace(r=(0, 3, *[0] * 10)), 24, 12, 12)) == [1]
    assert sorted(create_reducers(default.replace(start=0), 24, 12, 12)) == [*range(12)]
    with pytest.raises(UserError, match="rank:until=4 does not fit the model"):
        create_reducers(spec.replace(until=4), 24, 12, 4)
    with pytest.raises(UserError, match="rank:r=1/2/3 names 3 layers, but the model has 4"):
        create_reducers(spec.replace(r=(1, 2, 3), until=0), 24, 12, 4)


def test_without_a_class_token_patches_are_ranked_by_the_attention_they_receive() -> None:
    draws = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, 3, 48, 8, generator=draws)
    found = class_attention(q, k, Grid(6, 8), scale=0.3)
    runs = q.reshape(2, 3, POOLED, 3, 8).mean(3)
    expected = torch.softmax(0.3 * runs @ k.transpose(2, 3), dim=-1).mean(2)
    torch.testing.assert_close(found, expected)
    few = class_attention(q[:, :, :12], k[:, :, :12], Grid(3, 4), scale=0.3)
    received = torch.softmax(0.3 * q[:, :, :12] @ k[:, :, :12].transpose(2, 3), dim=-1).mean(2)
    torch.testing.assert_close(few, received)


def test_frames_are_one_tall_grid_and_windows_stay_apart() -> None:
    spec = parse_tokens("rank:r=6,window=2")
    assert spec is not None
    reducer = create_reducers(spec, 8, 4, 1)[0]
    grid = Grid(4, 4, prefix=1, depth=2)
    x = torch.randn(2, 33, 8)
    out, context = reducer(x, Context(grid, class_attention=torch.rand(2, 2, 33)))
    owners = context.grid.owners
    assert out.shape == (2, 27, 8)
    assert context.grid.depth == 2
    assert owners is not None
    for image in range(2):
        cells = context.grid.cells[image, owners[image]]  # the cell of the token that represents each cell
        rows, columns = torch.arange(32) // 4, torch.arange(32) % 4
        assert torch.equal(cells // 4 // 2, rows // 2)
        assert torch.equal(cells % 4 // 2, columns // 2)
