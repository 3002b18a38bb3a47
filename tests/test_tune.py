"""tune: sensitivities layer by layer, candidates from shared weights, judged on held-out images and timed together;
a choice that reports its uncertainty."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import attendless
from attendless import UserError
from attendless.attention import parse
from attendless.convert import convert, load
from attendless.measure.clock import Comparison
from attendless.optimize import judge as judging
from attendless.optimize import rates
from attendless.optimize.block_times import attention_times, repeat_to_batch
from attendless.optimize.candidates import Change, share_weights, shared_copy, with_attention, with_tokens
from attendless.optimize.goals import Goal
from attendless.optimize.judge import UNCHANGED, Judgement
from attendless.optimize.report import Tuned
from attendless.optimize.results import Candidate, CostShare, Setting, Timing
from attendless.optimize.search import Search, silent
from attendless.optimize.sensitivity import layer_sensitivities
from attendless.optimize.tune import tune
from attendless_cli.main import main

QUICK: dict[str, Any] = {"tokens": "none", "rates": (0.1, 0.5), "probe": 4, "points": 3, "budget": 0.05}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=128).eval()
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(12, 3, 128, 128)


# Searching -----------------------------------------------------------------------------------------------------------


def test_a_sensitivity_is_the_divergence_of_one_changed_layer(model: torch.nn.Module, images: torch.Tensor) -> None:
    backbone = convert(model, "full").eval()
    depth = len(backbone.blocks)
    places = [0, depth - 1]
    found = layer_sensitivities(backbone, places, [parse("foveal:keep=0.1")], images[:4], silent)
    assert backbone.attention == "full", "the baseline is not changed"
    assert found.shape == (2, 2)
    for row, layer in enumerate(places):
        parts = ["full"] * depth
        parts[layer] = "foveal:keep=0.1"
        changed = convert(model, "/".join(parts), below_breakeven="keep").eval()
        with torch.no_grad():
            expected = torch.nn.functional.kl_div(
                changed(images[:4]).log_softmax(-1),
                model(images[:4]).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
        torch.testing.assert_close(found[row, 1], expected, atol=1e-5, rtol=1e-3)
    assert found[:, 0].abs().max() == 0


def test_the_price_sweep_runs_from_no_change_to_every_layer_fastest() -> None:
    damages = torch.tensor([[0.0, 0.1, 0.9], [0.0, 0.01, 0.02], [0.0, 0.4, 0.5]])
    front = rates.price_sweep(torch.tensor([[10.0, 4.0, 3.0]] * 3), damages, points=20)
    assert front[0] == [0, 0, 0]
    assert front[-1] == [2, 2, 2]
    costs = [sum((10.0, 4.0, 3.0)[c] for c in mix) for mix in front]
    harms = [sum(float(damages[i, c]) for i, c in enumerate(mix)) for mix in front]
    assert costs == sorted(costs, reverse=True)
    assert harms == sorted(harms)
    assert len(rates.price_sweep(torch.tensor([[10.0, 4.0, 3.0]] * 3), damages, points=3)) == 3
    dearer = torch.tensor([[3.0, 4.0, 10.0]] * 3)
    assert rates.price_sweep(dearer, damages, points=20) == [[0, 0, 0]]  # full attention is the cheapest here


def test_every_rate_in_all_layers_is_a_candidate(model: torch.nn.Module, images: torch.Tensor) -> None:
    backbone, specs = convert(model, "full").eval(), rates.rate_specs("foveal", (0.1, 0.5))
    mixes = rates.rate_mixes(backbone, specs, Search(images=images[:2], points=2, budget=0.02), keep_slower=True)
    found = [rates.attention_and_layers(backbone, specs, mix)[0] for mix, _ in mixes]
    assert found[0] == "full"
    assert {"foveal:keep=0.1", "foveal:keep=0.5"} <= set(found)
    assert len(found) == len(set(found))


def test_what_blocks_say_is_slower_is_left_out(model: torch.nn.Module, images: torch.Tensor) -> None:
    backbone, specs = convert(model, "full").eval(), rates.rate_specs("foveal", (0.1, 0.5))
    search, depth = Search(images=images[:2], points=2, budget=0.02), len(backbone.blocks)
    timed = f"milliseconds on all tokens of foveal:keep=0.5, foveal:keep=0.1, batch 1 {search.where.name}"
    search.log.values[timed] = [[1.0, 2.0, 1.5]] * depth
    assert rates.rate_mixes(backbone, specs, search) == [([0] * depth, 0.0)]
    search.log.values[timed] = [[1.0, 2.0, 0.5]] * depth
    found = rates.rate_mixes(backbone, specs, search)
    assert found[-1] == ([2] * depth, 0.5 * depth)
    assert not any(1 in mix for mix, _ in found), "the rate that is slower"


def test_layers_that_read_another_are_left_with_the_one_they_read(images: torch.Tensor) -> None:
    attendless.load_plugin(str(Path(__file__).resolve().parents[1] / "examples" / "echo.py"))
    model = timm.create_model("columnar_micro_patch4_32", attention="full").eval()
    depth = len(model.blocks)
    model = convert(model, f"full/echo/{depth - 2}xfull", below_breakeven="keep").eval()
    found = tune(model, images[:, :, :32, :32], max_drop=100, **QUICK)
    touched = {layer for c in found.candidates for layer in c.layers}
    assert touched == set(range(2, depth))
    assert all("echo" in c.attention for c in found.candidates)
    echoes = convert(model, f"full/{depth - 1}xecho", below_breakeven="keep").eval()
    with pytest.raises(UserError, match="no layer can take foveal"):
        tune(echoes, images[:, :, :32, :32], **QUICK)


# Judging -------------------------------------------------------------------------------------------------------------


def test_the_expected_loss_takes_the_dense_model_at_its_word() -> None:
    dense = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]).log()
    found = judging.judge(dense, torch.tensor([0, 1, 2, 0]), cost=0.1)
    assert found.expected_drop == pytest.approx(100 * (0.5 - 0.4) / 4)
    assert found.agreement == 0.75
    low, high = found.expected_drop_ci
    assert low < found.expected_drop < high
    assert found.agreement_ci[0] < 0.75 < found.agreement_ci[1]


def test_a_model_is_taken_to_be_as_sure_as_it_is_right() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(200, 10)
    sure = 100 * float(logits.softmax(-1).amax(-1).mean())
    assert judging.temperature(logits, None) == 1
    for accuracy in (sure - 15, sure, sure + 15):
        found = (logits / judging.temperature(logits, accuracy)).softmax(-1).amax(-1).mean()
        assert 100 * float(found) == pytest.approx(accuracy, abs=1e-3)
    second = logits.topk(2).indices[:, 1]
    modest, sharp = (judging.losses(logits / judging.temperature(logits, a), second).mean() for a in (sure, sure + 15))
    assert sharp > modest  # who is right more often has more to lose


@pytest.mark.parametrize("share", [0.005, 0.03, 0.1])
def test_the_interval_of_the_loss_holds_what_it_says(share: float) -> None:
    """Over many sets of 100 images on which few answers change, and what each costs differs, 95 % hold the truth."""
    torch.manual_seed(0)
    drawn = (torch.rand(4000, 100) < share) * torch.rand(4000, 100) * 0.4
    truth, cost = share * 0.2, 0.4 * (1 / 3) / (1 / 2)
    held = [low <= truth <= high for low, high in (judging.interval(float(m), 100, cost) for m in drawn.mean(1))]
    assert sum(held) / len(held) > 0.93


def test_no_change_seen_is_not_none_there() -> None:
    dense = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()
    cost = judging.flip_cost(dense, [torch.zeros(2)])
    assert cost == pytest.approx((0.8 + 0.2) / 2), "what the dense model's second choice would cost"
    assert judging.flip_cost(dense, [torch.zeros(2), torch.tensor([0.0, 0.2])]) == pytest.approx(0.2)
    low, high = judging.judge(dense, torch.tensor([0, 0]), cost).expected_drop_ci
    assert low == 0
    assert high > 50


def test_images_are_held_out() -> None:
    images = torch.arange(256.0).reshape(256, 1, 1, 1)
    parts = judging.split(images, probe=64)
    assert [len(part) for part in parts] == [64, 96, 96]
    assert sorted(torch.cat(parts).flatten().tolist()) == list(range(256)), "each image serves one purpose"
    for part in parts:
        assert part.flatten().max() - part.flatten().min() > 240, "and each part is spread over the set"
    with pytest.raises(UserError, match="5 images: expected at least 6"):
        judging.split(images[:5], probe=64)


def test_how_many_images_would_tell() -> None:
    judged = Judgement(100, 0.95, (0.9, 0.98), 0.25, (0.05, 1.25))
    assert judging.images_needed(judged, 0.5) == pytest.approx(100 * 4**2)
    assert judging.images_needed(judged, 0.25) == float("inf")
    note = "100 fresh images do not show whether the accuracy drop is at most 0.5 percentage points"
    assert Goal(0.5).doubt(judged, images=256) == f"{note}; about 4,000 images in total are needed"
    assert Goal(1.5).doubt(judged, 256) == ""
    assert "exceeds 0.01 percentage points" in Goal(0.01).doubt(judged, 256)
    assert "a million images are not enough" in Goal(0.25).doubt(judged, 256)
    assert Goal(target_ms=5).doubt(judged, 256) == ""


# Choosing ------------------------------------------------------------------------------------------------------------


def candidate(
    ratio: float, drop: float, *, spread: float = 0.02, pairs: int = 25, ms: float = 100, typical: float | None = None
) -> Candidate:
    timed = Comparison(ratio, (ratio - spread / 2, ratio + spread / 2), (ratio - spread, ratio + spread), pairs)
    judged = Judgement(96, 1 - drop / 10, (0.8, 1.0), drop, (drop / 2, 2 * drop + 0.1))
    unchanged = ratio == 1
    return Candidate(
        change=Change("full") if unchanged else Change(f"foveal:keep={ratio / 10:.3f}", (0, 1)),
        setting=Setting(size=(384, 384), batch=1, depth=2),
        cost=CostShare(macs=0.7, core=0.5),
        judged=UNCHANGED if unchanged else judged,
        typical_drop=drop if typical is None else typical,
        timed=Timing(timed, ms),
    )


def test_chooses_by_the_ratio_within_the_bound() -> None:
    found = [candidate(1, 0), candidate(1.14, 0.1), candidate(1.26, 0.4), candidate(1.4, 0.6)]
    chosen, reason = Goal().choose(found)
    assert chosen == found[2]
    assert reason == "the fastest candidate with an expected accuracy drop of at most 0.5 percentage points"
    assert Goal(0.2).choose(found)[0] == found[1]
    assert Goal(1.0).choose(found)[0] == found[3]


def test_luck_is_not_chosen() -> None:
    assert judging.typical_drops([0.0, 1.0, 0.2], [0.0, 0.1, 0.2]) == pytest.approx([0.0, 0.4, 0.8])
    assert judging.typical_drops([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]
    found = [candidate(1, 0), candidate(1.2, 0.4), candidate(1.3, 0.3, typical=0.8)]
    assert Goal().choose(found)[0] == found[1]
    assert [tuned(*found).note(c) for c in found][1:] == ["chosen", "typical drop 0.8"]
    assert Goal(1.0).choose(found)[0] == found[2]
    assert Goal(target_ms=90).choose(found)[0] == found[1], "the most faithful within the time, by the same measure"


def test_what_cannot_be_told_from_the_dense_model_is_no_quicker() -> None:
    noisy, hasty, slower = candidate(1.2, 0.0, spread=0.5), candidate(1.3, 0, pairs=5), candidate(0.8, 0)
    dense = candidate(1, 0)
    chosen, reason = Goal().choose([dense, noisy, hasty, slower])
    assert chosen == dense
    assert reason == "no candidate is significantly faster than the unchanged model"
    chosen, reason = Goal().choose([dense, candidate(1.3, 2.0)])
    assert chosen == dense
    assert reason.startswith(
        "no candidate with an expected accuracy drop of at most 0.5 percentage points is significantly"
    )


def test_target_ms() -> None:
    front = [candidate(1, 0), candidate(1.6, 0.3), candidate(2.5, 2)]
    assert Goal(target_ms=70).choose(front)[0] == front[1]
    assert Goal(target_ms=120).choose(front)[0] == front[0], "the model as it is will do"
    chosen, reason = Goal(target_ms=1).choose(front)
    assert chosen == front[2]
    assert "no candidate reaches 1 ms" in reason
    assert Goal(target_ms=1).choose(front[:1])[0] == front[0]


def tuned(*found: Candidate) -> Tuned:
    chosen, reason = Goal().choose(found)
    return Tuned(chosen, found, Goal(), reason, chosen.judged, 256)


def test_the_front_is_what_none_beats() -> None:
    found = [candidate(1, 0), candidate(1.1, 0.4), candidate(1.2, 0.3), candidate(1.3, 0.9)]
    assert tuned(*found).front == (found[0], found[2], found[3])
    assert [tuned(*found).note(c) for c in found] == ["unchanged model", "not on the front", "chosen", ""]


def test_what_may_be_quicker_is_said() -> None:
    dense, noisy, slower = candidate(1, 0), candidate(1.2, 0.1, spread=0.5), candidate(0.8, 0.1)
    found = tuned(dense, slower, noisy)
    assert [found.note(c) for c in found.candidates] == ["chosen", "slower", "speed-up not significant"]
    assert found.findings[-1].startswith("note: a speed-up of 1.20× is not significant: use a larger budget")
    assert len(tuned(dense, slower).findings) == 1


def test_the_clock_is_shown_as_many_images_as_are_asked_for(model: torch.nn.Module, images: torch.Tensor) -> None:
    assert repeat_to_batch(images[:3], 5).equal(images[[0, 1, 2, 0, 1]])
    sizes: set[int] = set()

    def seen(module: torch.nn.Module, given: tuple[torch.Tensor, ...], out: object) -> None:
        if isinstance(module, timm.layers.PatchEmbed):
            sizes.add(len(given[0]))

    hook = torch.nn.modules.module.register_module_forward_hook(seen)
    try:
        found = tune(model, images, batch=3, max_drop=100.0, **QUICK)
    finally:
        hook.remove()
    assert 3 in sizes
    assert {c.setting.batch for c in found.candidates} == {3}
    assert "batch 3" in found.findings[0]
    with pytest.raises(UserError, match="batch=0"):
        tune(model, images, batch=0)


# The whole -----------------------------------------------------------------------------------------------------------


def test_all_race_together_and_are_judged_on_images_held_out(model: torch.nn.Module, images: torch.Tensor) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = tune(model, images, max_drop=100.0, **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    dense = found.candidates[0]
    assert (dense.attention, dense.agreement, dense.cost.core, dense.cost.macs) == ("full", 1, 1, 1)
    assert dense.speedup == 1
    assert len({c.timed.comparison.pairs for c in found.candidates}) == 1, "the same rounds for all"
    for c in found.candidates:
        assert c.latency_ms * c.speedup == pytest.approx(dense.latency_ms)
    held_out = judging.split(images, 4)[1]
    for c in found.candidates[1:]:
        ours = convert(model, c.attention, layers=c.layers, below_breakeven="keep").eval()
        with torch.no_grad():
            answers = (ours(held_out).argmax(1) == model(held_out).argmax(1)).float().mean()
        assert c.agreement == pytest.approx(float(answers))
        assert c.judged.images == len(held_out)
    assert found.convert(model).attention == found.attention
    text = str(found)
    assert all(c.attention in text for c in found.candidates)
    assert found.reason in text
    json.dumps([found.as_dict(), *(c.as_dict() for c in found.candidates)], allow_nan=False)


def test_a_model_of_hugging_face(images: torch.Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    found = tune(model, images[:, :, :32, :32], max_drop=100, **QUICK)
    assert {"full", "foveal:keep=0.1"} <= {c.attention for c in found.candidates}


def test_weights_are_shared_where_they_are_equal(model: torch.nn.Module, images: torch.Tensor) -> None:
    theirs = {value.data_ptr() for value in model.parameters()}
    ours = convert(model, "foveal:keep=0.1", below_breakeven="keep").eval()
    with torch.no_grad():
        expected = ours(images[:2])
        ours.norm.weight += 1
        shared = share_weights(ours, model)
        own = [name for name, value in shared.named_parameters() if value.data_ptr() not in theirs]
        assert own == ["norm.weight"], "what differs stays its own"
        ours.norm.weight -= 1
        torch.testing.assert_close(shared(images[:2]), expected)


@pytest.mark.parametrize("change", [Change("foveal:keep=0.1", (0, 2)), Change("full", (), "tome:r=8"), Change("full")])
def test_a_candidate_is_built_from_the_baselines_weights(
    model: torch.nn.Module, images: torch.Tensor, change: Change
) -> None:
    """The candidate computes what `convert` does, owns no weights of its own and leaves the baseline unchanged."""
    backbone = convert(model, "full").eval()
    modules, state = {id(m) for m in backbone.modules()}, {id(t) for t in backbone.parameters()}
    made = change.build(backbone).eval()
    assert {id(t) for t in made.parameters()} == state
    assert not modules & {id(m) for m in made.modules()}
    assert (backbone.attention, backbone.tokens, backbone.readout) == ("full", "", False)
    assert {id(m) for m in backbone.modules()} == modules
    with torch.no_grad():
        assert torch.equal(made(images[:2]), change.convert(backbone).eval()(images[:2]))


def test_trials_leave_the_baseline_unchanged(model: torch.nn.Module, images: torch.Tensor) -> None:
    backbone = convert(model, "full").eval()
    before = [*backbone.named_modules()]
    view = with_tokens(backbone, "tome:r=4")
    trial = with_attention(backbone, 1, parse("foveal:keep=0.1"))
    assert (view.tokens, trial.attention.count("foveal")) == ("tome:r=4", 1)
    view.blocks[0].register_forward_hook(lambda *given: None)
    attention_times(backbone, [0, 1], [parse("foveal:keep=0.1")], images[:1], 0.01, silent)
    assert [*backbone.named_modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
    assert view.blocks[0].attn is backbone.blocks[0].attn, "a view shares what does not hold a reducer"
    assert {id(t) for t in trial.parameters()} == {id(t) for t in backbone.parameters()}
    copied = shared_copy(backbone)
    assert {id(t) for t in copied.state_dict(keep_vars=True).values()} == {
        id(t) for t in backbone.state_dict(keep_vars=True).values()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"max_drop": 1, "target_ms": 1}, "not both"),
        ({"max_drop": float("nan")}, "max_drop=nan: expected"),
        ({"max_drop": -1}, "max_drop=-1: expected"),
        ({"target_ms": -1}, "target_ms=-1: expected"),
        ({"target_ms": float("nan")}, "target_ms=nan: expected"),
        ({"target_ms": float("inf")}, "target_ms=inf: expected"),
        ({"accuracy": 0.0}, "accuracy=0.0: expected"),
        ({"accuracy": float("nan")}, "accuracy=nan: expected"),
        ({"rates": ()}, "rates: got none, expected"),
        ({"rates": (0.1, 2)}, "rates: got 2, expected"),
        ({"rates": (float("nan"),)}, "rates: got nan, expected"),
        ({"points": 1}, "points=1"),
        ({"budget": 0.0}, "budget=0.0"),
        ({"attention": "window"}, "no keep option"),
        ({"attention": "none", "tokens": "none"}, "there is nothing to search"),
        ({"tokens": "nonsense"}, "nonsense"),
    ],
)
def test_mistakes(model: torch.nn.Module, images: torch.Tensor, words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        tune(model, images, **words)


def test_nothing_is_told_from_nan(model: torch.nn.Module, images: torch.Tensor) -> None:
    damaged = images.clone()
    damaged[3, 0, 5, 5] = float("nan")
    with pytest.raises(UserError, match=r"image 3 holds NaN or infinity \(1 of 12"):
        tune(model, damaged, **QUICK)
    with pytest.raises(UserError, match=r"images are torch.float32 \[3, 128, 128\]: expected"):
        tune(model, images[0], **QUICK)
    broken = convert(model, "full")
    broken.head.weight.data[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"head\.weight holds NaN or infinity"):
        tune(broken, images, **QUICK)
    broken.head.weight.data[:] = 3e38  # sound weights, answers beyond all numbers
    with pytest.raises(UserError, match="the model returns NaN or infinity"):
        tune(broken, images, **QUICK)
    with pytest.raises(UserError, match="no classifier"):
        tune(timm.create_model("test_vit", img_size=128, num_classes=0).eval(), images, **QUICK)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(9):
        Image.effect_noise((48, 40), 20 + 20 * i).convert("RGB").save(folder / f"{i}.png")
    (folder / "9.png").write_bytes(b"no picture")
    return str(folder)


WORDS = ["columnar_micro_patch4_32", "--tokens", "none", "--rates", "0.25", "--budget", "0.02", "--images", "20"]


def test_one_command_for_the_tradeoff(photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture, result = (str(tmp_path / name) for name in ("tuned.html", "curve.png", "tuned.json"))
    words = [*WORDS, "--data", photos, "--size", "32", "48", "--report", page, "--plot", picture, "--json", result]
    assert main(["tune", *words]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [
        f"maximum speed-up at {size} px of sparser attention alone" for size in (32, 48)
    ], "the caps come first"
    assert "the weights are random" in out
    assert out.count("1 of 10 images could not be read") == 1
    found = json.loads(Path(result).read_text())
    assert {tuple(row["size"]) for row in found["rows"]} == {(32, 32), (48, 48)}
    assert {"full", "foveal"} <= {row["attention"] for row in found["rows"]}
    assert sum(row["chosen"] for row in found["rows"]) == len(found["chosen"]) == 2
    text = Path(page).read_text()
    assert text.count("<tr") == 1 + len(found["rows"])
    assert "<svg" in text
    assert "{{" not in text
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", re.sub(r'xlink:href="#', 'href="#', text))
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 800


def test_the_model_chosen_is_saved_and_the_next_command_is_said(
    photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tuned.safetensors")
    assert main(["tune", *WORDS, "--data", photos, "--out", out]) == 0
    said = capsys.readouterr().out
    chosen = load(out).attention
    assert f"--attention {chosen} " in said or "nothing to convert: the unchanged model, full" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-drop", "nan"], "--max-drop: 'nan': expected a number that is 0 or more"),
        (["--target-ms", "-1"], "--target-ms: '-1': expected a number above 0"),
        (["--rates", "2"], "'2': expected a number above 0"),
        (["--rates"], "expected at least one argument"),
        (["--budget", "nan"], "--budget: 'nan': expected a number above 0"),
        (["--attention", "window"], "no keep option"),
        (["--attention", "none", "--tokens", "none"], "nothing to search"),
        (["--tokens", "nonsense"], "nonsense"),
        (["--size", "32", "48", "--out", "x.safetensors"], "give one --size"),
    ],
)
def test_mistakes_are_found_before_the_model_is_built(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["tune", "no_such_model", "--data", "no such folder", *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


# The picture ---------------------------------------------------------------------------------------------------------


def crowd(size: int) -> Tuned:
    found = [candidate(1, 0), *(candidate(1 + k / 100, k**2 / 500) for k in range(1, 25))]
    found = [dataclasses.replace(c, setting=Setting((size, size), batch=1, depth=2)) for c in found]
    return tuned(*found)


def test_the_plots_labels_do_not_overlap() -> None:
    from attendless.optimize.tradeoff import figure

    drawn = figure([crowd(384), crowd(512)])
    drawn.draw_without_rendering()
    boxes = [text.get_window_extent() for text in drawn.axes[0].texts]
    assert len(boxes) > 10
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    inside = drawn.axes[0].get_window_extent()
    assert all(inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1) for box in boxes)


def test_the_page_is_read_on_light_and_dark_ground_and_escapes_what_it_is_given() -> None:
    from attendless.optimize.tradeoff_page import page

    text = page([crowd(384)], "<model> & data", ["attendless convert"])
    assert "&lt;model&gt; &amp; data" in text
    assert "currentColor" in text
    assert "#010203" not in text
    assert text.count('class="best"') == 1
