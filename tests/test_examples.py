"""The examples run as they stand, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from attendless import plugins
from attendless.attention import registry

FOLDER = Path(__file__).resolve().parents[1] / "examples"
#: What each prints, and what it is called with here: less of everything.
SCRIPTS = {
    "convert": ({"size": 64, "budget": 0.2}, "saved and loaded, outputs identical: True"),
    "tune": ({"size": 64, "count": 8, "budget": 0.1}, "chosen: "),
    "optimize": ({"size": 32, "count": 8, "budget": "1s"}, "saved: model.safetensors; opened again: (1, "),
    "own_attention": ({}, "{'passed': "),
    "distil_folder": ({"images": 32}, "top-1 agreement with the teacher "),
    "dense_features": ({"height": 64, "width": 96}, "stride 4: (1, 48, 16, 24)"),
}


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is forgotten when the test is over."""
    monkeypatch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_sources", dict(plugins._sources))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fewer, says = SCRIPTS[name]
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](**fewer)
    said = capsys.readouterr().out
    assert says in said
    assert "failed" not in said


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: make install")
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(FOLDER / "first_look.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.get("text", "") for output in outputs)
    assert "maximum speed-up" in said
    assert any("image/png" in output.get("data", {}) for output in outputs), "the figure is shown"
