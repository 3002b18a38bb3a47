"""Does computing attention maps slow a model down afterwards? Interleaved benchmark against an untouched copy.

python benchmarks/maps.py deit_tiny_patch16_224 --attention full foveal:keep=0.1
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import attendless
from attendless.convert import open_model
from attendless.measure.clock import interleave
from attendless.sizes import input_size
from attendless.stamp import stamp, stamp_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--attention", nargs="+", default=["full"])
    parser.add_argument("--budget", type=float, default=20.0)
    args = parser.parse_args()
    for attention in args.attention:
        untouched, mapped = (open_model(args.model, attention=attention, below_breakeven="keep") for _ in range(2))
        image = torch.randn(1, 3, *input_size(mapped))
        attendless.maps(mapped, image, query=(20, 20))
        attendless.maps(mapped, image)
        with torch.inference_mode():
            timed = interleave(
                {"untouched": partial(untouched, image), "mapped": partial(mapped, image)}, budget=args.budget
            )
        found = timed.compare("mapped", "untouched")
        verdict = "distinguishable" if found.distinguishable else "not distinguishable"
        low, high = found.interval
        print(f"{attention}: {found.ratio:.3f}× ({low:.3f} to {high:.3f}, {found.pairs} rounds): {verdict}")
    print(stamp_line(stamp()))


if __name__ == "__main__":
    main()
