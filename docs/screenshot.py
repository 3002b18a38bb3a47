"""Take the screenshots of a report that the documentation shows. Needs chromium and playwright.

python docs/screenshot.py attendless-out/demo/report.html docs/report.png              # 1,280 px wide, light theme
python docs/screenshot.py attendless-out/demo/report.html docs/report-dark.png         # 1,280 px wide, dark theme
python docs/screenshot.py attendless-out/demo/report.html docs/report-phone.png        # 420 px wide, dark theme

The end of the output file's name, `-dark` or `-phone`, selects width and theme.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def main(report: str, image: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        kind = Path(image).stem.partition("-")[2]
        width, scheme = {"": (1280, "light"), "dark": (1280, "dark"), "phone": (420, "dark")}[kind]
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=image, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
