"""Backbones as feature pyramids, and the heads on them: shapes, counts by formula, losses by definition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import timm
import torch
from torch.nn import functional as F
from torchvision.ops import box_iou

import attendless
from attendless import UserError, convert
from attendless.backbones.cost import parameters
from attendless.dense.cost import dense_macs
from attendless.dense.features import Features, SimplePyramid
from attendless.dense.model import HEADS, build, head_for
from attendless.dense.segmentor import pixel_loss
from attendless.dense.tasks import probabilities
from attendless.dense.training import with_attention
from attendless.measure.macs import count

SMALL = {
    "retinanet": "retinanet:channels=8",
    "semantic_fpn": "semantic_fpn:channels=16",
    "upernet": "upernet:channels=8",
}


def column(attention: str = "full", tokens: str | None = None, **more: object):
    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5, **more)
    return convert(made, attention, tokens=tokens, below_breakeven="keep").eval()


def test_a_column_gives_four_maps_at_any_size() -> None:
    features = Features(column("foveal:keep=0.5"))
    for height, width in ((64, 64), (96, 160), (50, 70)):
        levels, extra = features(torch.randn(2, 3, height, width))
        high, wide = height + -height % 32, width + -width % 32
        assert [tuple(level.shape) for level in levels] == [
            (2, channels, high // stride, wide // stride)
            for channels, stride in zip((48, 96, 192, 192), (4, 8, 16, 32), strict=True)
        ]
        assert not extra


@pytest.mark.parametrize("patch", [4, 8, 14, 16, 32])
def test_strides_are_near_4_to_32_for_patches_of_any_size(patch: int) -> None:
    made = SimplePyramid(16, patch)
    levels = made(torch.randn(1, 16, 16, 16))
    strides = [patch * 16 / level.shape[-1] for level in levels]
    assert all(2 / 3 < stride / wanted < 3 / 2 for stride, wanted in zip(strides, (4, 8, 16, 32), strict=True))
    assert [level.shape[1] for level in levels] == made.channels


def test_tokens_that_were_merged_are_put_back() -> None:
    """The map has at every cell the token that stands for it."""
    model = column(tokens="tome:r=4")
    images = torch.randn(1, 3, 64, 64)
    x, context = model.forward_context(images)
    assert context.grid.reduced
    expected = torch.stack([x[0, 1 + owner] for owner in context.grid.owners[0].tolist()]).T.view(192, 4, 4)
    features = Features(model)
    torch.testing.assert_close(features(images).levels[2][0], expected)


@pytest.mark.parametrize("name", ["pyramid_pvt_v2_b0", "pyramid_swin_tiny", "resnet18"])
def test_pyramids_give_their_own_stages(name: str) -> None:
    features = Features(timm.create_model(name, num_classes=0).eval())
    levels, _ = features(torch.randn(1, 3, 70, 90))
    assert [tuple(level.shape[1:]) for level in levels] == [
        (channels, 96 // stride, 96 // stride)
        for channels, stride in zip(features.channels, (4, 8, 16, 32), strict=True)
    ]


def test_extra_losses_of_attentions_are_learned_from() -> None:
    model = build(column(tokens="dynamicvit:keep=0.5,at=1"), SMALL["semantic_fpn"], 3).train()
    terms = model.losses(torch.randn(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.long))
    assert len(terms) > 1
    assert all(value.isfinite() for value in terms.values())


def test_what_gives_no_maps_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be a backbone"):
        Features(timm.create_model("columnar_hvt_tiny", num_classes=0))


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_and_answers_at_odd_sizes(head: str) -> None:
    torch.manual_seed(0)
    model = build(column(), SMALL[head], 3)
    images = torch.randn(2, 3, 50, 70)
    boxes = [{"boxes": torch.tensor([[4.0, 4, 40, 40]]), "labels": torch.tensor([1])}]
    boxes.append({"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)})  # an empty picture
    masks = torch.randint(0, 3, (2, 50, 70))
    loss = sum(model.train().losses(images, boxes if model.task == "detection" else masks).values())
    loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    # The class token's last output and, in detection, the finest map lead nowhere.
    assert all("levels.0" in name for name in silent), silent
    with torch.no_grad():
        answer = model.eval()(images)
    if model.task == "segmentation":
        assert answer.shape == (2, 3, 50, 70)
    else:
        assert all(set(found) == {"boxes", "labels", "scores"} for found in answer)


def test_boxes_come_out_where_they_were_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that says of every anchor what it is to learn: what is found are the targets, also in padded pictures."""
    model = build(column(), SMALL["retinanet"], 3).eval()
    images = torch.randn(2, 3, 150, 210)
    boxes = [torch.tensor([[20.0, 30, 70, 90], [100, 40, 190, 140]]), torch.tensor([[5.0, 60, 45, 120]])]
    labels = [torch.tensor([2, 0]), torch.tensor([1])]
    rules, (_, anchors, _) = model._rules[0], model.outputs(images)
    told: dict[str, list[torch.Tensor]] = {"cls_logits": [], "bbox_regression": []}
    for places, truth, classes in zip(anchors, boxes, labels, strict=True):
        every = torch.cat(places)
        matched = rules.proposal_matcher(box_iou(truth, every))
        logits = torch.full((len(every), 3), -9.0)
        logits[matched >= 0, classes[matched[matched >= 0]]] = 9.0
        told["cls_logits"].append(logits)
        told["bbox_regression"].append(rules.box_coder.encode_single(truth[matched.clamp(min=0)], every))
    monkeypatch.setattr(model.head, "forward", lambda pyramid: {n: torch.stack(v) for n, v in told.items()})
    for found, truth, classes in zip(model(images), boxes, labels, strict=True):
        order = found["labels"].argsort()
        torch.testing.assert_close(found["boxes"][order], truth[classes.argsort()], atol=1e-2, rtol=1e-3)
        assert found["labels"].sort().values.tolist() == sorted(classes.tolist())


def test_padding_changes_nothing_for_a_picture_that_needs_none() -> None:
    model = build(column(), SMALL["semantic_fpn"], 3).eval()
    images = torch.randn(1, 3, 64, 96)
    whole = model.decode(model.features(images).levels)["pixels"][0]
    torch.testing.assert_close(model(images), F.interpolate(whole, (64, 96), mode="bilinear"))


def test_pixels_that_are_ignored_do_not_count() -> None:
    logits, targets = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    targets[0, :2] = 255
    chosen = targets != 255
    expected = -logits.log_softmax(1).permute(0, 2, 3, 1)[chosen].gather(1, targets[chosen][:, None]).mean()
    torch.testing.assert_close(pixel_loss(logits, targets), expected)
    assert pixel_loss(logits, torch.full_like(targets, 255)) == 0


def test_several_scales_average_what_each_says() -> None:
    model = build(column(), SMALL["semantic_fpn"], 3).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain, mirrored = model(images).softmax(1), model(images.flip(-1)).softmax(1).flip(-1)
        torch.testing.assert_close(probabilities(model, images, flip=True), (plain + mirrored) / 2)
        double = model(F.interpolate(images, (128, 128), mode="bilinear", antialias=True)).softmax(1)
        both = (plain + F.interpolate(double, (64, 64), mode="bilinear")) / 2
        torch.testing.assert_close(probabilities(model, images, (1.0, 2.0)), both)


def test_wrong_heads_are_answered() -> None:
    with pytest.raises(UserError, match="unknown head 'unet'"):
        head_for("segmentation", "unet")
    with pytest.raises(UserError, match="for segmentation, not for detection"):
        head_for("detection", "upernet")
    with pytest.raises(UserError, match="unknown task 'depth'"):
        head_for("depth", None)
    with pytest.raises(UserError, match="multiple of 8"):
        build(column(), "semantic_fpn:channels=65", 3)
    with pytest.raises(UserError, match="batch of 2 or more"):
        build(column(), SMALL["upernet"], 3).train().losses(torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64).long())


@pytest.mark.parametrize("head", HEADS)
def test_a_file_knows_its_task(head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(column("foveal:keep=0.5", tokens="tome:r=2"), SMALL[head], 3).eval()
    path = tmp_path / "dense.safetensors"
    attendless.save(model, path)
    again = attendless.load(path)
    assert (again.task, again.head_text, again.num_classes) == (HEADS[head][0], SMALL[head], 3)
    assert (again.attention, again.tokens) == (model.attention, model.tokens)
    images = torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        one, other = model(images), again(images)
    if head == "retinanet":
        one, other = one[0]["scores"], other[0]["scores"]
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    with pytest.raises(UserError, match="holds a model for"):
        attendless.open_model(path)


def test_another_attention_keeps_the_head() -> None:
    model = build(column(), SMALL["semantic_fpn"], 3).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        same = with_attention(model, "topk:keep=1", None)
        assert same.attention == "topk:keep=1"
        torch.testing.assert_close(same(images), expected, atol=1e-4, rtol=1e-4)


# Counts ---------------------------------------------------------------------------------------------------------------


def empty(name: str, head: str, classes: int):
    with torch.device("meta"):
        return build(timm.create_model(name), head, classes)


def test_retinanets_head_costs_what_its_formula_says() -> None:
    """Pyramid of 3 maps and two more, 4 + 4 convolutions, 9 anchors, as published."""
    model, size, dims = empty("pyramid_pvt_tiny", "retinanet", 80), (800, 1280), (128, 320, 512)
    n = [math.ceil(size[0] / s) * math.ceil(size[1] / s) for s in (8, 16, 32, 64, 128)]
    conv = 256 * 256 * 9
    pyramid = sum(x * d * 256 for x, d in zip(n, dims, strict=False)) + sum(n[:3]) * conv
    pyramid += n[3] * 512 * 256 * 9 + n[4] * conv
    head = sum(n) * (8 * conv + 2304 * 9 * 84)
    assert dense_macs(model, size).total == count(model.backbone, size).total + pyramid + head
    weights = sum(d * 256 + 256 for d in dims) + 4 * (conv + 256) + 512 * 2304 + 256
    weights += 8 * (conv + 256) + 2304 * 9 * 84 + 9 * 84
    assert parameters(model) - parameters(model.features) == weights


def test_semantic_fpn_costs_what_its_formula_says() -> None:
    model, size, dims = empty("pyramid_pvt_tiny", "semantic_fpn", 150), (512, 2048), (64, 128, 320, 512)
    n = [size[0] * size[1] // s // s for s in (4, 8, 16, 32)]
    first, later = 256 * 128 * 9, 128 * 128 * 9
    macs = sum(x * d * 256 for x, d in zip(n, dims, strict=True)) + sum(n) * 256 * 256 * 9
    macs += sum(n) * first + n[1] * later + (n[2] + n[1]) * later + n[0] * 128 * 150
    assert dense_macs(model, size).total == count(model.backbone, size).total + macs
    assert parameters(model) - parameters(model.features) == (
        sum(d * 256 + 256 for d in dims) + 4 * (256 * 2304 + 256) + 4 * (first + 256) + 3 * (later + 256) + 129 * 150
    )


@pytest.mark.parametrize(
    ("name", "head", "size", "params", "giga"),
    [
        ("pyramid_pvt_small", "retinanet", (800, 1280), 34.2, 226.3),
        ("pyramid_pvt_medium", "retinanet", (800, 1280), 53.9, 282.8),
        ("pyramid_swin_tiny", "retinanet", (800, 1280), 38.5, 244.5),
        ("pyramid_swin_tiny", "semantic_fpn", (512, 2048), 31.9, 182.5),
        ("pyramid_swin_tiny", "upernet", (512, 2048), 59.9, 944.9),
    ],
)
def test_the_published_models_have_the_published_counts(
    name: str, head: str, size: tuple[int, int], params: float, giga: float
) -> None:
    from attendless_lab.papers.lavit_dense import counts

    found, layers, every = counts(empty(name, head, 80 if head == "retinanet" else 150), size)
    assert found / 1e6 == pytest.approx(params, rel=0.005)
    assert layers / 1e9 == pytest.approx(giga, rel=0.005)
    if "pvt" in name:  # what the rule leaves out
        assert every > 1.2 * layers
