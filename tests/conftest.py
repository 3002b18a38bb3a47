"""What every test file shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Decisions in tests must not hang on how busy the machine is: nothing is timed unless a test asks for it.
os.environ.setdefault("ATTENDLESS_CHOOSE", "off")


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
