"""Ablation of `--recipe imagenette`: a short training run with all of its parts, and one run without each part.

    python benchmarks/imagenette.py IMAGENETTE --out DIR [--minutes M] [--json F]

IMAGENETTE is the data set's folder. Each run trains for six epochs on a quarter of the images at 64 px. Parts that need
long training contribute more in a full run than here. An interrupted run resumes when the same command is run again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from attendless.stamp import stamp_line
from attendless_lab.papers.study import (
    Entry,
    Part,
    Study,
    carry_out,
    gather,
    write,
)
from attendless_lab.papers.study_page import rows_table

MODEL, WHOLE = "pyramid_stem_tiny", "all of it"
STUDY = Study(
    "imagenette",
    "imagenette",
    (
        Part(
            "What each part is worth",
            (
                Entry(WHOLE, MODEL, "xca:lpi"),
                Entry("patches cut at once, no stem", "pyramid_patch_tiny", "xca:lpi", WHOLE),
                Entry("full attention", MODEL, "full", WHOLE),
                Entry("no local patch interaction", MODEL, "xca", WHOLE),
                Entry("crops and mirroring alone", MODEL, "xca:lpi", WHOLE, changes="mixup=0,erase=0,smoothing=0"),
            ),
        ),
    ),
    recipe="imagenette:epochs=6,warmup=1,size=64,ema=0.98,eval_every=6",
    side=80,
    every=4,
    seeds=(0,),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="Imagenette's folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no new run after this many minutes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    carry_out(STUDY, args.data, args.out, minutes=args.minutes, say=lambda text: print(text, flush=True))
    found = gather(STUDY, args.out)
    if args.json:
        write(found, args.json)
    print(f"\n{rows_table(found['rows'])}\n\n{stamp_line(found['stamp'])}")


if __name__ == "__main__":
    main()
