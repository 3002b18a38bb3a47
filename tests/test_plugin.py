"""The documented example works from a user's own file: in Python, in the contract test and on the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "neighbours.py"


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_document_shows_the_file_that_runs() -> None:
    document = (ROOT / "docs" / "adding-an-attention.md").read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in document


def test_from_the_command_line(tmp_path: Path) -> None:
    words = ("-m", "attendless", "--plugin", str(EXAMPLE), "info", "deit_tiny_patch16_224")
    done = run(*words, "--attention", "neighbours:radius=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "neighbours:radius=3" in done.stdout


def test_keeps_the_contract(tmp_path: Path) -> None:
    words = (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests" / "test_contract.py"),
        "-k",
        "neighbours",
    )
    done = run(*words, cwd=ROOT, ATTENDLESS_PLUGIN=str(EXAMPLE))
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_a_broken_plugin_is_explained(tmp_path: Path) -> None:
    done = run("-m", "attendless", "--plugin", str(tmp_path / "none.py"), "list", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a file" in done.stderr
    assert "Traceback" not in done.stderr
