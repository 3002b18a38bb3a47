"""Take the pictures of a report that the documentation shows, in Debian's chromium.

python docs/screenshot.py attendless-out/demo/report.html docs/report.png              a laptop's whole page
python docs/screenshot.py attendless-out/demo/report.html docs/report-phone.png        …-phone: 420 px, dark
python docs/screenshot.py attendless-out/demo/report.html docs/report-dark.png         …-dark: a laptop's, dark
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


def main(report: str, picture: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        kind = Path(picture).stem.partition("-")[2]
        width, scheme = {"": (1280, "light"), "dark": (1280, "dark"), "phone": (420, "dark")}[kind]
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
