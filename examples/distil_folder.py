"""Teach a model that attends less to answer as its teacher does, on a folder of pictures:
python examples/distil_folder.py

The pictures need no labels. Some scenes are written to a folder here, and the teacher's weights are random: give your
folder and your weights, and more time.
"""

import tempfile
from pathlib import Path

from attendless.data import open_data
from attendless.train import distill


def main(pictures: int = 64, epochs: int = 1) -> None:
    with tempfile.TemporaryDirectory() as name:
        photos = Path(name) / "photos"
        photos.mkdir()
        scenes = open_data(f"scenes:train={pictures}", "train")
        for i in range(pictures):
            scenes[i][0].save(photos / f"{i}.png")
        found = distill(
            "columnar_micro_patch4_32",  # weights="teacher.safetensors"
            photos,
            attention="linformer",
            out=Path(name) / "run",  # the same call on the same folder goes on where it stopped
            epochs=epochs,
            batch=16,
        )
        print(f"{found.steps} steps, the teacher's answer to {100 * found.metrics['agreement']:.0f} % of the pictures")


if __name__ == "__main__":
    main()
