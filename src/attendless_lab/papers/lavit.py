"""Tables of "You Only Need Less Attention at Each Stage in Vision Transformers" (LaViT, CVPR 2024), from its poster.

The authors published no code. The poster gives neither depths, nor the number of layers per stage with less attention,
nor the cost of Θ and Ψ. LaViT's own rows are therefore counted on our `lavit_…` models, which follow PVT v2, and rows
"+ LA" on our choice of layers (`backbones/plugins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch

from attendless.attention.lavit import LaViTAttention
from attendless.backbones.cost import parameters
from attendless.backbones.plugins import PLUGINS, with_less
from attendless.convert import open_model
from attendless.measure.macs import layer_costs

from . import rules
from .table import Row, Source, Table, register_table
from .throughput import alone, pairs

SOURCE = Source(
    "lavit",
    "LaViT",
    'Zhang et al., "You Only Need Less Attention at Each Stage in Vision Transformers", CVPR 2024, poster',
    """\
The authors published no code, and the poster gives no depths. Our `lavit_tiny`, `lavit_small` and `lavit_base` follow
PVT v2, with less attention in the last two stages. [Less attention](../lavit.md) explains the mechanism.
""",
)
WITH_MAPS = "Θ and Ψ are counted as dense matrix products over the scores, as on the poster, unless a footnote differs"

_LOST = "the poster prints {}, without the decimal point"
OURS = "our model follows PVT v2 because the poster gives no stage table"
_PRUNED = "token pruning removes no weights"
TRAINED = "the authors' value after training on {}, not re-run"
_IMAGENET = TRAINED.format("ImageNet")
NOT_BUILT = "not built, because neither timm nor attendless has the model"

#: Row of Table 2 → the model counted (with what it is built with), printed parameters (M), FLOPs (G), throughput (on
#: their GPU), top-1. An empty name: not built here.
_TABLE_2: dict[str, tuple[str, dict[str, Any], str, str, str, str]] = {
    "ResNet-18": ("resnet18", {}, "11.7", "1.8", "4454", "69.8"),
    "RegNetY-1.6G": ("regnety_016", {}, "11.2", "1.6", "1845", "78.0"),
    "DeiT-T": ("deit_tiny_patch16_224", {}, "5.7", "1.3", "3398", "72.2"),
    "PVT-T": ("pyramid_pvt_tiny", {}, "13.2", "1.9", "1768", "75.1"),
    "PVTv2-b1": ("pyramid_pvt_v2_b1", {}, "13.1", "2.1", "1231", "78.7"),
    "LaViT-T": ("lavit_tiny", {}, "10.9", "1.6", "2098", "79.2"),
    "ResNet-50": ("resnet50", {}, "25.0", "4.1", "1279", "76.2"),
    "RegNetY-4G": ("regnety_040", {}, "20.6", "4.0", "1045", "79.4"),
    "EfficientNet-B4": ("tf_efficientnet_b4", {}, "19.0", "4.2", "387", "82.4"),
    "EfficientViT-B2": ("efficientvit_b2", {}, "24.0", "4.5", "1587", "82.1"),
    "DeiT-S": ("deit_small_patch16_224", {}, "22.1", "4.6", "1551", "79.9"),
    "DeepViT-S": ("columnar_deepvit_small", {}, "27.0", "6.2", "1423", "82.3"),
    "PVT-S": ("pyramid_pvt_small", {}, "24.5", "3.8", "1007", "79.8"),
    "CvT-S": ("", {}, "25.8", "7.1", "636", "82.0"),
    "Swin-T": ("pyramid_swin_tiny", {}, "28.3", "4.5", "961", "81.2"),
    "PVTv2-b2": ("pyramid_pvt_v2_b2", {}, "25.4", "4.0", "695", "82.0"),
    "DynamicViT-S (90%)": (
        "columnar_small_patch16_224", {"tokens": "dynamicvit:keep=0.9"}, "24.1", "4.0", "1524", "79.8"),
    "EViT-S (90%)": ("columnar_small_patch16_224", {"tokens": "evit:keep=0.9"}, "23.9", "4.1", "1706", "79.7"),
    "LiT-S": ("", {}, "27.0", "4.1", "1298", "81.5"),
    "PPT-S": ("", {}, "22.1", "3.1", "1698", "79.8"),
    "LaViT-S": ("lavit_small", {}, "22.4", "3.3", "1546", "82.6"),
    "ResNet-101": ("resnet101", {}, "45.0", "7.9", "722", "77.4"),
    "ViT-B": ("vit_base_patch16_224", {}, "86.6", "17.6", "270", "77.9"),
    "DeiT-B": ("deit_base_patch16_224", {}, "86.6", "17.5", "582", "81.8"),
    "Swin-S": ("pyramid_swin_small", {}, "49.6", "8.7", "582", "83.1"),
    "Swin-B": ("pyramid_swin_base", {}, "87.8", "15.4", "386", "83.4"),
    "DynamicViT-B (90%)": (
        "columnar_base_patch16_224", {"tokens": "dynamicvit:keep=0.9"}, "76.6", "14.1", "732", "81.5"),
    "EViT-B (90%)": ("columnar_base_patch16_224", {"tokens": "evit:keep=0.9"}, "78.6", "15.3", "852", "81.3"),
    "LiT-M": ("", {}, "48.0", "8.6", "638", "83.0"),
    "PPT-B": ("", {}, "86.0", "14.5", "714", "81.4"),
    "PVT-M": ("pyramid_pvt_medium", {}, "44.2", "6.7", "680", "81.2"),
    "PVT-L": ("pyramid_pvt_large", {}, "61.4", "9.8", "481", "81.7"),
    "LaViT-B": ("lavit_base", {}, "39.6", "6.1", "877", "83.1"),
}  # fmt: skip
_NOTES = {
    ("ResNet-18", "parameters"): _LOST.format(117),
    ("DeiT-T", "FLOPs"): _LOST.format(13),
    ("PVT-T", "FLOPs"): _LOST.format(19),
    ("DeiT-B", "FLOPs"): "the same architecture as ViT-B, printed 0.1 lower",
    ("PVTv2-b1", "parameters"): "the authors of PVT v2 publish 14.0 M, as we count",
    ("ResNet-50", "parameters"): "printed 0.6 M lower than the count of timm's model",
    ("ResNet-101", "parameters"): "printed rounded up",
    ("ResNet-101", "FLOPs"): "printed 0.1 higher than the cost of its convolutions and head",
    ("EfficientNet-B4", "parameters"): "printed rounded down",
    ("EfficientNet-B4", "FLOPs"): "counted at 380 px, the size of its paper",
    ("EfficientViT-B2", "parameters"): "printed rounded",
    ("EfficientViT-B2", "FLOPs"): "counted at 224 px, and the printed value is unexplained",
    ("DeepViT-S", "parameters"): "the authors' configuration: width 396, 16 layers, convolutional stem",
    ("DeepViT-S", "FLOPs"): "the authors' configuration, whose stem alone is 0.9 G",
    ("DynamicViT-S (90%)", "parameters"): f"{_PRUNED}, and its three predictors have 0.7 M",
    ("DynamicViT-B (90%)", "parameters"): f"{_PRUNED}, but the printed value is below DeiT-B's",
    (
        "DynamicViT-B (90%)",
        "FLOPs",
    ): "layers 3, 6 and 9 keep 90 % of the tokens each, predictors included",
    ("DynamicViT-S (90%)", "FLOPs"): "layers 3, 6 and 9 keep 90 % of the tokens each",
    ("EViT-S (90%)", "parameters"): f"{_PRUNED}, and EViT has no further weights",
    ("EViT-S (90%)", "FLOPs"): "layers 3, 6 and 9 keep 90 % of the tokens each, and one fused token",
    ("EViT-B (90%)", "parameters"): f"{_PRUNED}, and EViT has no further weights",
    ("EViT-B (90%)", "FLOPs"): "layers 3, 6 and 9 keep 90 % of the tokens each, and one fused token",
    **{(f"LaViT-{size}", quantity): OURS for size in "TSB" for quantity in ("parameters", "FLOPs")},
}
#: Backbone → printed FLOPs (G) plain and with less attention, printed top-1 of both; tiny and small.
_EXTENSIBILITY: dict[str, tuple[tuple[str, str, str, str], tuple[str, str, str, str]]] = {
    "ViT": (("1.4", "1.2", "72.2", "73.2"), ("4.6", "4.0", "79.1", "80.0")),
    "DeiT": (("1.4", "1.2", "72.2", "73.4"), ("4.7", "4.2", "79.9", "80.4")),
    "DeepViT": (("1.5", "1.1", "73.4", "73.8"), ("4.8", "4.2", "80.9", "81.4")),
    "CeiT": (("1.2", "1.1", "76.2", "76.7"), ("4.5", "4.1", "82.0", "82.4")),
    "HVT": (("1.4", "1.2", "75.7", "76.2"), ("4.6", "4.2", "80.4", "80.8")),
    "PVT": (("1.9", "1.4", "75.1", "75.9"), ("3.8", "3.2", "79.8", "80.4")),
    "Swin": (("4.5", "4.0", "81.2", "81.7"), ("8.7", "7.8", "83.2", "83.5")),
}
_PLAIN = {
    "ViT": "Table 2 of the poster prints 1.3 G for the same architecture, as we count",
    "DeiT": "printed 0.1 higher than in Table 2 of the poster, with which we agree",
    "DeepViT": "no published DeepViT is so small, so ours have the published width 396 and the width of DeiT-T",
    "CeiT": "counted as in the authors' code, whose stem has 64 channels",
}
_DENSE = "with the poster's dense Θ and Ψ"
_OFFSET = "with offset maps, because dense maps would have 3,136² weights"
#: Ablation: row → arguments that remove the part from our `lavit_…`, printed top-1 of tiny and small.
_ABLATION: dict[str, tuple[dict[str, Any], str, str]] = {
    "w/o LA": ({"attention": "reduced:ratio=8/reduced:ratio=4/reduced/full", "carry": "none"}, "78.7", "82.0"),
    "w/o AR": ({"carry": "none"}, "79.0", "82.2"),
    "LaViT": ({}, "79.2", "82.6"),
    "w/o L_DP": ({}, "59.1", "57.1"),
}


def _build(name: str, arguments: dict[str, Any]) -> Any:
    return timm.create_model(name, **arguments) if arguments else open_model(name)


def _empty(name: str, arguments: dict[str, Any]) -> Any:
    """The model on the meta device: enough for counting, without memory for weights."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def _table_2() -> Iterator[Row]:
    for row, (name, arguments, params, flops, _, top1) in _TABLE_2.items():
        model = _build(name, arguments) if name else None
        counts = (parameters(model), rules.total(model)) if model is not None else (None, None)
        for quantity, unit, paper, ours in (
            ("parameters", "M", params, counts[0]),
            ("FLOPs", "G", flops, counts[1]),
        ):
            note = _NOTES.get((row, quantity), "") if name else NOT_BUILT
            yield Row(row, quantity, unit, paper, ours, note)
        yield Row(row, "top-1", "%", top1, None, _IMAGENET)


def _table_2_timed() -> Iterator[Row]:
    built = (
        (row, speed, partial(_build, name, given)) for row, (name, given, *_, speed, _) in _TABLE_2.items() if name
    )
    return alone(built)


def maps_macs(model: Any) -> int:
    """Multiply-accumulates of Θ, Ψ and the mixing of heads in all layers with less attention."""
    rows = [row for row in layer_costs(model) if row.spec is not None]
    attentions = [(model.get_submodule(row.name).attn, row.grid) for row in rows]
    return sum(attn.transform_macs(grid) for attn, grid in attentions if isinstance(attn, LaViTAttention))


def _extensibility() -> Iterator[Row]:
    for name, sizes in _EXTENSIBILITY.items():
        for size, model, (plain, less, top1, top1_less) in zip(("tiny", "small"), PLUGINS[name], sizes, strict=True):
            row = f"{name} {size}"
            counted = rules.total(_empty(model, {}))
            found = Row(row, "FLOPs", "G", plain, counted)
            yield found if found.agrees else Row(row, "FLOPs", "G", plain, counted, _PLAIN[name])
            yield Row(row, "top-1", "%", top1, None, _IMAGENET)
            ours = _empty(model, with_less(model, _dense(name)))
            total, maps, cheap = rules.total(ours), maps_macs(ours), rules.total(_empty(model, with_less(model)))
            yield Row(f"{row} + LA", "FLOPs", "G", less, total, _OFFSET if name == "PVT" else _DENSE)
            yield Row(f"{row} + LA", "top-1", "%", top1_less, None, _IMAGENET)
            yield Row(f"{row} + LA", "FLOPs without Θ and Ψ", "G", "", total - maps)
            yield Row(f"{row} + LA", "FLOPs with offset maps", "G", "", cheap)


def _dense(name: str) -> str:
    """Options of the poster's Θ and Ψ, which are dense; PVT has too many queries for them."""
    return "mix=false" if name == "PVT" else "map=dense,mix=false"


def _extensibility_timed() -> Iterator[Row]:
    def built() -> Iterator[tuple[str, str, Callable[[], Any], str, Callable[[], Any]]]:
        for name, models in PLUGINS.items():
            for size, model in zip(("tiny", "small"), models, strict=True):
                row = f"{name} {size}"
                yield row, "", partial(_build, model, {}), f"{row} + LA", partial(_build, model, with_less(model))

    return pairs(built())


def _ablation() -> Iterator[Row]:
    for row, (without, *printed) in _ABLATION.items():
        for size, top1 in zip(("tiny", "small"), printed, strict=True):
            model = _empty(f"lavit_{size}", without)
            yield Row(f"{row} {size}", "top-1", "%", top1, None, _IMAGENET)
            yield Row(f"{row} {size}", "parameters", "M", "", parameters(model))
            yield Row(f"{row} {size}", "FLOPs", "G", "", rules.total(model))


def _ablation_timed() -> Iterator[Row]:
    return alone(
        (f"{row} {size}", "", partial(_build, f"lavit_{size}", without))
        for row, (without, *_) in _ABLATION.items()
        for size in ("tiny", "small")
        if row != "w/o L_DP"  # a loss has no cost at inference
    )


for _name, _title, _counts, _times in (
    ("2", "Table 2: backbones on ImageNet-1K (224 px)", _table_2, _table_2_timed),
    (
        "extensibility",
        "Extensibility: less attention (LA) in seven backbones (224 px)",
        _extensibility,
        _extensibility_timed,
    ),
    (
        "ablation",
        "Ablation of less attention, attention residual (AR) and loss L_DP",
        _ablation,
        _ablation_timed,
    ),
):
    _here = ("counted", "timed", "top-1 not reproduced: needs ImageNet")
    register_table(Table(f"lavit-{_name}", _title, SOURCE, (rules.TOTAL, WITH_MAPS), _counts, _times, here=_here))
