"""Exported files: they compute what the model computes, know what they are, and are whole or not there."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import attendless
from attendless.attention import attentions
from attendless.convert import open_model
from attendless.errors import UserError
from attendless.export import (
    Exported,
    checks,
    export,
    int8,
    open_runner,
    pt2,
)
from attendless.export.description import describe
from attendless.tokens import reducers

FORMATS = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}


def tiny(attention: str = "full", tokens: str | None = None, size: Any = 32, patch: int = 8) -> Any:
    """A model with weights that make its answers differ from image to image."""
    arguments = {"patch_size": patch, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7, "img_size": size}
    model = lively(attendless.Columnar(**arguments, attention=attention))
    return attendless.convert(model, tokens=tokens, below_breakeven="keep").eval() if tokens else model.eval()


def lively(model: nn.Module) -> nn.Module:
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.05 * noise)
    return model


def images(batch: int, size: tuple[int, int] = (32, 32)) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(batch))


# One file of each format ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("full/2xfoveal:keep=0.3,cell=2,tile=2")


@pytest.fixture(scope="module", params=FORMATS)
def exported(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    out = tmp_path_factory.mktemp(request.param) / f"fast{FORMATS[request.param]}"
    return export(model, out, batch=None, measure=False)


def test_it_computes_what_the_model_computes(exported: Exported, model: Any) -> None:
    run = open_runner(exported.path, threads=1)
    for batch in (1, 3, 4):
        with torch.inference_mode():
            expected = model(images(batch))
        torch.testing.assert_close(run(images(batch)), expected, atol=1e-4, rtol=1e-4)
    assert exported.parity is not None
    assert exported.parity.difference < 1e-4


def test_it_knows_what_it_is(exported: Exported, model: Any) -> None:
    run = open_runner(exported.path)
    assert (run.runtime, run.size, run.channels, run.batch) == (exported.format, (32, 32), 3, None)
    about, expected = run.description, describe(model)
    for field in ("attention", "tokens", "classes", "mean", "std", "crop_pct", "interpolation", "features"):
        assert getattr(about, field) == getattr(expected, field)
    assert about.report["parity"]["images"] == 8
    assert about.report["operators"] == dict(exported.operators)


def test_the_folder_holds_the_files_and_nothing_else(exported: Exported) -> None:
    assert sorted(exported.path.parent.iterdir()) == sorted(exported.files)


def test_wrong_images_are_refused(exported: Exported) -> None:
    run = open_runner(exported.path)
    for wrong in (
        torch.zeros(1, 3, 32, 40),
        torch.zeros(1, 1, 32, 32),
        torch.zeros(3, 32, 32),
        torch.zeros(0, 3, 32, 32),
    ):
        with pytest.raises(UserError, match="expected"):
            run(wrong)


def test_what_was_exported_cannot_be_asked_for_something_else(exported: Exported) -> None:
    with pytest.raises(UserError, match="takes no other attention"):
        open_runner(exported.path, attention="full")
    with pytest.raises(UserError, match="no other size"):
        open_runner(exported.path, size=64)
    with pytest.raises(UserError, match="runs in"):
        open_runner(exported.path, runtime="eager")


def _inside(file: Path) -> int:
    """A place in the middle of what a file holds: of an archive, not in the padding between its parts."""
    if not zipfile.is_zipfile(file):
        return file.stat().st_size // 2
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda part: part.compress_size)
    name, extra = struct.unpack_from("<HH", file.read_bytes(), largest.header_offset + 26)
    return largest.header_offset + 30 + name + extra + largest.compress_size // 2


def test_damaged_files_are_told(exported: Exported, tmp_path: Path) -> None:
    for file in exported.files:
        if file.suffix == ".so":
            continue
        for kind in ("cut", "flipped", "empty"):
            folder = tmp_path / f"{file.name}-{kind}"
            folder.mkdir()
            for each in exported.files:
                (folder / each.name).write_bytes(each.read_bytes())
            data = bytearray(file.read_bytes())
            if kind == "flipped":
                data[_inside(file)] ^= 1
            changed = data[: len(data) // 2] if kind == "cut" else data if kind == "flipped" else b""
            (folder / file.name).write_bytes(changed)
            with pytest.raises(UserError, match=r"fast"):
                open_runner(folder / exported.path.name)


def test_foreign_files_are_told(tmp_path: Path) -> None:
    for suffix in FORMATS.values():
        file = tmp_path / f"other{suffix}"
        file.write_bytes(b"something else entirely")
        with pytest.raises(UserError, match="other"):
            open_runner(file)
        with pytest.raises(UserError, match="no such file"):
            open_runner(tmp_path / f"missing{suffix}")


def test_an_onnx_file_has_standard_operators_only(model: Any, exported: Exported) -> None:
    if exported.format == "onnx":
        assert not [name for name in exported.operators if "." in name]
    if exported.format == "pt2":
        assert exported.operators["attendless.foveal_forward"] == 2


# What is not written --------------------------------------------------------------------------------------------------


def test_a_file_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = pt2.open_raw
    monkeypatch.setattr(pt2, "open_raw", lambda *given: lambda x: tuple(y * 1.001 for y in opened(*given)(x)))
    with pytest.raises(UserError, match="does not compute what the model does"):
        export(tiny(), tmp_path / "wrong.pt2", measure=False)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "fast.pt2"
    export(tiny(), out, measure=False)
    before = out.read_bytes()
    monkeypatch.setattr(pt2, "stamp", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        export(tiny(), out, measure=False)
    assert out.read_bytes() == before
    assert [out] == list(tmp_path.iterdir())


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends in"):
        export(tiny(), tmp_path / "fast.bin")
    with pytest.raises(UserError, match=r"ends in \.onnx"):
        export(tiny(), tmp_path / "fast.xml", format="onnx")
    with pytest.raises(UserError, match="unknown format"):
        export(tiny(), tmp_path / "fast.xml", format="tflite")
    with pytest.raises(UserError, match="in memory"):
        export(tiny(), tmp_path / "fast.pt2", attention="foveal")
    with pytest.raises(UserError, match="int8 and our kernels do not go together"):
        export(tiny(), tmp_path / "fast.onnx", int8=True, kernels=True, data=tmp_path)
    assert not list(tmp_path.iterdir())


# Near-ties ------------------------------------------------------------------------------------------------------------


def test_only_unrest_of_the_model_itself_excuses_a_difference() -> None:
    sound = checks.judged([(1e-6, 0.0), (3e-3, 2e-3)], (2,))
    assert (sound.difference, sound.unsteady, sound.unrest) == (1e-6, 1, 2e-3)
    for wrong in ([(2e-4, 0.0)], [(1e-6, 0.0), (1e-2, 2e-3)], [(float("inf"), 1.0)], [(float("nan"), 0.0)]):
        with pytest.raises(UserError, match="does not compute"):
            checks.judged(wrong, (1,))


class Chooser(nn.Module):
    """Answers with one of two vectors, as the sum of an image is above or below what it is for the first it saw."""

    def __init__(self, edge: Tensor) -> None:
        super().__init__()
        self.edge = edge

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        above = (images.double().sum((1, 2, 3)) > self.edge).float()
        return (torch.stack([above, 1 - above], 1),)


def test_a_choice_in_the_balance_may_fall_either_way_and_no_other() -> None:
    picture = images(1)
    about = describe(tiny(), batch=1)
    edge = picture.double().sum()
    chooser = Chooser(edge)
    flipped = lambda x: tuple(y.flip(1) for y in chooser(x))  # noqa: E731
    found = checks._compared(flipped, chooser, picture)
    assert checks.judged(found, (1,)).unsteady == 1
    with pytest.raises(UserError, match="does not compute"):
        checks.compare(flipped, chooser, about)


# Features and runtimes ------------------------------------------------------------------------------------------------


def test_features(tmp_path: Path) -> None:
    model = tiny("foveal:cell=2,tile=2", tokens="tome:r=2")
    found = export(model, tmp_path / "maps.pt2", features=True, batch=2, measure=False)
    run = open_runner(found.path)
    assert run.description.features
    assert run(images(2)).shape == (2, 32, 4, 4)
    with pytest.raises(UserError, match="2 at once"):
        run(images(3))


def test_speed_is_measured_against_eager_and_the_dense_export(tmp_path: Path) -> None:
    found = export(tiny("foveal:cell=2,tile=2"), tmp_path / "fast.pt2", budget=0.05)
    assert found.speed is not None
    assert found.speed.dense_ms is not None
    stored = open_runner(found.path).description.report["speed"]
    assert stored["against_dense"]["ratio"] == pytest.approx(found.speed.against_dense.ratio)
    assert stored["stamp"]["threads"] == torch.get_num_threads()


def test_bench_across_runtimes() -> None:
    fast = tiny("foveal:cell=2,tile=2")
    table = attendless.bench(fast, like=tiny(), runtimes=["eager", "pt2"], budget=0.05)
    assert [(row.setup.runtime, row.speedup == 1) for row in table if row.setup.attention == "full"] == [
        ("eager", True),
        ("pt2", True),
    ]
    ours = [row for row in table if row.setup.attention != "full"]
    assert [row.setup.runtime for row in ours] == ["eager", "pt2"]
    assert all(row.as_dict()["runtime"] == row.setup.runtime for row in table)
    # Both ratios come from one interleave: what a runtime gains times what attending less gains there.
    assert all(row.eager_latency_ms == table[0].latency_ms for row in table)
    assert "pt2" in str(table)
    with pytest.raises(UserError, match="unknown runtime 'tensorrt'"):
        attendless.bench(fast, like=tiny(), runtimes=["tensorrt"])


# Everything -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, None], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("size", [(224, 224), (384, 256)], ids=str)
@pytest.mark.parametrize("format", [*FORMATS, "onnx with kernels"])
@pytest.mark.parametrize("name", attentions())
def test_every_attention(name: str, format: str, size: tuple[int, int], batch: int | None, tmp_path: Path) -> None:
    spec = {"lavit": "lavit:vanilla=1"}.get(name, name)
    kernels = True if "kernels" in format else None
    out = tmp_path / f"fast{FORMATS[format.split()[0]]}"
    found = export(tiny(spec, size=size, patch=16), out, batch=batch, kernels=kernels, measure=False)
    assert found.parity is not None
    assert found.parity.difference <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, None], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("attention", ["full", "foveal"])
@pytest.mark.parametrize("name", reducers())
def test_every_reducer(name: str, attention: str, format: str, batch: int | None, tmp_path: Path) -> None:
    if (name, attention) == ("zerotprune", "foveal"):
        pytest.skip("foveal attention has no scores of all pairs")
    own = {"tome": "tome:r=8,protect=0.5", "evit": "evit:at=1/2", "dynamicvit": "dynamicvit:at=1/2"}
    spec = own.get(name, "atc:r=4" if name == "atc" else name)  # every step of atc is part of the graph
    model = lively(tiny(attention, tokens=spec, size=224, patch=16))
    found = export(model, tmp_path / f"fast{FORMATS[format]}", batch=batch, measure=False)
    assert found.parity is not None
    assert found.parity.difference <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("pyramid_pvt_v2_b0", None),
        ("pyramid_swin_tiny", None),
        ("lavit_tiny", None),
        ("columnar_ceit_tiny", None),
        ("swin_tiny_patch4_window7_224", None),
        ("xcit_nano_12_p16_224", None),
        ("vit_small_patch16_dinov3", "foveal"),
        ("vit_small_patch16_rope_224", "foveal"),
    ],
)
def test_hosts_and_models_of_timm(name: str, attention: str | None, format: str, tmp_path: Path) -> None:
    size = 224 if "rope" not in name and "dinov3" not in name else 128
    model = open_model(name, attention=attention, size=None if "swin" in name else size, below_breakeven="keep")
    for features in (False, True):
        out = tmp_path / f"{'maps' if features else 'fast'}{FORMATS[format]}"
        if features and not hasattr(model, "forward_intermediates"):
            continue
        found = export(lively(model), out, features=features, measure=False)
        assert found.parity is not None


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_int8(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, quantise = [], int8.quantise
    monkeypatch.setattr(
        int8, "quantise", lambda kind, path, *more: done.append(path.stem) or quantise(kind, path, *more)
    )
    for number in range(12):
        folder = tmp_path / "data" / f"{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(0, 255, (40, 40, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"{number}.png")
    out = tmp_path / f"fast{FORMATS[format]}"
    found = export(tiny("foveal:cell=2,tile=2"), out, int8=True, data=tmp_path / "data", batch=None, budget=0.1)
    assert done == ["fast", "dense"], "speed is told against the dense model quantised in the same way"
    assert found.quality is not None
    quality = found.quality
    assert (quality.images, quality.calibration_images, quality.top1 is None) == (6, 6, False), "disjoint halves"
    assert quality.agreement > 0.3
    quantised = "FakeQuantize" if format == "openvino" else "QuantizeLinear"
    assert found.operators[quantised] >= 3 * 4  # qkv, proj and two of the MLP in every layer
    assert open_runner(out).description.int8
    plain = export(tiny("foveal:cell=2,tile=2"), tmp_path / f"plain{FORMATS[format]}", batch=None, measure=False)
    weights = [file for file in (*found.files, *plain.files) if file.suffix in (".bin", ".onnx")]
    assert weights[0].stat().st_size < weights[1].stat().st_size


@pytest.mark.slow
def test_aotinductor_compiles_what_was_exported(tmp_path: Path) -> None:
    """As docs/deploy.md says; what it makes is a program, which is not opened here."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    model = tiny("full/2xfoveal:keep=0.3,cell=2,tile=2", tokens="tome:r=2")
    found = export(model, tmp_path / "fast.pt2", batch=2, measure=False)
    made = torch._inductor.aoti_compile_and_package(
        torch.export.load(found.path), package_path=str(tmp_path / "compiled.pt2")
    )
    with torch.inference_mode():
        (logits,) = torch._inductor.aoti_load_package(made)(images(2))
        torch.testing.assert_close(logits, model(images(2)), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r"compiled\.pt2"):
        open_runner(made)


CHILD = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_export import tiny
from attendless.export import export
model = tiny("foveal:cell=2,tile=2")
print("ready", flush=True)
while True:
    export(model, {out!r}, measure=False)
    print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_any_moment_it_leaves_no_partial_file(format: str, tmp_path: Path) -> None:
    out = tmp_path / f"fast{FORMATS[format]}"
    code = CHILD.format(tests=str(Path(__file__).parent), out=str(out))
    opened = 0
    for attempt in range(6):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if attempt % 2:  # in the middle of writing over what is there
                process.stdout.readline()
            time.sleep(0.4 * attempt)
            os.kill(process.pid, signal.SIGKILL)
        if out.exists():
            open_runner(out)(images(1))
            opened += 1
    assert opened
