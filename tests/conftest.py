"""What every test file shares."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Decisions in tests must not hang on how busy the machine is: nothing is timed unless a test asks for it.
os.environ.setdefault("ATTENDLESS_CHOOSE", "off")

# Tests import runtimes directly, which would report their use and leave ids in the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
_modules: dict[str, Any] = sys.modules
_modules.setdefault("openvino_telemetry", None)


#: What chromium needs in a container, and what keeps it from calling home.
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The development data, or a skip that says where it was looked for."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("ATTENDLESS_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"no development data at {path} (set ATTENDLESS_DATA)")
    return path


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, driven by playwright, or a skip that says what is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine: the page was not opened in a browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        yield opened
        opened.close()
