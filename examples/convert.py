"""Convert a model without training, see what it gains here, and keep it: python examples/convert.py

The weights are random, which time does not mind. With yours: attendless.open_model(NAME, weights=FILE, size=384).
"""

import tempfile
from pathlib import Path

import timm
import torch

import attendless


def main(size: int = 192, budget: float = 2.0) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=size, patch_size=4, depth=2).eval()
    fast = attendless.convert(model, "foveal:keep=0.1")  # the model itself is not touched
    found = attendless.bench(fast, like=model, threads=1, budget=budget, throughput=False, parts=False)
    print(found)  # the cap first, then what was measured against it, in words
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fast.safetensors"
        attendless.save(fast, path)
        images = torch.randn(1, 3, size, size)
        with torch.inference_mode():
            same = torch.equal(attendless.load(path)(images), fast(images))
    print(f"saved, loaded, the same answers: {same}")


if __name__ == "__main__":
    main()
