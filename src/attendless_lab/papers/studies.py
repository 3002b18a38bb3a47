"""The small-scale studies of BBViT and of the fair comparison: Imagenette, a few minutes of one core per run."""

from __future__ import annotations

from .bbvit import PATTERNS, by_keys
from .study import Entry, Part, Study, register_study

#: 145 tokens are 29 blocks of five, so that the share of computed pairs is about that of the paper's 53 blocks of ten.
_BLOCK = 5
_BASE = "bbvit_w64_patch6_72"
_ViT = "ViT"


def _patterns() -> tuple[Entry, ...]:
    return tuple(
        Entry(row, _BASE, by_keys(letters, _BLOCK), _ViT if letters else "") for row, (letters, _) in PATTERNS.items()
    )


def _widths() -> tuple[Entry, ...]:
    found = []
    for width in (64, 128, 256):
        model, full = f"bbvit_w{width}_patch6_72", f"full, width {width}"
        found += [Entry(full, model, "full"), Entry(f"BBViT, width {width}", model, by_keys("RWG", _BLOCK), full)]
    return tuple(found)


_CONTROLS = (
    Entry(_ViT, _BASE, "full"),
    Entry("ViT, more regularisation", _BASE, "full", _ViT, changes="drop=0.2,drop_path=0.1,mixup=0.2,erase=0.25"),
    Entry("BigBird in two dimensions", _BASE, "bigbird:block=2", _ViT),
    Entry("windows of 4 × 4", _BASE, "window:size=4", _ViT),
    Entry("axial", _BASE, "axial", _ViT),
    Entry("foveal", _BASE, "foveal:keep=0.25,cell=2", _ViT),
)

register_study(
    Study(
        "bbvit",
        "bbvit-2",
        (
            Part("The eight patterns of Table 2, by keys", _patterns()),
            Part("Full and sparse at three widths", _widths()),
            Part("Controls", _CONTROLS),
        ),
        recipe="quick:epochs=8,warmup=1,size=72,crop_pct=0.9,precision=bf16,eval_every=8",
        side=80,
        every=4,
    )
)

_ATTENTIONS = {
    "SA": "full",
    "LA": "linformer:ratio=8,shared,bias",
    "EA": "efficient",
    "PA": "performer:features=16",
    "AA": "fastformer:plain",
    "XCA": "xca:plain",
    "Swin": "window:size=4,bias=false",
    "XCA+LPI": "xca:plain,lpi",
}
_HIERARCHICAL, _COLUMNAR = "pyramid_fair_micro_64", "columnar_fair_micro_64"
#: The attentions of the isotropic model.
_ISOTROPIC = ("SA", "XCA", "Swin", "XCA+LPI")


def _compared(model: str, patches: tuple[int, int], names: tuple[str, ...], window: int = 4) -> tuple[Entry, ...]:
    attentions = _ATTENTIONS | {"Swin": f"window:size={window},bias=false"}
    return tuple(
        Entry(f"{name}-{patch}", model, attentions[name], "" if name == "SA" else f"SA-{patch}", patch)
        for patch in patches
        for name in names
    )


register_study(
    Study(
        "fair-comparison",
        "fair-comparison",
        (
            Part(
                "Hierarchical model, patch sizes 4 and 8",
                _compared("pyramid_fair_micro_64", (4, 8), tuple(_ATTENTIONS)),
            ),
            Part(
                "Isotropic model, patch sizes 8 and 16",
                _compared(_COLUMNAR, (8, 16), _ISOTROPIC, window=2),
            ),
        ),
        recipe="quick:epochs=6,warmup=1,size=64,crop_pct=0.9,precision=bf16,eval_every=6",
        side=72,
        every=4,
        timed=True,
    )
)
