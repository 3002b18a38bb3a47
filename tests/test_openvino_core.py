"""One OpenVINO core for each process: signals must not find a stack that OpenVINO has freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import attendless
from attendless.export import openvino_core
from attendless.export.runner import open_runner

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")

#: Python's handlers run on the signal stack of the main thread. `{}` makes two cores and drops the older one first.
SIGNALLED = """
import faulthandler, gc, signal, subprocess, sys
import openvino
from attendless.export.openvino_core import signal_stack_kept
faulthandler.enable()
def two():
    cores = [openvino.Core(), openvino.Core()]
    for core in cores:
        core.get_property("CPU", "FULL_DEVICE_NAME")
    while cores:
        cores.pop(0)
        gc.collect()
{}
signal.signal(signal.SIGCHLD, lambda number, frame: print("handled"))
subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OpenVINO replaces signal stacks on Linux")
def test_a_signal_after_other_cores_is_handled() -> None:
    script = SIGNALLED.format("with signal_stack_kept():\n    two()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_every_file_is_opened_in_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openvino_core.core()
    monkeypatch.setattr(openvino, "Core", None)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    files = [tmp_path / name / "model.xml" for name in ("one", "two")]
    for file in files:
        attendless.export(model, file, measure=False)
    image = torch.randn(1, 3, 32, 32)
    first, second = (open_runner(file)(image) for file in files)
    torch.testing.assert_close(first, second)
