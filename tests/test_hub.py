"""The Hub, in a folder: what is pushed comes back the same, with a card; nothing is sent but by the call."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch

import attendless
from attendless.hub.card import card as make_card
from attendless.hub.repository import FILE

MODEL = "columnar_micro_patch4_32"
ROW = {"attention": "foveal:keep=0.5", "size": [32, 32], "latency_ms": 1.234, "dense_latency_ms": 2.5, "speedup": 2.03}


@pytest.fixture
def model() -> Any:
    return attendless.convert(timm.create_model(MODEL).eval(), "foveal:keep=0.5", below_breakeven="keep").eval()


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("_no_network")
def test_a_folder_gives_back_what_was_pushed(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert attendless.push_to_hub(model, "./mine", measurements=[ROW], text="Trained on toys.") == "./mine"
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["README.md", "model.safetensors"]
    again = attendless.from_hub("./mine")
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    huggingface_hub.ModelCard.load(tmp_path / "mine" / "README.md")


def test_the_card_says_what_was_measured(model: Any) -> None:
    whole = {"stamp": attendless.stamp.stamp(), "rows": [ROW, {**ROW, "attention": "full", "top1": 70.9}]}
    text = make_card(model, "me/mine", whole, text="Trained on toys.", license="apache-2.0")
    card = huggingface_hub.ModelCard(text)
    assert card.data.library_name == "attendless"
    assert card.data.license == "apache-2.0"
    assert 'attendless.from_hub("me/mine")' in text
    assert "| foveal:keep=0.5 | 32 | 1.23 | 2.50 | 2.03× |" in text
    assert "| full | 32 | 1.23 | 2.50 | 2.03× | 70.9 % |" in text
    assert text.count("torch") == 1, "the machine is named once"
    assert "peak MB" not in text, "a column nobody filled"
    assert "## Measured" not in make_card(model, "me/mine")


def test_what_is_sent(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Api:
        endpoint = "https://hub"

        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **more: Any) -> None:
            calls.append((repo_id, more))

        def upload_folder(self, *, repo_id: str, folder_path: str, **more: Any) -> None:
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(sys.modules["attendless.integrations.pretrained"], "_answers", lambda address: True)
    assert attendless.push_to_hub(model, "me/mine", private=True, token="t") == "https://hub/me/mine"
    sent = ("me/mine", ["README.md", "model.safetensors"])
    assert calls == ["t", ("me/mine", {"private": True, "exist_ok": True}), sent]


def test_without_a_network_it_is_said(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["attendless.integrations.pretrained"], "_answers", lambda address: False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(attendless.UserError, match="'me/none' cannot be downloaded: the Hub does not respond"):
        attendless.from_hub("me/none")
    with pytest.raises(attendless.UserError, match="cannot be uploaded to 'me/none': the Hub does not respond"):
        attendless.push_to_hub(model, "me/none")


@pytest.mark.parametrize("name", ["a/b/c", "x y", "..a"])
def test_a_name_that_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["attendless.integrations.pretrained"], "_answers", lambda address: False)
    with pytest.raises(attendless.UserError, match="expected NAME/MODEL"):
        attendless.from_hub(name)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(attendless.UserError, match="no such file"):
        attendless.from_hub(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({}))
    with pytest.raises(attendless.UserError, match="damaged or not a safetensors file"):
        attendless.from_hub(tmp_path)
