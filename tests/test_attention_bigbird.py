"""BigBird against its papers' rules, read off token by token, and against full attention where it covers everything."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attendless import Context, Grid, UserError, create
from attendless.attention.bigbird import BigBird, BigBirdOptions, bigbird_pattern, bigbird_plan
from attendless.attention.full import full
from attendless.attention.registry import parse

SEVEN = {
    "R": {"window": 0, "globals": 0},
    "W": {"random": 0, "globals": 0},
    "G": {"window": 0, "random": 0},
    "RW": {"globals": 0},
    "RG": {"window": 0},
    "WG": {"random": 0},
    "RWG": {},
}


def dense(layer: BigBird, x: Tensor, mask: Tensor) -> Tensor:
    """The layer computed with a mask over the full map; rows without a key are zeros."""
    q, k, v = layer.project(x)
    scores = (layer.scale * q @ k.transpose(-2, -1)).masked_fill(~mask, -torch.inf)
    return layer.merge(torch.nan_to_num(scores.softmax(-1)) @ v)


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5)),
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3)).filter(any),
    st.integers(1, 5),
    st.sampled_from(["2d", "1d"]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_the_layer_equals_its_dense_mask(
    shape: tuple[int, int, int], counts: tuple[int, int, int], block: int, form: str, seed: int
) -> None:
    torch.manual_seed(seed)
    grid = Grid(*shape)
    options = BigBirdOptions(*counts, block=block, form=form, seed=seed)
    layer = BigBird(16, 2, grid=grid, options=options).double()
    x = torch.randn(2, grid.tokens, 16, dtype=torch.float64, requires_grad=True)
    mask = layer.pattern(grid).mask()
    assert mask.any(-1).all(), "every query sees something"
    assert mask[:, : grid.prefix].all()
    assert mask[:, :, : grid.prefix].all()
    assert layer.core_macs(grid) == 2 * 8 * int(mask.expand(2, -1, -1).sum())

    ours, theirs = layer(x, Context(grid))[0], dense(layer, x, mask)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    inputs, weight = (x, layer.qkv.weight), torch.randn_like(x)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
    # In single precision, as it is used.
    single = layer.float()(x.detach().float(), Context(grid))[0]
    torch.testing.assert_close(single, theirs.detach().float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", ["window=9", "globals=99", "random=99", "form=1d,window=99", "form=1d,globals=99"])
@pytest.mark.parametrize("prefix", [0, 3])
def test_covering_everything_is_full_attention(options: str, prefix: int) -> None:
    grid = Grid(9, 10, prefix)
    layer = create(f"bigbird:{options}", 16, 2, grid=grid)
    x = torch.randn(2, grid.tokens, 16)
    reference = layer.merge(full(*layer.project(x), scale=layer.scale))
    torch.testing.assert_close(layer(x, Context(grid))[0], reference, atol=1e-6, rtol=1e-5)
    assert layer.core_macs(grid) == create("full", 16, 2, grid=grid).core_macs(grid)


def test_the_seven_variants_on_the_grid() -> None:
    """12 × 12 patches in 9 blocks would be all window; 16 × 24 in 24 blocks leaves room for each part."""
    masks = {name: bigbird_pattern(16, 24, 1, BigBirdOptions(**off), 3, 7).mask() for name, off in SEVEN.items()}
    prefix = torch.zeros(385, 385, dtype=torch.bool)
    prefix[0] = prefix[:, 0] = True
    row, column = np.divmod(np.arange(384), 24)
    block = torch.from_numpy(row // 4 * 6 + column // 4)
    y, x = block // 6, block % 6
    near = ((y[:, None] - y).abs() <= 1) & ((x[:, None] - x).abs() <= 1)
    hub = (block == 0) | (block == 23)  # opposite corners
    window, hubs = prefix.clone(), prefix.clone()
    window[1:, 1:] |= near
    hubs[1:, 1:] |= hub[:, None] | hub
    assert torch.equal(masks["W"][0], window)
    assert torch.equal(masks["G"][0], hubs)
    assert torch.equal(masks["WG"][0], window | hubs)
    for name in ("R", "RW", "RG", "RWG"):
        rest = {"": prefix, "W": window, "G": hubs, "WG": window | hubs}[name[1:]]
        drawn = masks[name] & ~rest
        assert torch.equal(masks[name], rest | drawn)
        # Three whole blocks of 16 keys for every query that does not see all anyway, and each head its own.
        counts = drawn.sum(-1)[:, 1:]
        assert (counts[:, ~hub] == 48).all() if "G" in name else (counts == 48).all()
        assert not torch.equal(drawn[0], drawn[1])
    assert len({mask.expand(3, -1, -1).numpy().tobytes() for mask in masks.values()}) == 7


# The papers' form ----------------------------------------------------------------------------------------------------


def big_bird_mask(tokens: int, block: int, drawn: list[list[int]]) -> Tensor:
    """BigBird's mask of one head: window of three, first and last row and column, and the blocks each row drew."""
    number = torch.arange(tokens) // block
    a, b, last = number[:, None], number[None, :], number[-1]
    mask = ((a - b).abs() <= 1) | (a == 0) | (a == last) | (b == 0) | (b == last)
    for query, keys in enumerate(drawn):
        for key in keys:
            mask |= (a == query) & (b == key)
    return mask


def drawn_blocks(mask: Tensor, block: int) -> list[list[int]]:
    """What is visible beyond window and ends, per query block, read off its first query."""
    found = []
    last = -(-len(mask) // block) - 1
    for a in range(last + 1):
        seen = {int(j) // block for j in mask[a * block].nonzero()}
        found.append(sorted(seen - {a - 1, a, a + 1, 0, last}) if a not in (0, last) else [])
    return found


@pytest.mark.parametrize(("shape", "prefix"), [((23, 23), 1), ((14, 14), 1), ((5, 7), 0), ((11, 11), 5)])
def test_the_papers_form_is_big_birds_mask(shape: tuple[int, int], prefix: int) -> None:
    tokens = shape[0] * shape[1] + prefix
    pattern = bigbird_pattern(*shape, prefix, BigBirdOptions(form="1d"), 2, 11)
    for mask in pattern.mask():
        drawn = drawn_blocks(mask, 10)
        assert torch.equal(mask, big_bird_mask(tokens, 10, drawn))
        assert all(len(blocks) <= 3 for blocks in drawn)


def test_the_paper_keeps_51200_of_280900_pairs() -> None:
    pattern = bigbird_pattern(23, 23, 1, BigBirdOptions(form="1d"), 8, 3)
    assert pattern.edges(8) == 8 * 51_200
    drawn = [drawn_blocks(mask, 10) for mask in pattern.mask()]
    assert all(len(row) == 3 for head in drawn for row in head[1:-1])
    # 53 blocks are many: random ones come from the first 11, whose own end counts as global.
    assert {number for head in drawn for row in head for number in row} == set(range(1, 10))
    assert all(9 not in head[1] and 1 not in head[9] for head in drawn)


def test_where_big_bird_draws_from() -> None:
    assert bigbird_plan(530, 10, 3) == [(0, 11, 3)]
    assert bigbird_plan(95, 10, 3) == [(0, 8, 1), (8, 10, 2)]
    assert bigbird_plan(80, 10, 3) == [(0, 8, 3)]
    assert bigbird_plan(4096, 64, 3) == [(0, 16, 3)]
    assert bigbird_plan(4096, 512, 3) == [(0, 8, 3)], "two blocks are nothing to draw from"
    assert bigbird_plan(2048, 64, 3) == [(0, 11, 3)], "not a length its paper trained with"


def may_draw(blocks: int, query: int) -> int:
    """How many blocks of the whole sequence the rules leave to one between the first and the last."""
    free = {key for key in range(1, blocks - 1) if abs(query - key) > 1}
    return len(free - {1: {blocks - 2}, blocks - 2: {1}}.get(query, set()))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("blocks", range(3, 41))
def test_no_block_draws_fewer_than_it_could(blocks: int, count: int) -> None:
    for tokens in (10 * blocks, 10 * blocks - 4):
        pattern = bigbird_pattern(1, tokens - 1, 1, BigBirdOptions(form="1d", random=count), 3, blocks)
        for mask in pattern.mask():
            drawn = drawn_blocks(mask, 10)
            for query in range(1, blocks - 1):
                could = min(count, may_draw(blocks, query))
                assert len(drawn[query]) == could, f"block {query} of {blocks}"


def old_plan(tokens: int, block: int, query: int) -> set[int]:
    """The plan of the lengths the paper trained with: the first 1,024 tokens, out of the window and not global."""
    blocks, stretch = tokens // block, 1024 // block
    return {key for key in range(1, min(stretch, blocks - 1)) if abs(query - key) > 1}


@pytest.mark.parametrize(("tokens", "block"), [(1024, 64), (3072, 64), (4096, 64), (4096, 128), (3072, 32)])
def test_the_lengths_the_paper_trained_with(tokens: int, block: int) -> None:
    """Over many heads every block that may be drawn is drawn, the stretch's last one too, and no other."""
    pattern = bigbird_pattern(1, tokens, 0, BigBirdOptions(form="1d", block=block), 300, 5)
    sees = pattern.sees[:, 1:, 1:]
    for query in range(1, tokens // block - 1):
        drawn = sees[:, query].copy()
        drawn[:, [0, query - 1, query, query + 1, -1]] = False
        allowed = old_plan(tokens, block, query)
        assert set(np.flatnonzero(drawn.any(0))) == allowed
        assert (drawn.sum(1) == min(3, len(allowed))).all()


@pytest.mark.parametrize(("tokens", "block"), [(530, 10), (2048, 64), (1024, 64), (3072, 64), (4096, 64)])
def test_draws_from_where_big_birds_code_draws(tokens: int, block: int) -> None:
    """Over many draws, the same blocks come up for every query as in the code that BBViT runs."""
    big_bird = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    code, heads = big_bird.BigBirdBlockSparseAttention, 250
    layer = SimpleNamespace(training=True, _get_single_block_row_attention=code._get_single_block_row_attention)
    np.random.seed(0)
    if tokens in (1024, 3072, 4096):
        one = lambda: code._bigbird_block_rand_mask(layer, 4096, 4096, block, block, 3, last_idx=1024)  # noqa: E731
        theirs = np.stack([one()[: tokens // block - 2] for _ in range(heads)])
    else:
        plan = code._get_rand_attn_plan(tokens, block, 3)
        drawn = code._bigbird_block_rand_mask_with_head(layer, tokens, tokens, block, block, heads, *plan)
        theirs = np.stack(drawn)
    sees = bigbird_pattern(1, tokens, 0, BigBirdOptions(form="1d", block=block), heads, 5).sees[:, 1:, 1:]
    last = tokens // block - 1
    for query in range(1, last):
        seen = {0, query - 1, query, query + 1, last}  # at 1,024 tokens theirs may draw the last, which it sees anyway
        ours = set(np.flatnonzero(sees[:, query].any(0))) - seen
        assert ours == set(theirs[:, query - 1].flatten().tolist()) - seen, f"block {query}"


def test_a_seed_means_the_same_blocks_as_ever() -> None:
    """530 tokens, as BBViT has them: the random blocks of saved models must not change."""
    sees = bigbird_pattern(23, 23, 1, BigBirdOptions(form="1d"), 8, 3).sees
    digest = hashlib.sha256(np.packbits(sees).tobytes()).hexdigest()
    assert digest == "a5aa4f74d8bec5af4c63bb9edc6feeaef2bddd13d5d012cf245c930d666765dd"


@pytest.mark.parametrize("gate", ["R", "W", "G", "RW", "RG", "WG"])
def test_gating_silences_query_blocks_as_the_released_code_does(gate: str) -> None:
    grid = Grid(7, 7, 1)
    layer = create(f"bigbird:form=1d,gate={gate},seed=4", 16, 2, grid=grid)
    whole = create("bigbird:form=1d,seed=4", 16, 2, grid=grid)
    q, k, v = torch.randn(3, 2, 2, 50, 8).unbind(0)
    out, _ = layer.attend(q, k, v, Context(grid))
    everything, _ = whole.attend(q, k, v, Context(grid))
    answers = torch.tensor([gate_letter(i) in gate for i in range(50)])
    torch.testing.assert_close(out[:, :, answers], everything[:, :, answers], atol=1e-6, rtol=1e-5)
    assert not out[:, :, ~answers].any()
    assert layer.core_macs(grid) == 2 * 8 * int(whole.pattern(grid).mask()[:, answers].sum())


def gate_letter(token: int) -> str:
    return "R" if token < 10 else "G" if token >= 40 else "W"


# The seed ------------------------------------------------------------------------------------------------------------


def test_the_state_dict_brings_its_random_blocks() -> None:
    grid = Grid(12, 12, 1)
    first, second = (create("bigbird:block=2", 16, 2, grid=grid) for _ in range(2))
    assert not np.array_equal(first.pattern(grid).sees, second.pattern(grid).sees), "each layer draws its own"
    second.load_state_dict(first.state_dict())
    assert np.array_equal(first.pattern(grid).sees, second.pattern(grid).sees)
    third, fourth = (create("bigbird:block=2,seed=9", 16, 2, grid=grid) for _ in range(2))
    assert np.array_equal(third.pattern(grid).sees, fourth.pattern(grid).sees)
    assert int(third.state_dict()["seed"]) == 9
    empty = create("bigbird:block=2", 16, 2, grid=grid, device="meta")
    empty.load_state_dict(first.state_dict(), assign=True)
    assert np.array_equal(first.pattern(grid).sees, empty.pattern(grid).sees)


def test_one_compiled_layer_serves_several_grids_and_seeds() -> None:
    torch._dynamo.reset()
    layer = create("bigbird:block=2,random=1", 16, 2, grid=Grid(8, 6)).eval()
    run = torch.compile(lambda x: layer(x, Context(Grid(x.shape[1] // 6, 6)))[0], fullgraph=True, backend="aot_eager")
    for rows in (8, 10):
        x = torch.randn(1, rows * 6, 16)
        torch.testing.assert_close(run(x), layer(x, Context(Grid(rows, 6)))[0])
    before = run(x)
    layer.load_state_dict({**layer.state_dict(), "seed": torch.tensor(123)})
    torch.testing.assert_close(run(x), layer(x, Context(Grid(10, 6)))[0])
    assert not torch.allclose(run(x), before)


def test_exporting_leaves_nothing_behind() -> None:
    """Traced first, on a grid never seen before: what is kept for the grid must be real when used afterwards."""
    grid = Grid(10, 6)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = create("bigbird:block=2,random=1", 16, 2, grid=grid)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, Context(grid))[0]

    model, x = Model().eval(), torch.randn(1, 60, 16)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bigbird:window=0,random=0,globals=0", "are all 0: expected at least one of them"),
        ("bigbird:gate=W", "gate=W needs form=1d"),
        ("bigbird:form=3d", "form='3d' cannot be read: expected 2d or 1d"),
        ("bigbird:block=0", "block=0 is out of range: expected at least 1"),
    ],
)
def test_wrong_options_say_what_is_expected(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(spec)


def test_a_reduced_grid_is_refused() -> None:
    grid = Grid(4, 4, cells=torch.arange(9)[None], sizes=torch.ones(1, 9))
    with pytest.raises(UserError, match="its blocks need every cell of the grid; tokens were dropped or merged"):
        create("bigbird", 16, 2, grid=grid)


def test_the_choice_says_how_much_is_seen() -> None:
    grid = Grid(32, 32, 1)
    layer = create("bigbird:random=0,globals=0", 16, 2, grid=grid)
    assert layer.choice(grid).backend in ("native", "torch")
    assert layer.choice(grid).reason.startswith("64 blocks, 12% of all pairs; ")
