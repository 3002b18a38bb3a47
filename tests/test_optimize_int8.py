"""int8 in `optimize`: tried where it is faster; layers become dynamic where calibrated ranges cost most accuracy."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attendless
import steady_clock
from attendless.export import int8_openvino, openvino
from attendless.export.exporting import write
from attendless.export.int8 import TensorBatches, quantise
from attendless.export.int8_settings import Int8
from attendless.integrations.rebuild.copying import backbone_copy
from attendless.measure import precision
from attendless.optimize import int8_layers, session
from attendless.optimize.candidates import Change
from attendless.optimize.optimize import optimize
from attendless.optimize.variants import Target, Variant

NAME = "columnar_micro_patch4_32"


class Captured(Exception):
    pass


def cpu(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(precision, "instructions", lambda: frozenset(flags))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return attendless.open_model(NAME, num_classes=3).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(18, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(("avx2",), True), (("avx2", "avx512_vnni"), False), (("avx2", "avx_vnni"), False), (("asimd",), False)],
)
def test_products_saturate_without_vnni(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: bool
) -> None:
    cpu(monkeypatch, *flags)
    assert precision.saturates() == expected


@pytest.mark.parametrize(("flags", "fix"), [(("avx2",), "ENABLE"), (("avx2", "avx512_vnni"), "DISABLE")])
def test_weights_have_7_bits_where_products_saturate(
    model: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], fix: str
) -> None:
    nncf = pytest.importorskip("nncf")
    seen: dict[str, Any] = {}

    def captured(*given: object, **named: Any) -> None:
        seen.update(named)
        raise Captured

    cpu(monkeypatch, *flags)
    monkeypatch.setattr(nncf, "quantize", captured)
    monkeypatch.setattr(int8_openvino, "read_with_kernels", lambda path: SimpleNamespace(get_ops=list))
    with pytest.raises(Captured):
        int8_openvino.quantise(tmp_path / "model.xml", TensorBatches(images, 1), Int8())
    assert seen["advanced_parameters"].overflow_fix == nncf.OverflowFix[fix]
    assert seen["advanced_parameters"].smooth_quant_alphas.matmul == 0.8
    assert seen["subset_size"] == 18


def layers(file: Path) -> dict[str, Any]:
    """The products with weights in a file, by the names of their modules."""
    nodes = openvino.read_with_kernels(file).get_ordered_ops()
    return {int8_openvino.layer_name(node): node for node in nodes if node.get_type_name() in ("MatMul", "Convolution")}


def test_layers_become_dynamic(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    original, file = tmp_path / "fp32" / "model.xml", tmp_path / "int8" / "model.xml"
    original.parent.mkdir()
    write(model, original, batch=1, format="openvino")
    shutil.copytree(original.parent, file.parent)
    quantise("openvino", file, TensorBatches(images[:4], 1))
    names = [f"blocks.{i}.{part}" for i in range(3) for part in ("attn.qkv", "attn.proj", "mlp.fc1")]
    macs = int8_openvino.layer_macs(file)
    assert [name for name in macs if name in names] == names, "layers have the names of their modules"
    assert macs["blocks.0.mlp.fc1"] > macs["blocks.0.attn.proj"]
    assert not any("fc2" in name for name in macs), "layers that read an activation function are dynamic"

    def far(run: Any) -> float:
        with torch.inference_mode():
            return float((run(images[:1])[0] - model(images[:1])[0]).abs().max())

    static = far(openvino.open_raw(file))
    assert 1e-4 < far(int8_openvino.open_dynamic(file, original, macs)) < 0.5 * static
    int8_openvino.make_dynamic(file, original, names[:4])
    assert set(int8_openvino.layer_macs(file)) == set(macs) - set(names[:4])

    made, before = layers(file), layers(original)
    for name in ("blocks.0.attn.qkv", "blocks.0.mlp.fc2"):
        source, low = made[name].input_value(0).get_node(), made[name].input_value(1).get_node()
        assert source.get_type_name() != "FakeQuantize"
        integers = low.input_value(0).get_node().input_value(0).get_node().get_data()
        scale, weights = low.input_value(1).get_node().get_data(), before[name].input_value(1).get_node().get_data()
        assert integers.dtype == "int8"
        assert np.abs(integers * scale - weights).max() <= 0.51 * scale.max(), (
            "rounded to the nearest step of the scale"
        )
        assert np.allclose(np.abs(integers).max(1), 127), "a scale for each output channel"


def constants(nodes: list[Any]) -> list[Any]:
    """The ranges and weights that the inputs of a product are quantised with."""
    found = []
    for node in nodes:
        if node.get_type_name() == "Constant":
            found.append(node.get_data())
        elif node.get_type_name() in ("FakeQuantize", "Multiply", "Convert"):
            ranges = range(node.get_type_name() == "FakeQuantize", node.get_input_size())
            found += constants([node.input_value(i).get_node() for i in ranges])
    return found


def test_a_file_takes_the_ranges_of_another_with_the_same_layers(
    model: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("nncf")
    backbone = backbone_copy(model).eval()
    changes = {"exact": Change("full", readout=True), "merged": Change("full", (), "rank:r=4")}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        write(change.build(backbone).eval(), tmp_path / name / "model.xml", batch=1, format="openvino")
        shutil.copytree(tmp_path / name, tmp_path / f"{name} int8")
    calibrated, file = (tmp_path / f"{name} int8" / "model.xml" for name in changes)
    quantise("openvino", calibrated, TensorBatches(images[:4], 1), quiet=True)
    assert int8_openvino.quantise_like(file, calibrated, tmp_path / "exact" / "model.xml")
    assert len(int8_openvino.layer_macs(file)) == len(int8_openvino.layer_macs(calibrated))
    ours, theirs = layers(file), layers(calibrated)
    for name, node in ours.items():
        same = (
            [[one.input_value(i).get_node() for i in range(2)] for one in (node, theirs[name])]
            if name in theirs
            else []
        )
        if not same or same[1][1].get_type_name() != "Multiply":
            continue  # products of two activations
        for left, right in zip(constants(same[0]), constants(same[1]), strict=True):
            assert np.array_equal(left, right), f"{name}: ranges and weights are those of the calibrated file"
    with torch.inference_mode():
        wide, low = (openvino.open_raw(one)(images[:1])[0] for one in (tmp_path / "merged" / "model.xml", file))
    assert 1e-4 < float((wide - low).abs().max()) < float(wide.abs().max())

    other = tmp_path / "other" / "model.xml"
    other.parent.mkdir()
    torch.manual_seed(1)
    write(attendless.open_model(NAME, num_classes=3).eval(), other, batch=1, format="openvino")
    before = other.read_bytes()
    assert not int8_openvino.quantise_like(other, calibrated, tmp_path / "exact" / "model.xml")
    assert other.read_bytes() == before, "layers with other weights"


def test_the_layers_with_most_damage_for_their_time_become_dynamic_first() -> None:
    rows = [(f"layer {i}", damage, macs) for i, (damage, macs) in enumerate([(4.0, 4), (3.0, 1), (-1.0, 1), (1.0, 2)])]
    known = SimpleNamespace(
        original=SimpleNamespace(change="full"),
        search=SimpleNamespace(log=SimpleNamespace(get=lambda *given: 2 * rows)),
    )
    (few, more) = int8_layers.mixed_targets(known, Target("openvino", "int8"))  # type: ignore[arg-type]
    assert few == Target("openvino", "int8", ("layer 1",))
    assert set(more.dynamic) == {"layer 1"}


def test_int8_is_left_out_where_it_is_slower(model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nncf")
    cpu(monkeypatch, "avx2")
    steady_clock.install(monkeypatch.setattr)
    monkeypatch.setitem(steady_clock.SHARES, "int8", 2.0)
    found = optimize(model, images, runtimes=["openvino"], attention="none", tokens="none", budget="1h", threads=1)
    assert {c.target.precision for c in found.outcomes} == {"fp32"}
    assert any("int8 is 0.50× as fast as fp32 here" in note for note in found.notes)


def test_layers_become_dynamic_where_int8_is_fastest(
    model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nncf")
    cpu(monkeypatch, "avx2", "avx512_vnni")
    steady_clock.install(monkeypatch.setattr)
    found = optimize(model, images, runtimes=["openvino"], attention="none", tokens="none", budget="1h", threads=1)
    mixed = [c for c in found.outcomes if c.target.dynamic]
    assert mixed
    assert "more layers dynamic" in mixed[0].target.precision_text
    unmixed = next(c for c in found.outcomes if c.target == Target("openvino", "int8"))
    assert mixed[0].typical_drop <= unmixed.typical_drop


def test_a_quick_search_tries_int8_with_vnni_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = session.Session.__new__(session.Session)
    known.pace, known.notes = SimpleNamespace(quick=True), []  # type: ignore[assignment]
    variant = Variant(Change("full"), Target("openvino", "int8"))
    cpu(monkeypatch, "avx2")
    assert not known.pays(variant)
    assert "without VNNI" in known.notes[0]
    cpu(monkeypatch, "avx2", "avx_vnni")
    assert known.pays(variant)


class Unbiased(nn.Module):
    """After an activation function, a layer without a bias whose outputs are read twice."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(48, 64, bias=False), nn.Linear(64, 3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        given = self.narrow(nn.functional.gelu(self.widen(images.mean(2).flatten(1))))
        return given * given.tanh()


def test_a_layer_without_a_bias_becomes_dynamic(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    found = optimize(
        Unbiased().eval(), images.repeat(3, 1, 1, 1), runtimes=["openvino"], precisions=["int8"], budget="1s"
    )
    assert not any("left out: unmodified in openvino int8" in note for note in found.notes), found.notes
    assert any(one.target == Target("openvino", "int8") for one in found.outcomes)
