"""Convert a model without training, measure its speed-up, and save it: python examples/convert.py

The weights are random, which does not affect latency. With yours: attendless.open_model(NAME, weights=FILE, size=384).
"""

import tempfile
from pathlib import Path

import timm
import torch

import attendless


def main(size: int = 192, budget: float = 2.0) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=size, patch_size=4, depth=2).eval()
    fast = attendless.convert(model, "foveal:keep=0.1")  # `model` is not changed
    found = attendless.bench(fast, like=model, threads=1, budget=budget, throughput=False, parts=False)
    print(found)  # the maximum speed-up (Amdahl's law), then the measured one
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fast.safetensors"
        attendless.save(fast, path)
        images = torch.randn(1, 3, size, size)
        with torch.inference_mode():
            same = torch.equal(attendless.load(path)(images), fast(images))
    print(f"saved and loaded, outputs identical: {same}")


if __name__ == "__main__":
    main()
