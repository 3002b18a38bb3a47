"""Draw the figures of docs/seeing.md from a public-domain photograph that is part of Matplotlib's wheel.

python docs/draw_seeing.py deit_tiny_patch16_224.safetensors docs/seeing
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from screenshot import FLAGS

from attendless_cli.main import main as attendless
from attendless_lab.explore.picture import first_picture

MODEL = "deit_tiny_patch16_224"
SPARSIFINER = ("--attention", "sparsifiner:keep=0.25,rest=pooled", "--predictor", MODEL)
#: Arguments of `attendless show` for each figure of the page, besides model and weights.
FIGURES = {
    "maps": ("--layers", "0,5,11", "--query", "250,160"),
    "sparsifiner-3": ("--figure", "sparsifiner-3", *SPARSIFINER, "--layers", "2,8", "--query", "250,160"),
    "foveal": ("--figure", "foveal", "--attention", "foveal:keep=0.1", "--layers", "2,8", "--query", "250,160"),
    "tokens": ("--figure", "tokens", "--tokens", "tome:r=13", "--layers", "0,4,8,11"),
    "rollout": ("--figure", "rollout", "--attention", "foveal:keep=0.1"),
    "saturation": ("--figure", "lavit-saturation"),
}


def main(weights: str, folder: str) -> None:
    target = Path(folder)
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        photograph = Path(scratch) / "photograph.png"
        first_picture().save(photograph)
        for name, words in FIGURES.items():
            large = Path(scratch) / f"{name}.png"
            attendless(["show", MODEL, str(photograph), "--weights", weights, *words, "--out", str(large)])
            _small(large, target / f"{name}.jpg")
        page = Path(scratch) / "explore.png"
        _explore(weights, page)
        _small(page, target / "explore.jpg", 1280)


def _small(large: Path, small: Path, width: int = 900) -> None:
    """Save the image as a JPEG of at most `width` pixels, without chroma subsampling."""
    with Image.open(large) as image:
        image = image.convert("RGB")
        if image.width > width:
            image = image.resize((width, image.height * width // image.width), Image.Resampling.LANCZOS)
        image.save(small, quality=85, subsampling=0, optimize=True)


def _explore(weights: str, path: Path) -> None:
    words = [MODEL, "--weights", weights, "--predictor", MODEL, "--port", "7869"]
    command = [sys.executable, "-m", "attendless", "explore", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        address = server.stdout.readline().split(" ")[0]  # type: ignore[union-attr]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 1160}, color_scheme="light")
        page.goto(address)
        page.wait_for_selector(".board table >> nth=1", timeout=120_000)
        box = page.locator(".board img").first.bounding_box()
        page.mouse.click(box["x"] + 0.45 * box["width"], box["y"] + 0.25 * box["height"])  # type: ignore[index]
        page.get_by_text("the patch: row 3, column 6").wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=path, full_page=True)
        browser.close()
        server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main(*sys.argv[1:])
