"""The command line in its surroundings: a deleted folder, names that are not text, signals."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from attendless.errors import UserError
from attendless.train import Run
from attendless_cli import list as command
from attendless_cli.main import main


def test_a_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as stopped:
        main(["list"])
    assert stopped.value.code == 2
    assert "the working directory has been deleted" in capsys.readouterr().err


def test_names_that_are_not_text_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8", errors="strict"))
    monkeypatch.setattr(command, "run", lambda args: print(os.fsdecode(b"caf\xe9.png")))
    assert main(["list"]) == 0
    assert raw.getvalue() == b"caf\\udce9.png\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
def test_sigterm_leaves_no_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run(args: object) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            assert list(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    monkeypatch.setattr(command, "run", run)
    assert main(["list"]) == 130
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "attendless: stopped\n"


def test_gradio_gets_its_folder_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attendless_lab.explore.folder import own_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    with own_folder():
        assert Path(os.environ["GRADIO_TEMP_DIR"]).parent == tmp_path
    assert "GRADIO_TEMP_DIR" not in os.environ
    assert not list(tmp_path.iterdir())


def test_workers_beyond_reason() -> None:
    with pytest.raises(UserError, match="workers=100000: expected at most"):
        Run(workers=100_000)
