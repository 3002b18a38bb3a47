"""Exports that cannot be finished: one error that names the file, and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from timm.models.vision_transformer import VisionTransformer

from attendless.export import export
from train_toys import full_disk


@pytest.mark.parametrize("name", ["m.pt2", "m.onnx", "m.xml"])
@pytest.mark.parametrize("most", [3000, 60_000])
def test_a_full_disk_leaves_the_old_file(name: str, most: int, tmp_path: Path) -> None:
    out = tmp_path / name
    out.write_bytes(b"old")
    model = VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3).eval()
    with full_disk(most), pytest.raises(OSError, match="File too large") as caught:
        export(model, out, measure=False, kernels=False)
    assert caught.value.filename == str(out)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert out.read_bytes() == b"old"


def test_sigterm_leaves_no_folder(tmp_path: Path) -> None:
    """The command stops while it times the file, whose folder exists then."""
    out = ["--out", str(tmp_path / "m.pt2"), "--budget", "60"]
    command = [sys.executable, "-m", "attendless", "export", "columnar_micro_patch4_32", *out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 120
        while not any(tmp_path.iterdir()) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert any(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())
