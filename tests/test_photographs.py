"""The demo's last part: a pretrained model, optimised on photographs of installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attendless.errors import UserError
from attendless_lab.compare import photographs


def square(image: Any) -> torch.Tensor:
    assert image.width == image.height
    return torch.full((3, 2, 2), image.width / 1000)


def test_crops_are_squares_and_the_same_every_time() -> None:
    files = photographs.photographs()
    if not files:
        pytest.skip("no installed package has photographs")
    first, again = (photographs.crops(files, 9, square) for _ in range(2))
    assert first.shape == (9, 3, 2, 2)
    assert torch.equal(first, again)
    assert len(first[:, 0, 0, 0].unique()) > 5


def test_without_weights_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*args: Any, **kwargs: Any) -> nn.Module:
        raise UserError("no network")

    monkeypatch.setattr(photographs, "photographs", lambda: [tmp_path / "x.jpg"])
    monkeypatch.setattr(photographs, "open_model", offline)
    said: list[str] = []
    assert photographs.optimize_photographs(tmp_path / "fast", weights=None, say=said.append) is None
    assert "no network" in said[0]
    assert "--weights F" in said[1]


def test_the_folder_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model and the crops reach `optimize`, and its result is saved."""
    if not photographs.photographs():
        pytest.skip("no installed package has photographs")
    given: dict[str, Any] = {}

    class Found:
        def save(self, folder: Path) -> None:
            given["folder"] = folder

    def optimize(model: nn.Module, images: torch.Tensor, **options: Any) -> Found:
        given.update(options, shape=tuple(images.shape))
        return Found()

    monkeypatch.setattr(photographs, "MODEL", "columnar_micro_patch4_32")
    monkeypatch.setattr(photographs, "optimize", optimize)
    opened = photographs.open_model
    monkeypatch.setattr(photographs, "open_model", lambda name, **_: opened(name))
    photographs.optimize_photographs(tmp_path / "fast", weights=None, say=lambda text: None, count=4)
    assert given["shape"] == (4, 3, 32, 32)
    assert given["quick"]
    assert given["folder"] == tmp_path / "fast"
