"""Choose the keep rate of each layer, without labels and without training: python examples/tune.py

`tune` needs a few dozen preprocessed images of the kind the model will see. This example uses generated scenes and
random weights, so its accuracy drops are meaningless. With your weights: attendless.open_model(NAME, weights=FILE).
"""

import torch

import attendless
from attendless.data import open_data
from attendless.measure.accuracy import load_images, preprocessing


def main(size: int = 96, count: int = 16, budget: float = 0.5) -> None:
    torch.manual_seed(0)
    model = attendless.open_model("columnar_micro_patch4_32", size=size)
    images = load_images(open_data(f"scenes:size={size}", "val"), preprocessing(model, (size, size)), count)
    tuned = attendless.tune(model, images, tokens="none", rates=(0.1, 0.25), max_drop=0.5, budget=budget)
    print(tuned)  # every candidate: speed-up, expected accuracy drop, top-1 agreement
    print(f"chosen: {tuned.convert(model).attention}")


if __name__ == "__main__":
    main()
