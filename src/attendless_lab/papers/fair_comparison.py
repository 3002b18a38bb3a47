"""The table of "Fair Comparison between Efficient Attentions" (Hong et al., 2022), from its poster.

One pyramid, one recipe; only patch size and attention change. Each row names the form its numbers belong to, which for
some mechanisms is not the one they were published in (see the mechanism's own file).
"""

from __future__ import annotations

from collections.abc import Iterator

import timm

from attendless.attention import Grid, create
from attendless.backbones.cost import parameters

from . import rules
from .table import Row, Table, register_table

SOURCE = "Fair Comparison between Efficient Attentions (Hong, Lee, Bang and Jung, arXiv 2206.00244), poster"

_CUT = "printed as if cut off after three digits, while the other rows are rounded"
_WEIGHTS = "the table leaves out Fastformer's two vectors per head, w_q and w_k"
_DAMAGED = (
    "the leading digit is damaged in our copy of the poster; the ratio to SA-4 it prints, {}, leaves only this one"
)

_TRAINED = "the authors', 300 epochs of ImageNet; not re-run here. At small scale: docs/fair-comparison.md"
_MISPRINT = "printed with −3.93, which is not its distance from SA-4: −4.20; "

#: Row → printed top-1.
_TOP1 = {
    "SA-4": "81.80", "SA-7": "78.97", "LA-4": "79.04", "LA-7": "77.47", "EA-4": "79.87", "EA-7": "77.91",
    "PA-4": "78.73", "PA-7": "77.87", "AA-4": "77.60", "AA-7": "76.02", "XCA-4": "78.67", "XCA-7": "77.62",
    "Swin-4": "80.08", "Swin-7": "78.72", "XCA+LPI-4": "81.54", "XCA+LPI-7": "79.7", "Columnar-14": "81.30",
    "Columnar-16": "80.97",
}  # fmt: skip
#: Row → model, attention, printed parameters (M), printed FLOPs (G), notes on each. None: not legible in our copy.
_ROWS: dict[str, tuple[str, str, str | None, str, str, str]] = {
    "SA-4": ("pyramid_fair_patch4_224", "full", "28.27", "8.821", "", ""),
    "SA-7": ("pyramid_fair_patch7_224", "full", "28.28", "1.915", "", _CUT),
    "LA-4": ("pyramid_fair_patch4_224", "linformer:ratio=8,shared,bias", "30.91", "5.496", "", ""),
    "LA-7": ("pyramid_fair_patch7_224", "linformer:ratio=8,shared,bias", "28.56", "1.561", "", ""),
    "EA-4": ("pyramid_fair_patch4_224", "efficient", "28.27", "4.480", "", ""),
    "EA-7": ("pyramid_fair_patch7_224", "efficient", "28.28", "1.473", "", ""),
    "PA-4": ("pyramid_fair_patch4_224", "performer:features=16", "28.27", "4.481", "", ""),
    "PA-7": ("pyramid_fair_patch7_224", "performer:features=16", "28.28", "1.473", "", ""),
    "AA-4": ("pyramid_fair_patch4_224", "fastformer:plain", "28.27", "4.394", _WEIGHTS, ""),
    "AA-7": ("pyramid_fair_patch7_224", "fastformer:plain", "28.28", "1.445", _WEIGHTS, ""),
    "XCA-4": ("pyramid_fair_patch4_224", "xca:plain", "28.27", "4.480", "", ""),
    "XCA-7": ("pyramid_fair_patch7_224", "xca:plain", "28.28", "1.473", "", ""),
    "Swin-4": ("pyramid_fair_patch4_224", "window:bias=false", "28.27", "4.528", "", ""),
    "Swin-7": ("pyramid_fair_patch7_224", "window:size=8,bias=false", "28.28", "1.500", "", _CUT),
    "XCA+LPI-4": ("pyramid_fair_patch4_224", "xca:plain,lpi", None, "4.520", "", _DAMAGED.format("0.51")),
    "XCA+LPI-7": ("pyramid_fair_patch7_224", "xca:plain,lpi", "28.39", "1.486", "", ""),
    "Columnar-14": ("columnar_fair_patch14_224", "full", None, "6.117", "", _DAMAGED.format("0.69")),
    "Columnar-16": ("columnar_fair_patch16_224", "full", "22.00", "4.589", "", _DAMAGED.format("0.52")),
}


def _table() -> Iterator[Row]:
    for row, (name, attention, params, flops, about_params, about_flops) in _ROWS.items():
        model = timm.create_model(name, attention=attention)
        if params is not None:
            yield Row(row, "parameters", "M", params, parameters(model), about_params)
        yield Row(row, "FLOPs", "G", flops, rules.fvcore(model), about_flops)
        yield Row(row, "top-1", "%", _TOP1[row], None, (_MISPRINT if row == "AA-4" else "") + _TRAINED)


#: Of the poster's list of complexities: mechanism → as printed, the attention it is here.
_COMPLEXITY = {
    "Transformer (SA)": ("O(N²C)", "full"),
    "Linformer (LA)": ("O(NCm)", "linformer:keys=64"),
    "Efficient Attention (EA)": ("O(NC²)", "efficient"),
    "Performer (PA)": ("O(NCr)", "performer:features=16"),
    "Fastformer (AA)": ("O(NC)", "fastformer:plain"),
    "XCiT (XCA)": ("O(NC²)", "xca"),
    "Swin Transformer (Swin)": ("O(NCw²)", "window:bias=false"),
}


def _complexity() -> Iterator[Row]:
    """How much more the core costs where there are four times as many tokens: 16 if quadratic, 4 if linear."""
    small, large = Grid(28, 28), Grid(56, 56)
    for row, (printed, attention) in _COMPLEXITY.items():
        core = [create(attention, 96, 3, grid=grid).core_macs(grid) for grid in (small, large)]
        expected = "16.0" if "N²" in printed else "4.0"
        note = f"printed as {printed}: {'16' if 'N²' in printed else '4'} times; {attention}"
        yield Row(row, "core at 4× tokens", "×", expected, core[1] / core[0], note)


register_table(
    Table(
        "fair-comparison",
        "Parameters and FLOPs of attentions in one pyramid, patches of 4 and 7 (224 px)",
        SOURCE,
        (rules.FVCORE,),
        _table,
        here=("counted", "trained at small scale", "top-1 needs ImageNet"),
    )
)
register_table(
    Table(
        "fair-comparison-complexity",
        "Complexity of each attention: the core's growth from 784 tokens to 3,136",
        SOURCE,
        (rules.MHSA,),
        _complexity,
    )
)
