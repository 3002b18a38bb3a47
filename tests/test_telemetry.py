"""Runtimes of others are imported without their telemetry: no look-up of a host, and no id in the home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import socket, sys
asked = []
socket.getaddrinfo = lambda *given, **more: asked.append(given) or []
from attendless.export.packages import need
need("openvino", "openvino").Core()
need("onnx", "onnxruntime").SessionOptions()
import openvino.tools.ovc.telemetry_utils as used
assert used.tm.__name__.endswith("telemetry_stub"), used.tm
assert sys.modules.get("openvino_telemetry", "absent") == "absent"  # others can import it
import time
time.sleep(0.5)
assert not asked, asked
"""


def test_nothing_is_reported_and_no_id_is_left(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    kept = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=kept | home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert not [name for name in left if "attendless" not in name], left
