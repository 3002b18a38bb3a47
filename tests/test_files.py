"""Saved models: one file that needs nothing else, written whole or not at all, and refused when it is not sound."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attendless import UserError, storage
from attendless.convert import (
    convert,
    convert_with_report,
    files,
    load,
    save,
)
from attendless.convert.files import read_header
from attendless.sizes import image_config
from attendless.storage import atomic, digest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(64, 48), embed_dim=48, depth=3, num_heads=3, num_classes=7
    )
    ours, report = convert_with_report(model.eval(), "full/linformer:keys=3/full", below_breakeven="keep")
    path = tmp_path_factory.mktemp("saved") / "deep" / "m.safetensors"
    save(ours, path, report=report)
    return path, ours


def rewritten(path: Path, to: Path, change) -> Path:
    """The file at `path` with its header, tensors changed by `change`, and a digest that fits."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["attendless"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    change(header, tensors)
    text = json.dumps(header)
    save_file(tensors, to, metadata={"attendless": text, "digest": digest(text, tensors)})
    return to


def test_loading_gives_the_same_model(saved) -> None:
    path, ours = saved
    loaded = load(path)
    assert type(loaded) is type(ours)
    assert loaded.attention == ours.attention == "full+linformer:keys=3"
    assert not loaded.training
    x = torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        assert torch.equal(loaded(x), ours(x))
    data = timm.data.resolve_model_data_config(loaded)
    assert data == timm.data.resolve_model_data_config(ours)
    assert timm.data.create_transform(**data) is not None


def test_the_header_says_it_all(saved) -> None:
    header = files.read_header(saved[0])
    assert header["format"] == 1
    assert header["host"] == "columnar"
    assert header["arguments"]["img_size"] == [64, 48]
    assert header["attention"] == ["full", "linformer:keys=3", "full"]
    assert header["conversion"]["layers"][1]["decision"] == "converted"
    assert header["preparation"]["mean"] == [0.5, 0.5, 0.5]
    assert header["plugins"] == {}
    assert set(header["versions"]) == {"attendless", "timm", "torch"}


def test_a_file_from_before_the_first_order_computes_what_it_computed(tmp_path: Path) -> None:
    """Its specs do not say `order=0`: there was nothing else."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, embed_dim=48, depth=3, num_heads=3, num_classes=7)
    specs = "full/foveal:keep=0.2,order=0/foveal:order=0"
    before = convert(model.eval(), specs, below_breakeven="keep").eval()
    save(before, tmp_path / "now.safetensors")
    assert read_header(tmp_path / "now.safetensors")["format"] == 3

    def older(header: dict, tensors: dict) -> None:
        header.update(format=1, attention=["full", "foveal:keep=0.2", "foveal"])

    path = rewritten(tmp_path / "now.safetensors", tmp_path / "then.safetensors", older)
    assert load(path).attention == load(tmp_path / "now.safetensors").attention == specs
    x = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(load(path)(x), before(x))
        assert not torch.equal(
            convert(model, "full/foveal:keep=0.2/foveal", below_breakeven="keep").eval()(x), before(x)
        )


def test_what_it_says_of_its_classes_is_true_of_its_classifier(tmp_path: Path) -> None:
    model = convert(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "full")
    model.pretrained_cfg = {**image_config(model), "label_names": tuple(map(str, range(1000)))}
    model.reset_classifier(3)
    save(model, tmp_path / "m.safetensors")
    said = read_header(tmp_path / "m.safetensors")["preparation"]
    assert said["num_classes"] == 3
    assert "label_names" not in said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_precision_is_kept(saved, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(saved[0]).to(dtype)
    save(model, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("part", [0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_files_are_refused(saved, part: float, tmp_path: Path) -> None:
    data = saved[0].read_bytes()
    broken = tmp_path / "m.safetensors"
    broken.write_bytes(data[: int(part * len(data))])
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        load(broken)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.99])
def test_a_single_changed_byte_is_noticed(saved, place: float, tmp_path: Path) -> None:
    data = bytearray(saved[0].read_bytes())
    data[int(place * len(data))] ^= 1
    broken = tmp_path / "m.safetensors"
    broken.write_bytes(data)
    with pytest.raises(UserError, match="is damaged: its content does not match its digest"):
        load(broken)


def test_files_of_another_kind_are_refused(saved, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file({"head.weight": torch.zeros(2, 2)}, bare)
    with pytest.raises(UserError, match="does not say of which model"):
        load(bare)
    for name, data in {"pickle": pickle.dumps({"a": 1}), "zip": b"PK\x03\x04" + bytes(64)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=r"is a PyTorch checkpoint.*give this as its weights"):
            load(tmp_path / name)
    for name, data in {"text": b"hello", "length": b"\x80\x02" + bytes(64)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match="damaged or not a safetensors file"):
            load(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "nowhere.safetensors")
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h, t: h.update(format=99), "in format 99; this one reads up to 5"),
        (lambda h, t: h.pop("format"), "header that cannot be read"),
        (lambda h, t: h.pop("arguments"), "does not describe a model that can be built"),
        (lambda h, t: h.update(host="nothing"), "cannot be built here: unknown backbone 'nothing'"),
        (
            lambda h, t: h.update(plugins={"mine": "mine.py"}),
            "needs 'mine', which came from the plug-in mine.py: give it with --plugin FILE or import it",
        ),
        (lambda h, t: h.update(attention=["full"]), "1 attentions were given for 3 layers"),
        (lambda h, t: h["attention"].__setitem__(1, "nothing:keep=1"), "unknown attention 'nothing'"),
        (lambda h, t: h["arguments"].update(act_layer="timm.create_model"), "layer 'timm.create_model' does not exist"),
        (lambda h, t: h["arguments"].update(wings=2), "does not describe a model"),
        (lambda h, t: h["arguments"].update(embed_dim=50), "cannot be built|does not describe"),
        (lambda h, t: t.pop("norm.bias"), "norm.bias is missing"),
        (lambda h, t: t.update(more=torch.zeros(1)), "more is unexpected"),
        (lambda h, t: t.update({"norm.bias": torch.zeros(3)}), r"norm.bias is \(3,\), not \(48,\)"),
    ],
)
def test_files_that_do_not_fit_themselves_are_refused(saved, change, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        load(rewritten(saved[0], tmp_path / "m.safetensors", change))


def test_a_failed_save_leaves_the_old_file(saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save(saved[1], path)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(storage, "_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save(saved[1], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_atomic_files_have_the_usual_mode(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic(tmp_path / "a") as temporary:
            temporary.write_text("x")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_model_without_weights_cannot_be_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=1, num_heads=3)
    ours = convert(model, "foveal:keep=0.1", below_breakeven="keep")
    with pytest.raises(UserError, match="no weights to save yet: cls_token is on the meta device"):
        save(ours, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_described_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this ResNet cannot be saved"):
        save(timm.create_model("test_resnet"), tmp_path / "m.safetensors")
