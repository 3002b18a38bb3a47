"""`rank` in exported files: by our kernels where the runtime can load them, and by standard operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from attendless.export import export
from native_cases import needs_kernels
from test_export import lively, tiny


@needs_kernels
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "standard"])
@pytest.mark.parametrize("name", ["fast.onnx", "fast.xml"])
def test_rank_is_exported(name: str, kernels: bool, tmp_path: Path) -> None:
    model = lively(tiny(tokens="rank:r=0/5/4"))
    found = export(model, tmp_path / name, kernels=kernels, batch=2, measure=False)
    assert found.parity is not None
    assert found.parity.difference <= 1e-4
    # Of three layers the first removes nothing, and the last computes the class token alone.
    assert found.operators.get("attendless.MergeTokens", 0) == (1 if kernels else 0)
