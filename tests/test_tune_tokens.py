"""tune, token schedules: tokens are removed where that damages little for the time it saves, for any reducer with a
search space; keep rates are tried on the remaining tokens, and an interrupted search resumes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from attendless import UserError, load_plugin, plugins
from attendless.backbones import Columnar, Pyramid
from attendless.convert import convert, load
from attendless.optimize import schedules as searching
from attendless.optimize.block_times import TimeModel, token_times
from attendless.optimize.candidates import Change
from attendless.optimize.goals import Goal
from attendless.optimize.judge import split
from attendless.optimize.proposals import Proposal, bases, shortlist
from attendless.optimize.resume_log import ResumeLog, digest_of
from attendless.optimize.schedules import Schedule, evolve, schedules, why_not
from attendless.optimize.search import Search, silent
from attendless.optimize.tune import tune
from attendless.tokens import Reducer, SearchSpace, parse_tokens, register_reducer, registry
from attendless_cli.main import main

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
QUICK: dict[str, Any] = {"attention": "none", "probe": 6, "points": 3, "budget": 0.02}
#: A block of 64 patches takes a millisecond; choosing what to merge takes nothing.
BY_TOKENS = {"patches": [16, 32, 48, 64], "ms": [0.25, 0.5, 0.75, 1.0], "reducing": [32, 64], "added": [0.0, 0.0]}


@pytest.fixture
def by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take what `BY_TOKENS` says, however busy the machine is."""
    monkeypatch.setattr(searching, "token_times", lambda *given: {"full": BY_TOKENS})


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
    unchanged = Schedule((0,) * 4, "", 160.0)

    def __init__(self, *prices: float, overhead: float = 0.0) -> None:
        self.prices, self.overhead = prices, overhead

    def removing(self, r: Sequence[int]) -> Schedule:
        saved = sum(min(n, 10) * (4 - i) for i, n in enumerate(r))
        merging = sum(n > 0 for n in r)
        return Schedule(tuple(min(n, 10) for n in r), str(r), 160.0 - saved + self.overhead * merging)

    def judged(self, found: Schedule) -> Schedule:
        harm = sum(price * n * n for price, n in zip(self.prices, found.removed, strict=True))
        return dataclasses.replace(found, divergence=harm, drop=harm / 100)


def evolved(toy: Toy, most: float = 100.0, trials: int = 400) -> list[Schedule]:
    return evolve(toy, most, trials, lambda done: None)


def test_tokens_move_to_where_they_harm_little_for_what_they_save() -> None:
    front = evolved(Toy(9.0, 1.0, 4.0, 9.0))
    assert front[0] == Toy.unchanged
    for slower, quicker in pairwise(front):
        assert slower.ms > quicker.ms
        assert slower.divergence < quicker.divergence
    toy = Toy(9.0, 1.0, 4.0, 9.0)
    every = (toy.judged(toy.removing(list(r))) for r in itertools.product(range(11), repeat=4))
    optimum = min(one.divergence for one in every if one.ms <= 160 - 40)
    best = min(one.divergence for one in front if one.ms <= 160 - 40)
    assert best <= 1.1 * optimum
    even = toy.judged(toy.removing([4, 4, 4, 4]))
    assert even.ms == 160 - 40
    assert even.divergence > 2 * best, "the same in every layer is far behind"
    assert evolved(toy) == front, "the same every time"


def test_few_layers_merge_where_choosing_is_slow() -> None:
    def merging(overhead: float) -> float:
        front = evolved(Toy(1.0, 1.0, 1.0, 1.0, overhead=overhead))[1:]
        return sum(sum(n > 0 for n in one.removed) for one in front) / len(front)

    assert merging(15.0) < 2 < merging(0.0)
    assert evolved(Toy(1.0, 1.0, 1.0, 1.0, overhead=100.0)) == [Toy.unchanged], "nothing pays"


def test_what_loses_too_much_is_no_way_on() -> None:
    assert max(one.drop for one in evolved(Toy(9.0, 1.0, 4.0, 9.0), most=0.5)) <= 0.5


def test_harm_is_the_divergence_and_the_path_gets_quicker(model: Columnar, images: Tensor, by_tokens: None) -> None:
    path = schedules(model, "tome", Search(images=images[:6], budget=0.02), 100.0)
    assert model.tokens == "", "the model is left as it was"
    assert path[0] == Schedule((0, 0, 0), "", pytest.approx(2 + read_out(model, 64)))
    assert len(path) > 5
    assert all(after.ms < before.ms for before, after in pairwise(path))
    one = path[len(path) // 2]
    with torch.no_grad():
        dense, merged = model(images[:6]), convert(model, tokens=one.tokens).eval()(images[:6])
    expected = F.kl_div(merged.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="batchmean")
    assert one.divergence == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    # What a spec says is what goes: no layer is asked to merge more than there are partners for.
    merged = convert(model, tokens=path[-1].tokens)
    counts = [step.x.shape[1] for step in merged.walk(*merged.embed(images[:1]))]
    assert tuple(before - after for before, after in pairwise(counts)) == path[-1].removed
    assert path[-1].removed[-1] == 0, "of the last layer no patch is read, so none is merged"
    assert not model.readout


def test_a_spec_with_options_is_taken_as_it_is(model: Columnar, images: Tensor, by_tokens: None) -> None:
    path = schedules(model, "evit:keep=0.5,at=1", Search(images=images[:6], budget=0.02), 0.5)
    assert [one.tokens for one in path] == ["", "evit:keep=0.5,at=1"]
    assert path[1].ms == pytest.approx(1 + (1 + 33 / 64) / 2 + read_out(model, 33) * 33 / 64)


PLUGIN = """
import dataclasses
import torch
from attendless import Options, option
from attendless.tokens import Reducer, SearchSpace, register_reducer
from attendless.tokens.keeping import keep

@dataclasses.dataclass(frozen=True)
class FirstPatchesOptions(Options):
    remove: tuple[int, ...] = option((1,), "patches removed in each layer", low=0)
    last: bool = option(False, "remove the last patches instead of the first")

@register_reducer
class FirstPatches(Reducer):
    name = "firstpatches"
    Options = FirstPatchesOptions
    drops = True
    search_space = SearchSpace("remove", {"last": (False, True)})

    def remaining(self, grid):
        given = self.options.remove
        return max(1, grid.patches - given[self.layer if len(given) > 1 else 0])

    def forward(self, x, context):
        grid = context.grid
        score = torch.arange(grid.patches, device=x.device, dtype=x.dtype).expand(len(x), -1)
        x, left = keep(x, grid, -score if self.options.last else score, self.remaining(grid))
        return x, context.replace(grid=left)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file with a reducer, forgotten after the test."""
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))
    monkeypatch.setattr(plugins, "_sources", dict(plugins._sources))
    (file := tmp_path / "first_patches.py").write_text(PLUGIN)
    return str(file)


def test_any_reducer_with_a_search_space_is_searched(
    model: Columnar, images: Tensor, by_tokens: None, plugin: str
) -> None:
    """A user's reducer states its schedule option and the values of another option; nothing else knows of it."""
    load_plugin(plugin)
    path = schedules(model, "firstpatches", Search(images=images[:6], budget=0.02), 100.0)
    assert len(path) > 5
    assert all(one.tokens.startswith("firstpatches:remove=") for one in path[1:])
    assert all(after.ms < before.ms for before, after in pairwise(path))
    fastest = convert(model, tokens=path[-1].tokens)
    with torch.no_grad():
        counts = [step.x.shape[1] for step in fastest.walk(*fastest.embed(images[:1]))]
    assert tuple(before - after for before, after in pairwise(counts)) == path[-1].removed
    trials = {"last" in text for text in _judged(model, images, "firstpatches")}
    assert trials == {False, True}, "each value of the other option is tried"
    assert path[-1].removed[-1] == 0, "the last layer removes nothing"


def _judged(model: Columnar, images: Tensor, tokens: str) -> list[str]:
    search = Search(images=images[:6], budget=0.02)
    schedules(model, tokens, search, 100.0)
    return [name.removeprefix("damage of ") for name in search.log.values if name.startswith("damage of ")]


def test_a_reducer_without_a_search_space_is_taken_as_it_is(model: Columnar, images: Tensor, by_tokens: None) -> None:
    deep = Columnar(**{**SHAPE, "depth": 12}, attention="full").eval()
    found = tune(deep, images, tokens="evit", **QUICK)
    assert {c.tokens for c in found.candidates} == {"", "evit"}
    note = "evit was taken with its default options: evit keeps one share of the patches"
    assert found.findings[-1].startswith(f"note: {note}")


def test_a_search_space_names_options_that_exist() -> None:
    with pytest.raises(UserError, match=r"Wrong.search_space names 'nothing': the options are"):

        @register_reducer
        class Wrong(Reducer):
            name = "wrong"
            search_space = SearchSpace("nothing")


def test_blocks_are_timed_by_their_tokens(model: Columnar, images: Tensor) -> None:
    seen: set[int] = set()
    hook = model.blocks[-1].norm1.register_forward_hook(lambda _, given, __: seen.add(len(given[0])))
    one_each = parse_tokens("tome:r=1")
    assert one_each is not None
    found = token_times(model, one_each, images[:2], 0.02, silent)
    hook.remove()
    assert seen == {2}, "with as many images at once as are given"
    assert set(found) == {"full"}, "blocks of one kind are timed once"
    assert found["full"]["patches"] == [16, 29, 45, 64]
    assert min(found["full"]["ms"]) > 0
    assert model.tokens == ""
    pyramid = Pyramid("full", img_size=64, embed_dims=(16, 32), depths=(1, 2), num_heads=(1, 2), num_classes=5).eval()
    assert set(token_times(pyramid, one_each, images[:1], 0.02, silent)) == {"stages.0.full", "stages.1.full"}
    slow = TimeModel({"full": {**BY_TOKENS, "added": [0.5, 0.5]}})
    merging = convert(model, tokens="tome:r=0/32/0")
    assert slow(merging) == pytest.approx(1 + 0.75 + 0.5 + read_out(model, 32) * 0.5)


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
    assert [one.removed for one in bases(path, Goal(1.0))] == [(0,), (2,), (3,)]
    assert [one.removed for one in bases(path[:1], Goal(1.0))] == [(0,)]
    assert [one.removed for one in bases([path[0], path[4]], Goal(1.0))] == [(0,), (4,)], "what was asked for"


def test_what_is_timed_is_what_nothing_beats_and_most_of_it_near_the_bound() -> None:
    proposals = [Proposal(Change("full", (), str(n) if n else ""), float(n)) for n in range(21)]
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
    assert all(c.tokens.startswith("rank:r=") and c.cost.macs < 1 for c in merging)
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
    assert found.findings[-1] == f"note: token reduction was not searched: {why_not(swin, 'tome')}"
    assert "already reduced by tome:r=2" in why_not(convert(model, tokens="tome:r=2"), "tome")
    assert "reads the keys of fastformer" in why_not(Columnar(**SHAPE, attention="fastformer"), "tome")
    small = {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "img_size": 64, "num_classes": 5}
    convolving = timm.create_model("pyramid_pvt_v2_b0", **small, mlp_ratios=2, attention="full")
    assert why_not(convolving, "tome").startswith("tokens cannot be removed before an MLP that convolves")
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
    damage = searching.Trials.damage

    def until(count: int) -> Any:
        def counted(self: Any, tokens: str) -> Any:
            if len(asked) == count:
                raise Stopped
            asked.append(tokens)
            return damage(self, tokens)

        return counted

    monkeypatch.setattr(searching.Trials, "damage", until(12))
    with pytest.raises(Stopped):
        tune(model, images, resume=tmp_path, **QUICK)
    (file,) = tmp_path.glob("tune-*.jsonl")
    with file.open("a") as torn:
        torn.write('{"name": "damage of')  # stopped in the middle of a line
    before = list(asked)
    monkeypatch.setattr(searching.Trials, "damage", until(10**6))
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
    with pytest.raises(UserError, match="cannot hold the log of a search"):
        ResumeLog(tmp_path / "file", "of")
    assert digest_of(model, images, "a") != digest_of(model, images, "b")


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["tome", "firstpatches"])
def test_the_command_says_how_to_get_it(
    tokens: str, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    from attendless.optimize.session import Session

    for i in range(12):
        Image.effect_noise((48, 40), 20 + 20 * i).convert("RGB").save(tmp_path / f"{i}.png")
    # What is saved is to be seen, so the quickest by far is whatever merges most.
    monkeypatch.setattr(searching, "token_times", lambda *given: {"full": BY_TOKENS})
    monkeypatch.setattr(Session, "_benchmark", _by_macs)
    out, result = str(tmp_path / "fast.safetensors"), str(tmp_path / "found.json")
    words = ["columnar_micro_patch4_32", "--attention", "none", "--data", str(tmp_path), "--max-drop", "100"]
    words += ["--tokens", tokens, "--plugin", plugin, "--budget", "0.02", "--resume-dir", str(tmp_path / "notes")]
    words += ["--out", out, "--json", result]
    assert main(["tune", *words]) == 0
    said, log = capsys.readouterr()
    assert [line.split(":")[0] for line in log.splitlines()][:1] == ["searching token schedules"], (
        "a log says what is done"
    )
    fast = load(out)
    assert fast.tokens.startswith(f"{tokens}:r")
    assert f"--tokens {fast.tokens} --below-breakeven keep" in said
    assert "--attention" not in said
    assert [*(tmp_path / "notes").glob("tune-*.jsonl")]
    (chosen,) = json.loads(Path(result).read_text())["chosen"]
    assert chosen["tokens_spec"] == fast.tokens


def _by_macs(session: Any, ready: dict[str, Any], seconds: float) -> Any:
    from attendless.measure.clock import Timings
    from attendless.measure.macs import count

    return Timings({name: [1e-9 * count(one.run, (32, 32)).total] * 20 for name, one in ready.items()})
