"""Sparsifiner against its equations written out with loops; its start, its weights on other grids, its cost."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from attendless import (
    Columnar,
    Context,
    Grid,
    UserError,
    create,
)
from attendless.attention import averages
from attendless.attention.averages import budget
from attendless.sparse import basis, execution, native, topk

GRID = Grid(4, 5, 1)


def layer(options: str = "", grid: Grid = GRID, **arguments):
    torch.manual_seed(0)
    made = create(f"sparsifiner:rank=6,{options}".rstrip(","), 16, 2, grid=grid, **arguments)
    for weight in made.predictor().values():  # off its start, and of both signs
        weight.data += 0.05 * torch.randn_like(weight)
    return made


def slow_choice(module, q, k) -> torch.Tensor:
    """Equations 1 to 3 for one head of one image, number by number: which keys each query keeps."""
    N, D = q.shape
    R, options = len(module.down), module.options
    released = options.variant == "released"
    scale = D**-0.5
    if released:
        q, k = (F.linear(x, m.weight, m.bias) for x, m in ((q, module.q_reduce), (k, module.k_reduce)))
        scale = module.num_heads**-0.5
    keep = math.ceil(options.keep * N)
    mask = torch.zeros(N, N, dtype=torch.bool)
    least = {"paper": 0.01, "released": 0.02}[options.variant] if options.basis == "auto" else options.basis
    for i in range(N):
        if i < GRID.prefix:
            mask[i] = True
            continue
        logits = [scale * sum(q[i] @ k[j] * module.down[r, j] for j in range(N)) for r in range(R)]
        weights = [math.exp(value.item()) for value in logits]
        a = [value / sum(weights) for value in weights]
        top = options.top or (8 if released else 0)
        floor = sorted(a)[-min(top, R)] if top else None
        a = [x if (x >= floor if top else x > options.tau) else 0.0 for x in a]
        score = []
        for j in range(N):
            column = [abs(w) if released else w for w in module.up[:, j].tolist()]
            score.append(sum(x * w for x, w in zip(a, column, strict=True) if w > least))
        order = sorted(range(N), key=lambda j: (-score[j], j))[:keep]
        mask[i, [j for j in order if released or score[j] > 0]] = True
    return mask


def slow_attend(module, q, k, v, mask) -> torch.Tensor:
    """The output for one head of one image, given the keys kept."""
    N, D = q.shape
    out = torch.zeros_like(v)
    average = basis.pooling(GRID.height, GRID.width, GRID.prefix, len(module.down))[0].double()
    share = (average > 0).double()
    for i in range(N):
        keys = [j for j in range(N) if mask[i, j]]
        if module.options.softmax == "full":
            weight = torch.softmax(q[i] @ k.T * D**-0.5, 0)
            out[i] = sum(weight[j] * v[j] for j in keys)
            continue
        scores, values = [q[i] @ k[j] * D**-0.5 for j in keys], [v[j] for j in keys]
        if module.options.rest == "pooled" and i >= GRID.prefix:
            for r in range(len(average)):
                left = sum(share[r, j] for j in range(N) if j not in keys)
                if left > 1e-4 * share[r].sum():
                    scores.append(q[i] @ (average[r] @ k) * D**-0.5 + torch.log(left))
                    values.append(average[r] @ v)
        if scores:
            out[i] = torch.softmax(torch.stack(scores), 0) @ torch.stack(values)
    return out


@pytest.mark.parametrize(
    "options",
    [
        "keep=0.3", "keep=0.3,rest=pooled", "keep=0.1,tau=0.2", "keep=0.3,softmax=full", "keep=0.9,basis=0.1",
        "keep=0.2,top=2", "keep=0.3,variant=released", "keep=0.3,variant=released,top=3,rest=pooled", "keep=1",
    ],
)  # fmt: skip
def test_against_the_equations(options: str) -> None:
    """Same mask, same output, same gradients."""
    module = layer(options).double().eval()
    x = torch.randn(2, GRID.tokens, 16, dtype=torch.double, requires_grad=True)
    q, k, v = module.project(x)
    expected = torch.stack(
        [torch.stack([slow_choice(module, q[b, h], k[b, h]) for h in range(2)]) for b in range(2)]
    ).detach()
    assert torch.equal(module.select(q, k, GRID), expected)

    out, _ = module.attend(q, k, v, Context(GRID))
    slow = torch.stack(
        [
            torch.stack([slow_attend(module, q[b, h], k[b, h], v[b, h], expected[b, h]) for h in range(2)])
            for b in range(2)
        ]
    )
    torch.testing.assert_close(out, slow)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), x, retain_graph=True)
    wanted = torch.autograd.grad((slow * weight).sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(not native.available, reason=native.reason or "the kernels are there")
@pytest.mark.parametrize("options", ["keep=0.3", "keep=0.3,rest=pooled", "keep=0.1,tau=0.2", "keep=0.2,top=2"])
@pytest.mark.parametrize("learns", ["nothing", "backbone", "everything"])
def test_every_backend_computes_the_same(options: str, learns: str) -> None:
    """In the kernel, from lists and by masks; without gradients, with those of the backbone, and with all."""
    module = layer(options)
    for weight in module.predictor().values():
        weight.requires_grad_(learns == "everything")
    wanted = [module.qkv.weight] if learns == "backbone" else [module.qkv.weight, module.down, module.up]
    x, weight = torch.randn(3, GRID.tokens, 16), torch.randn(3, GRID.tokens, 16)
    found = {}
    for name in ("native", "torch"):
        y = x.clone().requires_grad_(learns != "nothing")
        with execution(name), torch.set_grad_enabled(learns != "nothing"):
            assert module.choice(GRID).backend == name
            out = module(y, Context(GRID))[0]
            gradients = torch.autograd.grad((out * weight).sum(), [y, *wanted]) if learns != "nothing" else ()
        found[name] = (out.detach(), *gradients)
    for ours, theirs in zip(found["native"], found["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_the_budget() -> None:
    """The paper's second table: kept keys of 197 at each keep rate."""
    rates = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)
    assert [budget(rate, Grid(14, 14, 1)) for rate in rates] == [178, 158, 138, 119, 99, 79, 60, 40, 20, 10, 2]
    assert budget(0.7, Grid(2, 5)) == 7  # 0.7 · 10 is a little more than 7 in floating point
    assert budget(0.0, Grid(2, 5)) == 1


def test_it_starts_as_a_blurred_map() -> None:
    """Untrained, it must find most of what the exact choice would, far more than chance does."""
    torch.manual_seed(0)
    grid = Grid(8, 8, 1)
    module = create("sparsifiner:rank=17,keep=0.25", 32, 2, grid=grid)
    # Keys that vary smoothly over the grid, as those of images do.
    field = F.interpolate(torch.randn(1, 32, 3, 3), (8, 8), mode="bicubic")[0].flatten(1).T
    x = torch.cat([torch.randn(1, 32), 3 * field])[None]
    q, k, _ = module.project(x)
    true = torch.softmax(module.scale * q @ k.transpose(-2, -1), -1)
    exact = topk.largest(true, budget(0.25, grid), prefix=1)
    found = module.select(q, k, grid)

    def mass(mask: torch.Tensor) -> float:
        return (true * mask)[:, :, 1:].sum(-1).mean().item()

    assert mass(found) > 0.8 * mass(exact)
    assert mass(found) > mass(found[..., torch.randperm(grid.tokens)]) + 0.1


@pytest.mark.parametrize("loss", ["mse", "divergence"])
def test_prediction_loss_trains_the_predictor_alone(loss: str) -> None:
    module = layer(f"l1=0.5,loss={loss}")
    x, context = torch.randn(3, GRID.tokens, 16), Context(GRID)
    target = torch.softmax(torch.randn(3, 2, GRID.tokens, GRID.tokens), -1)
    found = module.map_loss(x, target, context)
    found.backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {"down", "up"}
    q, k, _ = module.project(x)
    a, total = module.coefficients(q, k, GRID), 0.0
    for b in range(3):
        for h in range(2):
            for i in range(1, GRID.tokens):
                for j in range(GRID.tokens):
                    s, t = sum(a[b, h, i] * module.up[:, j]), target[b, h, i, j]
                    p = sum(a[b, h, i] * module.up[:, j].clamp(min=0))
                    total += ((s - t) ** 2 if loss == "mse" else p - t * torch.log(p + 1e-6)).item()
    expected = total / (3 * 2 * GRID.patches) + 0.5 * module.up.abs().sum()
    torch.testing.assert_close(found, expected.detach().float(), rtol=1e-4, atol=1e-5)


def test_everything_kept_is_full_attention() -> None:
    grid = Grid(3, 4, 2)
    module = create("sparsifiner:rank=5,keep=1,tau=0,basis=0", 16, 2, grid=grid)
    module.up.data += 0.01  # no zeros to discard
    full = create("full", 16, 2, grid=grid)
    full.load_state_dict({name: value for name, value in module.state_dict().items() if name not in module.predictor()})
    x = torch.randn(2, grid.tokens, 16)
    torch.testing.assert_close(module(x, Context(grid))[0], full(x, Context(grid))[0])


def test_weights_on_another_grid() -> None:
    """An average stays an average, a bump keeps its height, and moving there for good computes the same."""
    module, other = layer("keep=0.3"), Grid(6, 9, 1)
    down = basis.resample(module.down, (4, 5), (6, 9), keep_sums=True)
    torch.testing.assert_close(down[:, 1:].sum(1), module.down[:, 1:].sum(1))
    torch.testing.assert_close(down[:, :1], module.down[:, :1])
    flat = basis.resample(torch.full((2, 21), 0.3), (4, 5), (6, 9), keep_sums=False)
    torch.testing.assert_close(flat, torch.full((2, 55), 0.3))
    x = torch.randn(2, other.tokens, 16)
    before = module(x, Context(other))[0]
    module.resize(other)
    torch.testing.assert_close(module(x, Context(other))[0], before)


def test_a_choice_that_can_be_learned() -> None:
    """Forwards the choice itself; backwards what its documentation says, number by number."""
    torch.manual_seed(0)
    scores = torch.rand(2, 3, 5, 7, dtype=torch.double).requires_grad_()
    some = topk.largest(scores.detach(), 3, prefix=1)
    found = topk.learnable(some, scores, prefix=1)
    assert torch.equal(found, some.double())
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    for b in range(2):
        for h in range(3):
            assert not scores.grad[b, h, 0].any()  # a prefix query sees everything: nothing to choose
            for i in range(1, 5):
                log = [math.log(s + 1e-5) for s in scores[b, h, i].tolist()]
                edge = min(log[j] for j in range(7) if some[b, h, i, j])
                chance = [1 / (1 + math.exp(-(x - edge) / 0.1)) for x in log]
                slope = [c * (1 - c) / 0.1 for c in chance]
                g = weight[b, h, i].tolist()
                mean = sum(s * x for s, x in zip(slope, g, strict=True)) / sum(slope)
                for j in range(7):
                    expected = slope[j] * (g[j] - mean) / (scores[b, h, i, j].item() + 1e-5)
                    assert scores.grad[b, h, i, j].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_key_that_was_not_chosen_knows_what_it_would_change(pooled: bool) -> None:
    """The gradient of the choice itself, against differences."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 13, 4, dtype=torch.double)
    some = topk.largest(q @ k.transpose(-2, -1), 4, prefix=1).double().requires_grad_()
    rest = basis.rest(3, 4, 1, 5, q) if pooled else None
    assert torch.autograd.gradcheck(lambda c: topk.attend(q, k, v, c, scale=0.5, rest=rest, prefix=1), some)


def test_the_predictor_learns_from_what_the_attention_is_for() -> None:
    """No maps: it is told only how far the output is from full attention's, and chooses better keys for it."""
    module = layer("keep=0.3,tau=0,basis=0")
    x = torch.randn(16, GRID.tokens, 16)
    with torch.no_grad():
        full = F.scaled_dot_product_attention(*module.project(x))
    before = [weight.clone() for weight in module.parameters()]
    module.requires_grad_(False)
    optimiser = torch.optim.Adam([weight.requires_grad_() for weight in module.predictor().values()], lr=5e-3)
    losses = []
    for _ in range(60):
        out, _ = module.attend(*module.project(x), Context(GRID))
        losses.append((out - full).square().mean())
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.85 * losses[0]
    learned = {id(weight) for weight in module.predictor().values()}
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(old, new) == (id(new) not in learned)


@pytest.mark.parametrize("shape", [(14, 14, 31), (24, 24, 31), (4, 5, 5), (3, 20, 7), (7, 2, 14), (1, 9, 4)])
def test_cells_cover_the_grid(shape: tuple[int, int, int]) -> None:
    height, width, count = shape
    found = basis.cells(*shape)
    assert len(found) == height * width
    assert sorted(set(found)) == list(range(count))
    sizes = torch.bincount(torch.tensor(found))
    assert sizes.max() <= 4 * sizes.min()


def test_the_rest_counts_every_token_once() -> None:
    rest = basis.rest(5, 6, 1, 8, torch.zeros(1))
    nobody = torch.zeros(1, 1, 31, 31, dtype=torch.bool)
    torch.testing.assert_close(rest.mass(nobody).sum(-1), torch.full((1, 1, 31), 31.0))
    assert rest.mass(~nobody).sum() == 0


def test_macs_follow_the_papers_slope() -> None:
    """Each key more costs two products of a head's width for every patch and head: 12 · 2 · 384 · 196 over DeiT-S."""
    grid = Grid(14, 14, 1)
    made = [create(f"sparsifiner:keep={keep}", 384, 6, grid=grid) for keep in (20 / 197, 60 / 197)]
    few, many = (module.core_macs(grid) for module in made)
    assert 12 * (many - few) == 40 * 12 * 2 * 384 * 196


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match="rank=5 must be above 5"):
        create("sparsifiner:rank=5", 16, 2, grid=Grid(4, 4, 5))
    with pytest.raises(UserError, match="made for 1 prefix"):
        layer()(torch.randn(1, 20, 16), Context(Grid(4, 5, 0)))
    with pytest.raises(UserError, match="rank 7"):
        layer().take_predictor({"down": torch.zeros(7, 21), "up": torch.zeros(7, 21)}, GRID)


def test_what_is_kept_for_a_grid_serves_whoever_comes_next() -> None:
    """The first to ask may be evaluating, or building a model without memory."""
    grid = Grid(5, 7, 1)
    x = torch.randn(2, grid.tokens, 16)
    with torch.inference_mode(), torch.device("meta"):
        basis.rest(5, 7, 1, 9, torch.empty(1))
    module = create("sparsifiner:rank=9,rest=pooled", 16, 2, grid=grid)
    with torch.inference_mode():
        module.eval()(x, Context(grid))
    module.train()(x, Context(grid))[0].sum().backward()
    assert module.qkv.weight.grad.abs().sum() > 0


# Where tokens were dropped or merged ---------------------------------------------------------------------------------


def reduced(kind: str) -> Grid:
    """Two images of GRID, 20 patches each, of which 8 are left: every cell with an owner of its own choosing, merged
    with what they count for, fused without; dropped cells belong to nobody."""
    draws = torch.Generator().manual_seed(3)
    cells = torch.stack([torch.randperm(20, generator=draws)[:8] for _ in range(2)])
    owners = torch.randint(0, 8, (2, 20), generator=draws) if kind != "dropped" else torch.full((2, 20), -1)
    owners = owners.scatter(1, cells, torch.arange(8).expand(2, 8))
    sizes = torch.stack([torch.bincount(one, minlength=8) for one in owners]).double() if kind == "merged" else None
    return Grid(GRID.height, GRID.width, GRID.prefix, cells=cells, sizes=sizes, owners=owners)


def stand_in(module, grid: Grid, image: int) -> SimpleNamespace:
    """The module with the weights it has for the tokens left of one image, each column summed by hand."""
    rank, P = len(module.down), grid.prefix
    down, up = (torch.zeros(rank, grid.tokens, dtype=torch.double) for _ in range(2))
    mass = torch.zeros(rank, dtype=torch.double)
    for token in range(grid.tokens):
        cells = [token] if token < P else [P + c for c in range(20) if grid.owners[image, c] == token - P]
        counts = 1 if token < P or grid.sizes is None else float(grid.sizes[image, token - P])
        for r in range(rank):
            down[r, token] = counts * sum(float(module.down[r, c]) for c in cells) / len(cells)
            mass[r] += counts * sum(abs(float(module.down[r, c])) for c in cells) / len(cells)
            up[r, token] = counts * sum(w for c in cells if (w := float(module.up[r, c])) > 0.01) / len(cells)
    down *= (module.down.abs().sum(1) / mass)[:, None].detach()
    left = min(grid.tokens, math.ceil(module.options.keep * GRID.tokens))
    options = dataclasses.replace(module.options, keep=left / grid.tokens, basis=0.0)
    return SimpleNamespace(down=down, up=up, options=options, num_heads=module.num_heads)


@pytest.mark.parametrize("kind", ["merged", "fused", "dropped"])
@pytest.mark.parametrize("options", ["keep=0.2", "keep=0.3,tau=0.1", "keep=0.9"])
@torch.no_grad()
def test_reduced_grids_against_the_equations(kind: str, options: str) -> None:
    module, grid = layer(options).double().eval(), reduced(kind)
    x = torch.randn(2, grid.tokens, 16, dtype=torch.double)
    q, k, v = module.project(x)
    out, _ = module.attend(q, k, v, Context(grid))
    chosen = module.select(q, k, grid)
    assert chosen.shape == (2, 2, 9, 9)
    for b in range(2):
        weights = stand_in(module, grid, b)
        bias = [0.0] * 9 if grid.sizes is None else [0.0, *(math.log(s) for s in grid.sizes[b].tolist())]
        for h in range(2):
            mask = slow_choice(weights, q[b, h], k[b, h])
            assert torch.equal(chosen[b, h], mask)
            for i in range(9):
                keys = [j for j in range(9) if mask[i, j]]
                scores = [q[b, h, i] @ k[b, h, j] * 8**-0.5 + bias[j] for j in keys]
                expected = torch.softmax(torch.stack(scores), 0) @ v[b, h, keys]
                torch.testing.assert_close(out[b, h, i], expected)


@pytest.mark.parametrize("kind", ["merged", "fused", "dropped"])
@pytest.mark.parametrize("options", ["keep=0.3", "keep=0.3,rest=pooled"])
def test_on_reduced_grids_every_backend_computes_the_same(kind: str, options: str) -> None:
    """Where all may be compared: what is computed, and what is learned from it."""
    module, grid = layer(options), reduced(kind)
    grid = dataclasses.replace(grid, sizes=None if grid.sizes is None else grid.sizes.float())
    x, weight = torch.randn(2, grid.tokens, 16), torch.randn(2, grid.tokens, 16)
    found = []
    for name in ("torch", "native"):
        with execution(name):
            assert module.choice(grid).backend == (name if native.available else "torch")
            with torch.no_grad():
                still = module(x, Context(grid))[0]
            module.zero_grad()
            out = module(x, Context(grid))[0]
            (out * weight).sum().backward()
        found.append([still, out.detach(), module.qkv.weight.grad.clone(), module.up.grad.clone()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_that_are_alike_may_merge() -> None:
    """The guess is the same before and after, and what connects to copies connects to the one that stands for them."""
    module = layer("basis=0").double()
    pairs = torch.arange(20) // 2
    grid = Grid(4, 5, 1, cells=2 * torch.arange(10)[None], sizes=torch.full((1, 10), 2.0), owners=pairs[None])
    few = torch.randn(1, 2, 11, 8, dtype=torch.double)
    many = torch.cat([few[:, :, :1], few[:, :, 1:].repeat_interleave(2, dim=2)], dim=2)
    merged, whole = module.coefficients(few, few, grid), module.coefficients(many, many, GRID)
    torch.testing.assert_close(merged[:, :, 1:], whole[:, :, 1::2])
    apart = module.connectivity(many, many, GRID)[:, :, 1::2, 1:]
    torch.testing.assert_close(module.connectivity(few, few, grid)[:, :, 1:, 1:], apart[..., ::2] + apart[..., 1::2])


@torch.no_grad()
def test_the_rest_counts_what_merged_tokens_stand_for() -> None:
    found = averages.rest(reduced("merged"), 6, torch.zeros(1, dtype=torch.double))
    nobody = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    torch.testing.assert_close(found.mass(nobody).sum(-1), torch.full((2, 1, 9), 21.0, dtype=torch.double))
    torch.testing.assert_close(found.average.sum(-1), torch.ones(2, 1, 6, dtype=torch.double))


def test_a_budget_shrinks_with_the_tokens_and_grows_back() -> None:
    """The authors' code stores the smaller budget, which then stays for whole grids too."""
    module, grid = layer("keep=0.9").double(), reduced("dropped")
    x = torch.randn(2, 21, 16, dtype=torch.double)
    before = module(x, Context(GRID))[0]
    module(torch.randn(2, 9, 16, dtype=torch.double), Context(grid))
    assert torch.equal(module(x, Context(GRID))[0], before)
    assert [module.guess(one).budget for one in (grid, GRID)] == [9, 19]


@pytest.mark.parametrize(
    "attention", ["sparsifiner:rank=5,keep=0.3", "sparsifiner:rank=5,rest=pooled", "topk:keep=0.3"]
)
@pytest.mark.parametrize("tokens", ["tome:r=3", "evit:keep=0.5,at=0", "dynamicvit:keep=0.5,at=1"])
def test_composed_with_token_reduction(attention: str, tokens: str) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = Columnar(**sizes, attention=attention, tokens=tokens)
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert model.blocks[1].attn.qkv.weight.grad.abs().sum() > 0
    with torch.no_grad():
        together, alone = model.eval()(images), torch.cat([model(images[:1]), model(images[1:])])
    torch.testing.assert_close(together, alone)
    assert [row.grid.tokens for row in model.costs()][-1] < 17


def test_on_a_large_grid_it_starts_with_something_to_choose_from() -> None:
    """Weights over more patches must not all fall below what counts as zero."""
    grid = Grid(40, 40, 1)
    layer = create("sparsifiner:keep=0.1,top=8", 8, 1, grid=grid)
    q, k = torch.randn(2, 1, 1, grid.tokens, 8).unbind(0)
    seen = layer.select(q, k, grid).sum(-1)[:, :, 1:]
    assert seen.float().mean() > 0.95 * layer.guess(grid).budget
