"""Tables of "'Sufficient' Attention Is All You Need" (BBViT, Shivasankaran V P), and the patterns of its figure.

In the paper, R, W and G select the *keys* that a query attends to. In its released code, they select the blocks of
*queries* that attend; the other queries output zeros. Both are built here: `bigbird:form=1d,window=0,…` and
`bigbird:form=1d,gate=…`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch.nn import functional as F

from attendless.attention import Grid, create
from attendless.backbones.cost import parameters
from attendless.measure.clock import device_timer, warm_up

from . import rules
from .table import Row, Source, Table, register_table

SOURCE = Source(
    "bbvit",
    "BBViT",
    "Shivasankaran V P, \"'Sufficient' Attention Is All You Need\"",
    """\
Top-1 needs 200 epochs of Imagenette, which take days on a CPU; `--time` estimates the hours.
[BBViT at small scale](../bbvit.md) has the runs that a CPU can do.
""",
)
PAIRS = "pairs: the share of query-key pairs that are computed, over heads and layers"
KEYS = "R, W and G select the keys of each query, as in the paper; the class token attends to all tokens"
GATES = "rows *by queries*: R, W and G select the blocks of queries that attend, as in the released code"

#: Row of Table 2 → which of R, W and G it has (none: full attention), printed top-1.
PATTERNS = {
    "ViT": ("", "53.33"),
    "BBViT": ("RWG", "64.58"),
    "BBViT-R": ("R", "59.37"),
    "BBViT-W": ("W", "64.25"),
    "BBViT-G": ("G", "62.29"),
    "BBViT-R+W": ("RW", "63.39"),
    "BBViT-W+G": ("WG", "65.66"),
    "BBViT-R+G": ("RG", "62.39"),
}
#: The length of its training: 200 epochs of Imagenette.
EPOCHS, PICTURES, BATCH = 200, 9469, 16

_TRAINED = (
    "the author's value after 200 epochs of Imagenette at {size} px, not re-run; to train a row: "
    "`attendless train {sparse} --attention A --recipe bbvit`, with {full} for full attention"
)
_README = {
    "BBViT-W": "the README of the repository prints 66.25, which would be the best value",
    "BBViT-G": "the README of the repository swaps the values of G and R+G",
    "BBViT-R+G": "the README of the repository swaps the values of G and R+G",
}
_WHY = {
    "ViT-Tiny": "counted at 184 px, as stated, while 376 px (2,210 tokens) would give {} M, but is stated nowhere",
    "BBViT-Tiny": "counted at 184 px, as stated, while 376 px (2,210 tokens) would give {} M, but is stated nowhere",
    "BBViT-Moderate": "rounds to 45.4, and the printed value looks rounded twice",
}
_TABLE_1 = {
    "ViT-Tiny": ("bbvit_vit_tiny", "7.5"),
    "BBViT-Tiny": ("bbvit_tiny", "6.8"),
    "ViT-Moderate": ("bbvit_vit_moderate", "51.7"),
    "BBViT-Moderate": ("bbvit_moderate", "45.5"),
}


def by_keys(letters: str, block: int | None = None) -> str:
    """The attention in which R, W and G select keys; full attention if `letters` is empty."""
    if not letters:
        return "full"
    off = {"R": "random=0", "W": "window=0", "G": "globals=0"}
    sized = [] if block is None else [f"block={block}"]
    return "bigbird:" + ",".join(["form=1d", *sized, *(text for letter, text in off.items() if letter not in letters)])


def by_queries(letters: str, block: int | None = None) -> str:
    """The attention in which R, W and G select blocks of queries; full attention if `letters` is empty."""
    if not letters:
        return "full"
    sized = [] if block is None else [f"block={block}"]
    return "bigbird:" + ",".join(["form=1d", *sized, *([] if letters == "RWG" else [f"gate={letters}"])])


def pairs(attention: str, grid: Grid, heads: int) -> float:
    """The share of query-key pairs that are computed, in per cent."""
    made = create(f"{attention},seed=0" if attention != "full" else attention, 64 * heads, heads, grid=grid)
    return 100 * made.core_macs(grid) / (2 * grid.tokens**2 * made.attn_dim)


def _empty(name: str, **arguments: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def _table_1() -> Iterator[Row]:
    counted = {row: parameters(_empty(model)) for row, (model, _) in _TABLE_1.items()}
    for row, (model, printed) in _TABLE_1.items():
        larger = f"{parameters(_empty(model, img_size=376)) / 1e6:.2f}" if row.endswith("Tiny") else ""
        yield Row(row, "parameters", "M", printed, counted[row], _WHY.get(row, "").format(larger))
    for size in ("Tiny", "Moderate"):
        gap = counted[f"ViT-{size}"] - counted[f"BBViT-{size}"]
        why = (
            "BBViT's code has no output projection but has biases for q, k and v, which is the whole difference: "
            "patterns have no weights"
        )
        yield Row(f"ViT-{size} − BBViT-{size}", "parameters", "M", "", gap, why)


def _table_2() -> Iterator[Row]:
    grid, heads = Grid(23, 23, 1), 8
    for row, (letters, top1) in PATTERNS.items():
        attention = by_keys(letters)
        model = "bbvit_tiny" if letters else "bbvit_vit_tiny"
        trained = _TRAINED.format(size=184, sparse="bbvit_tiny", full="bbvit_vit_tiny")
        note = "; ".join(filter(None, [_README.get(row, ""), trained]))
        yield Row(row, "top-1", "%", top1, None, note, attention=attention)
        yield Row(row, "pairs", "%", "", pairs(attention, grid, heads))
        yield Row(row, "FLOPs", "G", "", rules.total(timm.create_model(model, attention=attention)))
    for row, (letters, _) in PATTERNS.items():
        gated = by_queries(letters)
        if "gate" in gated:
            yield Row(f"{row}, by queries", "pairs", "%", "", pairs(gated, grid, heads), attention=gated)


def _table_3() -> Iterator[Row]:
    for row, model, attention, top1 in (
        ("ViT", "bbvit_vit_moderate", "full", "75.89"),
        ("BBViT", "bbvit_moderate", "bigbird:form=1d", "73.85"),
    ):
        trained = _TRAINED.format(size=368, sparse="bbvit_moderate", full="bbvit_vit_moderate")
        note = f"{trained}; the code pools by the class token here"
        yield Row(row, "top-1", "%", top1, None, note, attention=attention)
        yield Row(row, "pairs", "%", "", pairs(attention, Grid(23, 23, 1), 16))
        yield Row(row, "FLOPs", "G", "", rules.total(timm.create_model(model, attention=attention)))


def _figure_1() -> Iterator[Row]:
    """The patterns that the figure draws, alone and together, on the paper's 530 tokens."""
    grid = Grid(23, 23, 1)
    for name, letters in (("random", "R"), ("window", "W"), ("global", "G"), ("BigBird", "RWG")):
        yield Row(name, "pairs", "%", "", pairs(by_keys(letters), grid, 8), attention=by_keys(letters))


def training_seconds(model: Any, size: int) -> float:
    """Estimate of the seconds that the paper's training takes on this machine, from a few training steps."""
    model.train()
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(BATCH, dtype=torch.long)
    step = warm_up(lambda: F.cross_entropy(model(images), labels).backward(), device_timer())
    return step / BATCH * PICTURES * EPOCHS


def _timed(size: int, models: dict[str, tuple[str, str]]) -> Iterator[Row]:
    note = f"{EPOCHS} epochs of {PICTURES:,} images, estimated from a few steps of batch {BATCH} on this machine"
    for row, (model, attention) in models.items():
        yield Row(row, "training", "h", "", training_seconds(timm.create_model(model, attention=attention), size), note)


def _table_2_timed() -> Iterator[Row]:
    models = {
        r: ("bbvit_tiny" if letters else "bbvit_vit_tiny", by_keys(letters)) for r, (letters, _) in PATTERNS.items()
    }
    return _timed(184, models)


def _table_3_timed() -> Iterator[Row]:
    return _timed(368, {"ViT": ("bbvit_vit_moderate", "full"), "BBViT": ("bbvit_moderate", "bigbird:form=1d")})


_SMALL = (
    "counted",
    "timed",
    "trained at small scale",
    "not trained at full scale: 200 epochs take days on a CPU",
)
_DRAWN = "drawn: attendless show MODEL IMAGE --figure bbvit-1 --out F.png"
_RULES = (PAIRS, KEYS, GATES)
for _name, _title, _here, _rules, _counts, _times in (
    ("1", "Table 1: parameters", ("counted",), (), _table_1, None),
    ("2", "Table 2: patterns, Tiny (184 px, patch size 8)", _SMALL, (rules.TOTAL, *_RULES), _table_2, _table_2_timed),
    ("3", "Table 3: Moderate (368 px, patch size 16)", _SMALL, (rules.TOTAL, PAIRS), _table_3, _table_3_timed),
    ("figure-1", "Figure 1: BigBird's patterns", ("counted", _DRAWN), (PAIRS, KEYS), _figure_1, None),
):
    register_table(Table(f"bbvit-{_name}", _title, SOURCE, _rules, _counts, _times, here=_here))
