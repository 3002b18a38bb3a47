"""Feature maps for a detector or a segmentor, with efficient attention: python examples/dense_features.py

The images are not square and larger than those of the model's training: position embeddings are resampled.
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
