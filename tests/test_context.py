"""What layers leave each other: who reads must stand behind who provides, and what nobody reads is dropped at once."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attendless import (
    Attention,
    Context,
    Grid,
    UserError,
    convert,
)
from attendless.attention import registry
from attendless.backbones import Columnar, Pyramid
from attendless.tokens import Reducer

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
PYRAMID = {"img_size": 64, "embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5}


class Echo(Attention):
    """Attends by the scores of the layer before, and leaves them to the next."""

    name = "echo"
    reads = provides = frozenset({"scores"})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
        assert context.scores is not None
        return context.scores.softmax(-1) @ v, context

    def core_macs(self, grid: Grid) -> int:
        return grid.tokens**2 * self.attn_dim


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._ATTENTIONS, "echo", Echo)


def column(attention: str, depth: int = 4) -> Columnar:
    torch.manual_seed(0)
    return Columnar(**SMALL, depth=depth, attention=attention).eval()


# Who may stand behind whom -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["foveal", "window", "linformer", "efficient", "bigbird"])
def test_a_reader_behind_one_that_cannot_provide_is_refused_and_both_are_named(before: str) -> None:
    message = rf"echo in blocks.2 reads the scores of the layer before, but {before} in blocks.1 does not provide it"
    with pytest.raises(UserError, match=message):
        column(f"full/{before}/echo/full")
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, depth=4)
    with pytest.raises(UserError, match=message):
        convert(model, f"full/{before}/echo/full", below_breakeven="keep")


def test_scores_of_an_earlier_layer_are_not_read_by_mistake() -> None:
    with pytest.raises(UserError, match=r"window in blocks.2 does not provide it"):
        column("full/echo/window/echo")
    with pytest.raises(UserError, match="it is the first layer"):
        column("echo/full/full/full")
    with pytest.raises(UserError, match=r"stages.1.blocks.0 .* it is the first layer"):
        Pyramid("full/full/echo/full", **PYRAMID)


def test_what_nobody_knows_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Echo):
        name = "odd"
        reads = frozenset({"tea leaves"})

    monkeypatch.setitem(registry._ATTENTIONS, "odd", Odd)
    with pytest.raises(UserError, match=r"reads the tea leaves .* there are only scores, class_attention"):
        column("full/odd/full/full")


def test_one_that_promises_and_leaves_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(registry.attention_class("foveal")):
        name = "liar"
        provides = frozenset({"scores"})

    monkeypatch.setitem(registry._ATTENTIONS, "liar", Liar)
    with pytest.raises(UserError, match="liar must provide scores, but did not"):
        column("liar/echo/full/full")(torch.randn(1, 3, 64, 64))


# What is handed on ---------------------------------------------------------------------------------------------------


def test_a_reader_gets_the_scores_of_the_layer_before() -> None:
    model = column("full/echo/echo/full")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        x, context = model.embed(images)
        q, k, _ = model.blocks[0].attn.project(model.blocks[0].norm1(x))
        scores = model.blocks[0].attn.scale * q @ k.transpose(-2, -1)
        seen = {step.number: step.context for step in model.walk(x, context)}
        out = model(images)
        explicit = column("4xfull")
        explicit.load_state_dict(model.state_dict())
        x = explicit.run_layers(*explicit.embed(images), stop=1)[0]
        for block in explicit.blocks[1:3]:  # two layers whose weights are the first one's
            v = block.attn.project(block.norm1(x))[2]
            x = x + block.attn.merge(scores.softmax(-1) @ v)
            x = x + block.mlp(block.norm2(x))
        x, _ = explicit.run_layers(x, Context(explicit.grid()), start=3)
    torch.testing.assert_close(seen[1].scores, scores)
    torch.testing.assert_close(out, explicit.forward_head(explicit.norm(x)), atol=1e-5, rtol=1e-5)
    assert seen[0].wants == seen[1].wants == {"scores"}
    assert seen[2].wants == set()
    assert seen[3].scores is None
    assert seen[4].scores is None


def test_one_score_tensor_is_alive_at_a_time() -> None:
    alive: list[int] = []
    made: list[weakref.ref] = []

    class Counting(registry.attention_class("full")):
        name = "counting"
        reads: ClassVar[frozenset[str]] = frozenset()

        def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Context]:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))
            out, context = super().attend(q, k, v, context)
            if context.scores is not None:
                made.append(weakref.ref(context.scores))
            return out, context

    registry._ATTENTIONS["counting"] = Counting
    try:
        model = column("counting/echo/counting/echo/counting/counting", depth=6)
        with torch.no_grad():
            model(torch.randn(1, 3, 64, 64))
    finally:
        del registry._ATTENTIONS["counting"]
    assert len(made) == 2
    assert alive == [0, 0, 0, 0], "when a layer makes scores, those before are gone"


def test_gradients_reach_the_provider_and_are_the_same_with_checkpointing() -> None:
    images, found = torch.randn(2, 3, 64, 64), []
    for checkpointing in (False, True):
        model = column("full/echo/echo/full").train()
        model.set_grad_checkpointing(checkpointing)
        model(images).square().sum().backward()
        assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
        found.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert (plain is None) == (checkpointed is None)
        assert plain is None or torch.equal(plain, checkpointed)


@pytest.mark.parametrize("attention", ["full/echo/full/echo", "full/full/full/full"])
def test_leaving_scores_costs_what_is_stated(attention: str) -> None:
    model = column(attention)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 64, 64))
    assert counter.get_total_flops() == 2 * sum(row.macs.total for row in model.costs())


# A reducer in a block ------------------------------------------------------------------------------------------------


class Keep(Reducer):
    """Keeps the patches the class token looks at most; a toy that does all a reducer must."""

    name = "keep"
    reads = frozenset({"class_attention"})

    def __init__(self, patches: int) -> None:
        super().__init__(32, 16)
        self.patches = patches

    def remaining(self, grid: Grid) -> int:
        return self.patches

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        grid = context.grid
        kept = context.class_attention.mean(1)[:, grid.prefix :].topk(self.patches).indices.sort().values
        cells = kept if grid.cells is None else grid.cells.gather(1, kept)
        patches = x[:, grid.prefix :].gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
        return torch.cat([x[:, : grid.prefix], patches], 1), context.replace(
            grid=Grid(grid.height, grid.width, grid.prefix, cells=cells, sizes=torch.ones_like(cells))
        )


def reducing(attention: str = "full") -> Columnar:
    model = column(attention)
    model.blocks[1].reducer, model.blocks[2].reducer = Keep(9), Keep(4)
    return model


@pytest.mark.parametrize("attention", ["full", "foveal:keep=0.3,tile=1"])
def test_tokens_leave_and_costs_know_it(attention: str) -> None:
    model = reducing(attention)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        steps = list(model.walk(*model.embed(images)))
        assert [step.x.shape[1] for step in steps] == [17, 17, 10, 5, 5]
        assert model(images).shape == (2, 5)
    rows = model.costs()
    assert [row.grid.tokens for row in rows] == [17, 17, 17, 10, 5, 5]
    if attention == "full":
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(images[:1])
        assert counter.get_total_flops() == 2 * sum(row.macs.total for row in rows), "the class row is counted"


def test_intermediates_come_back_on_the_whole_grid() -> None:
    model = reducing()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        _, maps = model.forward_intermediates(images, indices=4)
        steps = list(model.walk(*model.embed(images)))
    assert [tuple(y.shape) for y in maps] == [(2, 32, 4, 4)] * 4
    last = steps[-1]
    cells = last.context.grid.cells
    flat = maps[-1].flatten(2)
    torch.testing.assert_close(flat.gather(2, cells[:, None].expand(-1, 32, -1)).transpose(1, 2), last.x[:, 1:])
    gone = torch.ones(2, 16, dtype=torch.bool).scatter(1, cells, False)
    assert (flat.transpose(1, 2)[gone] == 0).all()


def test_owners_spread_a_merged_token_over_its_cells() -> None:
    owners = torch.tensor([[0, 0, 1, -1]])
    grid = Grid(2, 2, 1, cells=torch.tensor([[0, 2]]), sizes=torch.tensor([[2, 1]]), owners=owners)
    x = torch.tensor([[[9.0], [1.0], [2.0]]])
    assert grid.restore(x).flatten().tolist() == [9, 1, 1, 2, 0]
    whole = Grid(2, 2, 1)
    assert whole.restore(x) is x
    assert grid.whole() == whole


def test_a_reducer_behind_an_attention_that_cannot_tell_it_what_to_keep() -> None:
    model = reducing("efficient")
    with pytest.raises(UserError, match=r"keep in blocks.1 reads the class_attention of efficient, which does not"):
        model.check_order()
    with pytest.raises(UserError, match="efficient must provide class_attention, but did not"):
        model(torch.randn(1, 3, 64, 64))


def test_scores_do_not_outlive_the_tokens_they_belong_to() -> None:
    model = column("full/full/echo/full")
    model.blocks[1].reducer = Keep(9)
    with pytest.raises(UserError, match=r"echo in blocks.2 reads the scores .* keep in blocks.1 removes tokens"):
        model.check_order()
