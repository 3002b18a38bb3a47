"""Saved files whose header or weights cannot be those of a model: refused in one line, before memory is allocated."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from attendless.convert import open_model
from attendless.convert.files import load, read_header, save
from attendless.errors import UserError, printable
from attendless.export import open_runner
from attendless.integrations.weights import load_weights
from attendless.storage import read_described, write_described

SMALL = {"depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 3}


def small() -> nn.Module:
    return timm.create_model("columnar_micro_patch4_32", **SMALL).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    save(small(), path)
    return path


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Any:
    """Writes the file with another header and a right digest."""

    def write(**changes: Any) -> Path:
        text, tensors = read_described(saved, "attendless", "")
        header = json.loads(text)
        for name, value in changes.items():
            header[name] = {**header[name], **value} if isinstance(value, dict) else value
        write_described(tmp_path / "m.safetensors", "attendless", json.dumps(header), tensors)
        return tmp_path / "m.safetensors"

    return write


def test_the_same_model_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    for i in range(8):
        save(load(saved), tmp_path / f"{i}.safetensors")
    assert {(tmp_path / f"{i}.safetensors").read_bytes() for i in range(8)} == {saved.read_bytes()}


def test_files_are_plain_safetensors(saved: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
    tensors = {f"é {kind}": torch.ones(3, 2).to(kind) for kind in kinds} | {"empty": torch.zeros(0, 4)}
    write_described(tmp_path / "t.safetensors", "kind", "a\n\x1b", tensors)
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata()["kind"] == "a\n\x1b"
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())


@pytest.mark.parametrize(
    "preparation",
    [
        {"mean": ["a"]},
        {"std": [0.0], "mean": [0.5]},
        {"mean": [0.5, 0.5], "std": [0.5]},
        {"crop_pct": 1e-9},
        {"crop_pct": float("nan")},
        {"crop_pct": True},
        {"interpolation": "magic"},
        {"interpolation": ["bicubic"]},
        {"crop_mode": 3},
        {"input_size": [3, 10**9, 32]},
        {"input_size": [3, 32]},
        {"num_classes": -1},
        {"num_classes": 10**30},
        {"label_names": [1, 2, 3]},
        {"label_names": "abc"},
        {"std": [10**400] * 3},
        {"surprise": 1},
    ],
    ids=str,
)
def test_absurd_preprocessing(changed: Any, preparation: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"cannot be used: .*{next(iter(preparation))}"):
        read_header(changed(preparation=preparation))


def test_nested_headers(saved: Path, tmp_path: Path) -> None:
    _, tensors = read_described(saved, "attendless", "")
    for text in ("[" * 200_000, '{"format": ' + "[" * 200_000, '{"a":' * 900 + "1" + "}" * 900):
        write_described(tmp_path / "m.safetensors", "attendless", text, tensors)
        with pytest.raises(UserError, match="header that cannot be read"):
            load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "arguments",
    [{"depth": 10**6}, {"depth": 10**12}, {"embed_dim": 10**6}, {"img_size": [40_000, 40_000]}, {"num_classes": 10**9}],
    ids=str,
)
def test_a_small_file_cannot_ask_for_much_memory(changed: Any, arguments: dict[str, Any]) -> None:
    path = changed(arguments=arguments)
    with _no_more_than(500 * 2**20), pytest.raises(UserError, match=r"cannot be built|does not describe"):
        load(path)


def test_many_layers_in_a_small_file(changed: Any) -> None:
    with pytest.raises(UserError, match="100,000 layers, but the file holds"):
        load(changed(attention=["full"] * 100_000, arguments={"depth": 100_000}))


class _no_more_than:
    """Fails if the process grows by more than `most` bytes inside."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __enter__(self) -> None:
        self.before = _peak()

    def __exit__(self, *error: Any) -> None:
        assert _peak() - self.before < self.most


def _peak() -> int:
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", ["hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "local-dir:/tmp", "hf_hub:a/b"])
def test_models_of_the_network_are_not_opened(changed: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: asked.append(given) or [])
    path = changed(host="timm", attention=[None])
    text, tensors = read_described(path, "attendless", "")
    arguments = {"name": name, "num_classes": 3, "size": [32, 32]}
    write_described(path, "attendless", json.dumps(json.loads(text) | {"arguments": arguments}), tensors)
    with pytest.raises(UserError, match="unknown model"):
        load(path)
    assert not asked


def test_escape_sequences_are_not_printed(changed: Any) -> None:
    evil = "\x1b]0;owned\x07cat\x9b31m\u202e"
    header = read_header(changed(preparation={"label_names": [evil] * 3}, versions={"attendless": evil}))
    assert header["preparation"]["label_names"] == ["\ufffd]0;owned\ufffdcat\ufffd31m\ufffd"] * 3
    with pytest.raises(UserError) as caught:
        read_header(changed(format=99, versions={"attendless": evil}))
    assert str(caught.value) == printable(str(caught.value))
    assert "owned" in str(caught.value)
    assert printable("wörter 视 naïve") == "wörter 视 naïve"


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_weights_that_are_no_real_numbers_are_refused(kind: torch.dtype, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    state = {name: value.to(kind) for name, value in small().state_dict().items()}
    save_file(state, path)
    with pytest.raises(UserError, match=f"is {kind}, and floating-point"):
        open_model(saved, weights=path)
    with pytest.raises(UserError, match=f"is {kind}, and floating-point"):
        load_weights(small(), state)
    text, _ = read_described(saved, "attendless", "")
    write_described(path, "attendless", text, state)
    with pytest.raises(UserError, match=f"is {kind}, and floating-point"):
        load(path)


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    state = {name: value.to_sparse() for name, value in small().state_dict().items()}
    with pytest.raises(UserError, match="sparse"):
        load_weights(small(), state)


@pytest.mark.parametrize("other", ["pvt_v2_b0", "resnet18", "swin_tiny_patch4_window7_224", "mixer_s32_224"])
def test_weights_of_another_model_are_refused(other: str, tmp_path: Path) -> None:
    state = timm.create_model(other).state_dict()
    for model in (
        small(),
        timm.create_model("deit_tiny_distilled_patch16_224", depth=1),
        timm.create_model("pvt_v2_b0"),
    ):
        if other in str(model.pretrained_cfg.get("architecture")):
            continue
        with pytest.raises(UserError, match="do not fit the model"):
            load_weights(model, dict(state))


def test_weights_of_odd_shapes_are_refused() -> None:
    for name in ("head.weight", "pos_embed", "patch_embed.proj.weight", "cls_token"):
        for value in (torch.zeros(()), torch.zeros(3), torch.zeros(0, 16), torch.zeros(1, 2, 3, 4, 5)):
            with pytest.raises(UserError, match="do not fit the model"):
                load_weights(small(), small().state_dict() | {name: value})


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_of_any_precision_predict(kind: torch.dtype, tmp_path: Path) -> None:
    save(small().to(kind), tmp_path / "m.safetensors")
    run = open_runner(tmp_path / "m.safetensors")
    assert run(torch.zeros(1, 3, 32, 32)).dtype is torch.float32
