"""Feature maps for a detector or a segmentor, from a backbone that attends less: python examples/dense_features.py

The images are of a size the model was not made for, and not square: positions are resampled.
"""

import torch

import attendless


def main(height: int = 256, width: int = 320) -> None:
    torch.manual_seed(0)
    features = attendless.dense.extractor("deit_tiny_patch16_224", "foveal:keep=0.1", (height, width)).eval()
    with torch.inference_mode():
        levels, _ = features(torch.randn(1, 3, height, width))
    for level in levels:
        print(f"stride {width // level.shape[-1]}: {tuple(level.shape)}")


if __name__ == "__main__":
    main()
