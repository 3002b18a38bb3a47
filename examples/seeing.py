"""Print the attention map of one patch: python examples/seeing.py

The attention of an untrained model is nearly uniform; with windows, it is limited to the window. Use your own model and
image instead.
"""

import timm
import torch

import attendless


def main() -> None:
    torch.manual_seed(0)
    full = timm.create_model("columnar_micro_patch4_32").eval()
    images = torch.randn(1, 3, 32, 32)  # preprocessed
    for attention in ("full", "window:size=4"):
        model = attendless.convert(full, attention, below_breakeven="keep")
        (found,) = attendless.maps(model, images, layers=-1, query=(13, 9))  # the patch that contains this pixel
        share = found.on_grid()[0].mean(0)[0]  # of the first image, averaged over heads: [rows, columns]
        print(f"{attention}: percent of its attention that each patch gets")
        print("\n".join(" ".join(f"{100 * value:4.1f}" for value in row) for row in share.tolist()))


if __name__ == "__main__":
    main()
