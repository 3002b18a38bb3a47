"""Distil a converted model on a folder of images without labels: python examples/distil_folder.py

This example writes generated scenes to a folder and uses a teacher with random weights. Replace both with your own, and
train longer.
"""

import tempfile
from pathlib import Path

from attendless.data import open_data
from attendless.train import distill


def main(images: int = 64, epochs: int = 1) -> None:
    with tempfile.TemporaryDirectory() as name:
        photos = Path(name) / "photos"
        photos.mkdir()
        scenes = open_data(f"scenes:train={images}", "train")
        for i in range(images):
            scenes[i][0].save(photos / f"{i}.png")
        found = distill(
            "columnar_micro_patch4_32",  # weights="teacher.safetensors"
            photos,
            attention="linformer",
            out=Path(name) / "run",  # the same call with the same folder resumes
            epochs=epochs,
            batch=16,
        )
        print(f"{found.steps} steps, top-1 agreement with the teacher {100 * found.metrics['agreement']:.0f} %")


if __name__ == "__main__":
    main()
