"""tune, of tokens: merging moves to where it harms little for what it saves, attending less is tried on what is left,
and a search that was stopped goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from attendless import UserError
from attendless.backbones import Columnar, Pyramid
from attendless.convert import convert, load
from attendless.optimize import schedules as searching
from attendless.optimize.judge import split
from attendless.optimize.proposals import Proposal, bases, shortlist
from attendless.optimize.resume_log import Notes, digest_of
from attendless.optimize.schedules import (
    Cost,
    Schedule,
    block_times,
    evolve,
    schedules,
    why_not,
)
from attendless.optimize.tradeoff import Goal
from attendless.optimize.tune import tune
from attendless_cli.main import main

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
QUICK: dict[str, Any] = {"attention": "none", "probe": 6, "points": 3, "budget": 0.02}
#: A block of 64 patches takes a millisecond; choosing what to merge takes nothing.
BY_TOKENS = {"patches": [16, 32, 48, 64], "ms": [0.25, 0.5, 0.75, 1.0], "merging": [32, 64], "added": [0.0, 0.0]}


@contextmanager
def silent(what: str, total: int) -> Iterator[Any]:
    yield lambda done: None


@pytest.fixture
def by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take what `BY_TOKENS` says, however busy the machine is."""
    monkeypatch.setattr(searching, "block_times", lambda *given: {"full": BY_TOKENS})


@pytest.fixture(scope="module")
def model() -> Columnar:
    torch.manual_seed(0)
    model = Columnar(**SHAPE, attention="full").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(24, 3, 64, 64)


def read_out(model: Columnar, patches: int) -> float:
    """The part of its MACs that the last block computes where the class token alone is read: it attends to all, and
    patches make keys and values."""
    C, N = model.embed_dim, 1 + patches
    return (2 * N * C + (2 * N + 2) * C**2 + 8 * C**2) / (2 * N**2 * C + 12 * N * C**2)


# Schedules -----------------------------------------------------------------------------------------------------------


class Toy:
    """Four layers of 40 tokens. Merging one saves a millisecond in every layer behind, a layer that merges takes
    `overhead` to choose, and harms by its price times the square of what it merges."""

    patches = (40,) * 4
    plain = Schedule((0,) * 4, "", 160.0)

    def __init__(self, *prices: float, overhead: float = 0.0) -> None:
        self.prices, self.overhead = prices, overhead

    def merging(self, r: list[int]) -> Schedule:
        saved = sum(min(n, 10) * (4 - i) for i, n in enumerate(r))
        merging = sum(n > 0 for n in r)
        return Schedule(tuple(min(n, 10) for n in r), str(r), 160.0 - saved + self.overhead * merging)

    def judged(self, found: Schedule) -> Schedule:
        harm = sum(price * n * n for price, n in zip(self.prices, found.r, strict=True))
        return dataclasses.replace(found, harm=harm, loss=harm / 100)


def evolved(toy: Toy, most: float = 100.0, trials: int = 400) -> list[Schedule]:
    return evolve(toy, most, trials, lambda done: None)


def test_tokens_move_to_where_they_harm_little_for_what_they_save() -> None:
    front = evolved(Toy(9.0, 1.0, 4.0, 9.0))
    assert front[0] == Toy.plain
    for slower, quicker in pairwise(front):
        assert slower.ms > quicker.ms
        assert slower.harm < quicker.harm
    toy = Toy(9.0, 1.0, 4.0, 9.0)
    every = (toy.judged(toy.merging(list(r))) for r in itertools.product(range(11), repeat=4))
    optimum = min(one.harm for one in every if one.ms <= 160 - 40)
    best = min(one.harm for one in front if one.ms <= 160 - 40)
    assert best <= 1.1 * optimum
    even = toy.judged(toy.merging([4, 4, 4, 4]))
    assert even.ms == 160 - 40
    assert even.harm > 2 * best, "the same in every layer is far behind"
    assert evolved(toy) == front, "the same every time"


def test_few_layers_merge_where_choosing_is_slow() -> None:
    def merging(overhead: float) -> float:
        front = evolved(Toy(1.0, 1.0, 1.0, 1.0, overhead=overhead))[1:]
        return sum(sum(n > 0 for n in one.r) for one in front) / len(front)

    assert merging(15.0) < 2 < merging(0.0)
    assert evolved(Toy(1.0, 1.0, 1.0, 1.0, overhead=100.0)) == [Toy.plain], "nothing pays"


def test_what_loses_too_much_is_no_way_on() -> None:
    assert max(one.loss for one in evolved(Toy(9.0, 1.0, 4.0, 9.0), most=0.5)) <= 0.5


def test_harm_is_the_divergence_and_the_path_gets_quicker(model: Columnar, images: Tensor, by_tokens: None) -> None:
    path = schedules(model, "tome", images[:6], 100.0, 1, 0.02, Notes(), silent)
    assert model.tokens == "", "the model is left as it was"
    assert path[0] == Schedule((0, 0, 0), "", pytest.approx(2 + read_out(model, 64)))
    assert len(path) > 5
    assert all(after.ms < before.ms for before, after in pairwise(path))
    one = path[len(path) // 2]
    with torch.no_grad():
        dense, merged = model(images[:6]), convert(model, tokens=one.tokens).eval()(images[:6])
    expected = F.kl_div(merged.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="batchmean")
    assert one.harm == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    # What a spec says is what goes: no layer is asked to merge more than there are partners for.
    merged = convert(model, tokens=path[-1].tokens)
    counts = [step.x.shape[1] for step in merged.walk(*merged.embed(images[:1]))]
    assert tuple(before - after for before, after in pairwise(counts)) == path[-1].r
    assert path[-1].r[-1] == 0, "of the last layer no patch is read, so none is merged"
    assert not model.readout


def test_a_spec_with_options_is_taken_as_it_is(model: Columnar, images: Tensor, by_tokens: None) -> None:
    path = schedules(model, "evit:keep=0.5,at=1", images[:6], 0.5, 1, 0.02, Notes(), silent)
    assert [one.tokens for one in path] == ["", "evit:keep=0.5,at=1"]
    assert path[1].ms == pytest.approx(1 + (1 + 33 / 64) / 2 + read_out(model, 33) * 33 / 64)


def test_blocks_are_timed_by_their_tokens(model: Columnar, images: Tensor) -> None:
    seen: set[int] = set()
    hook = model.blocks[-1].norm1.register_forward_hook(lambda _, given, __: seen.add(len(given[0])))
    found = block_times(model, images[:2], 0.02, silent)
    hook.remove()
    assert seen == {2}, "with as many images at once as are given"
    assert set(found) == {"full"}, "blocks of one kind are timed once"
    assert found["full"]["patches"] == [16, 29, 45, 64]
    assert min(found["full"]["ms"]) > 0
    assert model.tokens == ""
    pyramid = Pyramid("full", img_size=64, embed_dims=(16, 32), depths=(1, 2), num_heads=(1, 2), num_classes=5).eval()
    assert set(block_times(pyramid, images[:1], 0.02, silent)) == {"stages.0.full", "stages.1.full"}
    assert Cost({"full": {**BY_TOKENS, "added": [0.5, 0.5]}})(convert(model, tokens="tome:r=0/32/0")) == pytest.approx(
        1 + 0.75 + 0.5 + read_out(model, 32) * 0.5
    )


def test_an_answer_goes_on_from_any_layer(images: Tensor) -> None:
    """As the search has it; and in a mean over the patches, a merged one counts for all that it stands for."""
    column = Columnar(**SHAPE, attention="full", tokens="tome:r=20", class_token=False, global_pool="avg").eval()
    shape = {"img_size": 64, "embed_dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "num_classes": 5}
    pyramid = Pyramid("full", **shape).eval()
    pyramid.set_tokens("tome:r=20")
    for model in (column, pyramid):
        with torch.no_grad():
            states = [*model.walk(*model.embed(images[:2]))]
            x, grid = states[-1].x, states[-1].context.grid
            expected = model.forward_head(grid.restore(model.norm(x)))
            torch.testing.assert_close(model(images[:2]), expected)
            after, context = model.run_layers(*states[1][1:], start=1)
            torch.testing.assert_close(model.answer(model.norm(after), context.grid), expected)


# Both together -------------------------------------------------------------------------------------------------------


def test_attending_less_is_tried_within_the_bound_and_at_half_its_harm() -> None:
    path = [
        Schedule((n,), str(n), 10.0 - n, harm, loss)
        for n, harm, loss in [(0, 0, 0), (1, 1, 0), (2, 2, 0.5), (3, 4, 0.9), (4, 9, 1.5)]
    ]
    assert [one.r for one in bases(path, Goal(1.0))] == [(0,), (2,), (3,)]
    assert [one.r for one in bases(path[:1], Goal(1.0))] == [(0,)]
    assert [one.r for one in bases([path[0], path[4]], Goal(1.0))] == [(0,), (4,)], "what was asked for"


def test_what_is_timed_is_what_nothing_beats_and_most_of_it_near_the_bound() -> None:
    proposals = [Proposal("full", (), str(n) if n else "", float(n)) for n in range(21)]
    drops = [*(n / 10 for n in range(20)), 0.35]
    assert shortlist(proposals, drops, Goal(1.0), 30) == list(range(21))
    assert shortlist(proposals, drops, Goal(1.0), 6) == [0, 1, 2, 3, 20], "the last beats all that lose as much"
    drops[20] = 2.0
    found = shortlist(proposals, drops, Goal(1.0), 10)
    assert {8, 9, 10, 11, 12} <= set(found)
    assert found[0] == 0
    assert max(found) == 20
    assert len(found) <= 10
    assert len(shortlist(proposals, drops, Goal(target_ms=1.0), 10)) == 10


def test_both_are_searched_judged_and_converted(model: Columnar, images: Tensor, by_tokens: None) -> None:
    found = tune(model, images, max_drop=100.0, **{**QUICK, "attention": "foveal", "rates": (0.5,)})
    merging = [c for c in found.candidates if c.tokens]
    assert merging
    assert all(c.tokens.startswith("tome:r=") and c.macs_share < 1 for c in merging)
    held_out = split(images, 6)[1]
    for c in merging:
        ours = convert(
            model, c.attention if c.layers else None, layers=c.layers, tokens=c.tokens, below_breakeven="keep"
        )
        with torch.no_grad():
            same = (ours.eval()(held_out).argmax(1) == model(held_out).argmax(1)).float().mean()
        assert c.agreement == pytest.approx(float(same))
    rows = [c.as_dict() for c in found.candidates]
    assert [row["tokens_spec"] for row in rows if row["tokens_spec"]] == [c.tokens for c in merging]
    assert found.convert(model).tokens == found.tokens
    assert merging[0].tokens in str(found)
    json.dumps([found.as_dict(), *rows], allow_nan=False)


def test_models_that_need_every_token_are_searched_for_attention_alone(model: Columnar, images: Tensor) -> None:
    small = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **small, num_classes=3).eval()
    assert why_not(swin, "tome") == "SwinTransformer keeps timm's own layers, which need every token"
    found = tune(swin, images[:, :, :32, :32], **{**QUICK, "attention": "foveal", "rates": (0.5,)})
    assert found.findings[-1] == f"note: no tokens were merged: {why_not(swin, 'tome')}"
    assert "already, by tome:r=2" in why_not(convert(model, tokens="tome:r=2"), "tome")
    assert "reads the keys of fastformer" in why_not(Columnar(**SHAPE, attention="fastformer"), "tome")
    small = {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "img_size": 64, "num_classes": 5}
    convolving = timm.create_model("pyramid_pvt_v2_b0", **small, mlp_ratios=2, attention="full")
    assert why_not(convolving, "tome").startswith("tokens cannot go before an MLP that convolves")
    assert convolving.tokens == ""
    with pytest.raises(UserError, match="tokens='tome:r=2': SwinTransformer keeps"):
        tune(swin, images[:, :, :32, :32], **{**QUICK, "tokens": "tome:r=2"})


# Going on ------------------------------------------------------------------------------------------------------------


def test_a_search_that_was_stopped_goes_on(
    model: Columnar, images: Tensor, by_tokens: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    asked: list[str] = []
    harm = searching._Trials._harm

    def until(count: int) -> Any:
        def counted(self: Any, tokens: str) -> Any:
            if len(asked) == count:
                raise Stopped
            asked.append(tokens)
            return harm(self, tokens)

        return counted

    monkeypatch.setattr(searching._Trials, "_harm", until(12))
    with pytest.raises(Stopped):
        tune(model, images, resume=tmp_path, **QUICK)
    (file,) = tmp_path.glob("tune-*.jsonl")
    with file.open("a") as torn:
        torn.write('{"of": "harm of')  # stopped in the middle of a line
    before = list(asked)
    monkeypatch.setattr(searching._Trials, "_harm", until(10**6))
    found = tune(model, images, resume=tmp_path, **QUICK)
    assert len(asked) == len(set(asked)), "nothing is measured twice"
    assert len(asked) > len(before)
    asked.clear()
    again = tune(model, images, resume=tmp_path, **QUICK)
    assert asked == []
    assert {c.tokens for c in again.candidates} == {c.tokens for c in found.candidates}
    tune(model, images + 1, resume=tmp_path, **QUICK)
    assert asked, "other images are another search"
    assert len([*tmp_path.glob("tune-*.jsonl")]) == 2


def test_notes_say_where_they_cannot_be_kept(tmp_path: Path, model: Columnar, images: Tensor) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot hold the notes of a search"):
        Notes(tmp_path / "file", "of")
    assert digest_of(model, images, "a") != digest_of(model, images, "b")


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    from attendless.optimize import tune as tuning

    for i in range(12):
        Image.effect_noise((48, 40), 20 + 20 * i).convert("RGB").save(tmp_path / f"{i}.png")
    # What is saved is to be seen, so the quickest by far is whatever merges most.
    monkeypatch.setattr(searching, "block_times", lambda *given: {"full": BY_TOKENS})
    monkeypatch.setattr(tuning, "_race", _by_macs)
    out, result = str(tmp_path / "fast.safetensors"), str(tmp_path / "found.json")
    words = ["columnar_micro_patch4_32", "--attention", "none", "--data", str(tmp_path), "--max-drop", "100"]
    words += ["--budget", "0.02", "--resume-dir", str(tmp_path / "notes"), "--out", out, "--json", result]
    assert main(["tune", *words]) == 0
    said, log = capsys.readouterr()
    assert [line.split(":")[0] for line in log.splitlines()][:1] == ["searching what to merge"], (
        "a log says what is done"
    )
    fast = load(out)
    assert fast.tokens.startswith("tome:r=")
    assert f"--tokens {fast.tokens} --below-breakeven keep" in said
    assert "--attention" not in said
    assert [*(tmp_path / "notes").glob("tune-*.jsonl")]
    (chosen,) = json.loads(Path(result).read_text())["chosen"]
    assert chosen["tokens_spec"] == fast.tokens


def _by_macs(models: list[Any], image: Tensor, budget: float, progress: Any) -> Any:
    from attendless.measure.clock import Race
    from attendless.measure.macs import count

    seconds = [1e-9 * count(one, (32, 32)).total for one in models]
    return Race({str(i) if i else "dense": [s] * 20 for i, s in enumerate(seconds)})
