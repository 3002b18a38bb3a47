"""Take the picture of a report that the documentation shows, in Debian's chromium.

python docs/screenshot.py attendless-out/demo/report.html docs/report.png
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
        page = browser.new_page(viewport={"width": 1180, "height": 800}, color_scheme="light")
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
