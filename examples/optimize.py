"""From a model to the fastest file that keeps its predictions: python examples/optimize.py

`optimize` searches attention, token merging, precision and runtime, and times every variant in its own runtime. This
example uses generated scenes and random weights, so its accuracy drops are meaningless. With your weights:
attendless.open_model(NAME, weights=FILE).
"""

import tempfile
from pathlib import Path

import torch

import attendless
from attendless.data import open_data
from attendless.export import open_runner
from attendless.measure.accuracy import load_images, preprocessing


def main(size: int = 64, count: int = 24, budget: str = "10s") -> None:
    torch.manual_seed(0)
    model = attendless.open_model("columnar_micro_patch4_32", size=size)
    images = load_images(open_data(f"scenes:size={size}", "val"), preprocessing(model, (size, size)), count)
    fast = attendless.optimize(model, images, max_drop=1.0, runtimes=["eager"], budget=budget, quick=True)
    print(fast)  # every variant: speed-up, accuracy drop, top-1 agreement
    with tempfile.TemporaryDirectory() as place:
        file = fast.save(Path(place) / "fast")  # with manifest.json and report.html
        print(f"saved: {file.name}; opened again: {tuple(open_runner(file.parent)(images[:1]).shape)}")


if __name__ == "__main__":
    main()
