"""Writing results never destroys: what is replaced, what is written into, what is asked about first, and full disks."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attendless.storage import atomic
from attendless_cli.main import main

LIST = ("list", "foveal")
CONVERT = ("convert", "columnar_micro_patch4_32", "--attention", "full")


def run(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


def write(path: Path | str, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text)


def test_a_link_stays_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real.json").write_text("old")
    for name, target in (("link", "far/real.json"), ("dangling", "far/new.json")):
        (tmp_path / name).symlink_to(target)
        write(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_text() == name
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["new.json", "real.json"]


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    write(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_name_is_written(tmp_path: Path) -> None:
    write(tmp_path / ("é" * 120), "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["new"]


def test_devices_and_pipes_are_written_into(tmp_path: Path) -> None:
    write("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    fifo, found = tmp_path / "pipe", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: found.append(fifo.read_bytes()))
    reader.start()
    with atomic(fifo) as temporary:
        save_file({"a": torch.ones(2)}, temporary)
    reader.join(10)
    (tmp_path / "copy").write_bytes(found[0])
    assert torch.equal(load_file(tmp_path / "copy")["a"], torch.ones(2))
    assert stat.S_ISFIFO(os.stat(fifo).st_mode)


def test_process_substitution_is_written_into() -> None:
    inside, outside = os.pipe()
    write(f"/dev/fd/{outside}", "through")
    os.close(outside)
    with open(inside, "rb") as pipe:
        assert pipe.read() == b"through"


def test_a_redirected_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """`--json /dev/fd/3 3>log`: what was in the log before, and what comes after, stays."""
    with open(tmp_path / "log", "wb", buffering=0) as log:
        log.write(b"before ")
        write(f"/dev/fd/{log.fileno()}", "result ")
        log.write(b"after")
    assert (tmp_path / "log").read_text() == "before result after"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LIST, "--json", "/dev/full") == 2
    assert capsys.readouterr().err == "attendless: error: No space left on device: /dev/full\n"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_standard_output_is_json_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*LIST, "--json", "-") == 0
    found = capfd.readouterr()
    assert json.loads(found.out)["attentions"][0]["name"] == "foveal"
    assert "options of foveal" in found.err


SMALL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from attendless_cli.main import run
run(sys.argv[1:])
"""


def test_no_room_for_a_model_leaves_the_old_one(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the system refuses in the middle of writing."""
    out = tmp_path / "model.safetensors"
    assert run(*CONVERT, "--out", str(out)) == 0
    before = out.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, *CONVERT, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"attendless: error: File too large: {out}\n"
    assert out.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param(lambda path: path.write_text("x" * 2000), id="text"),
        pytest.param(lambda path: save_file({"a": torch.ones(2000)}, path), id="tensors"),
    ],
)
def test_failures_are_told_under_the_name_that_was_given(tmp_path: Path, writer: Callable[[Path], object]) -> None:
    path, limits = tmp_path / "x", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic(path) as temporary:
            writer(temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_in_the_middle_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic(tmp_path / "x"):
        open(tmp_path / "missing.jpg").close()
    assert caught.value.filename == str(tmp_path / "missing.jpg")
    with pytest.raises(ZeroDivisionError), atomic(tmp_path / "x"):
        1 / 0  # noqa: B018


def ready(folder: Path) -> None:
    """Files that are somebody's, and one that is ours."""
    (folder / "notes.json").write_text('{"mine": 1}')
    (folder / "empty.json").write_text("")
    (folder / "weights.safetensors").write_bytes(b"somebody's")
    (folder / "picture.png").write_bytes(b"no picture")
    (folder / "file").write_text("a file")
    (folder / "folder").mkdir()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*LIST, "--json", "notes.json"], "--json 'notes.json': is a file that attendless did not write; --force"),
        ([*LIST, "--json", "folder"], "is a folder"),
        ([*LIST, "--json", ""], "expected the name of a file"),
        ([*LIST, "--json", "file/x.json"], "/file' is not a folder"),
        ([*LIST, "--json", "file/deeper/x.json"], "/file' is not a folder"),
        ([*LIST, "--json", "/proc/none/x.json"], "nothing can be written in '/proc'"),
        ([*LIST, "--json", "x" * 300], "File name too long"),
        ([*CONVERT, "--out", "weights.safetensors"], "is a file that attendless did not write; --force"),
        ([*CONVERT, "--out", "model.bin"], "expected a name that ends in .safetensors"),
        ([*CONVERT, "--out", "a.safetensors", "--json", "./a.safetensors"], "is also the file of --"),
        ([*CONVERT, "--weights", "weights.safetensors", "--out", "weights.safetensors", "--force"], "command reads"),
        (
            ["convert", "weights.safetensors", "--attention", "full", "--json", "weights.safetensors", "--force"],
            "reads",
        ),
        (["bench", "none", "--plot", "curve.jpg"], "ends in .png or .svg or .pdf"),
        (["bench", "none", "--plot", "picture.png"], "is a file that attendless did not write"),
    ],
)
def test_targets_are_looked_at_before_any_work(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert ".tmp" not in printed.err
    assert printed.out == ""  # nothing was worked out
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_force_and_our_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(*LIST, "--json", "notes.json", "--force") == 0
    assert run(*LIST, "--json", "notes.json") == 0  # now it is ours
    assert run(*LIST, "--json", "empty.json") == 0
    assert run(*LIST, "--json", "new/folder/x.json") == 0
    assert run(*CONVERT, "--out", "weights.safetensors", "--force") == 0
    assert run(*CONVERT, "--out", "weights.safetensors", "--json", "/dev/null") == 0
    assert run(*CONVERT, "--out", "/dev/null") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert run(*LIST, "--json", str(tmp_path / "x.json")) == 2
    assert "Permission denied" in capsys.readouterr().err
