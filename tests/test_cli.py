"""The command line as a user meets it: help without torch, one clear line for mistakes, JSON as promised."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attendless.errors import UserError
from attendless_cli.main import COMMANDS, _own_words, main
from attendless_cli.output import Lines

START = "from attendless_cli.main import run; run({!r})"


def run(*words: str, python: str = START) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", python.format(list(words))], capture_output=True, text=True, check=False
    )


def inside(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run in this process: (exit code, stdout, stderr)."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_is_quick_and_does_not_import_torch() -> None:
    report = """
import resource, sys
from attendless_cli.main import main
try:
    main({!r})
except SystemExit:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print("torch" in sys.modules, used.ru_utime + used.ru_stime)
"""
    done = run("--help", python=report)
    imported, seconds = done.stdout.splitlines()[-1].split()
    assert imported == "False"
    assert float(seconds) < 0.5
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_verb_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = inside(capsys, command, "--help")
    assert code == 0
    assert f"\n  attendless {command}" in out
    assert "--json" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inof"], "invalid choice: 'inof'"),
        (["info"], "the following arguments are required: MODEL"),
        (["info", "deit_tiny_patch16_225"], "Did you mean 'deit_tiny_patch16_224'"),
        (["info", "deit_tiny_patch16_224", "--attention", "ful"], "unknown attention 'ful'. Did you mean 'full'?"),
        (["info", "deit_tiny_patch16_224", "--size", "0"], "expected S or HxW"),
        (["info", "deit_tiny_patch16_224", "--size", "225"], "225x225"),
        (["info", "deit_tiny_patch16_224", "--weights", "none.safetensors"], "none.safetensors"),
        (["info", "deit_tiny_patch16_224", "--json", "/proc/none/x.json"], "/proc/none"),
        (["papers", "lavit-99"], "unknown table 'lavit-99'"),
        (["list", "nothing"], "unknown attention 'nothing'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = inside(capsys, *words)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("attendless: error: ")


def test_info_of_deit_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "info.json"
    code, text, _ = inside(capsys, "info", "deit_small_patch16_224", "--json", str(out))
    assert code == 0
    assert "22.05 M" in text
    assert "357.66 M" in text
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    macs = row["macs"]
    assert row["params"] == 22_050_664
    assert macs["core"] == 2 * 12 * 197**2 * 384
    assert macs["total"] == sum(macs[part] for part in ("core", "projections", "mlp", "other"))
    assert macs["total"] == sum(layer["macs"]["total"] for layer in row["layers"])
    assert {"cpu", "torch", "timm", "threads", "date"} <= set(found["stamp"])


BROKEN = """
from attendless import register
from attendless.attention.full import Full

@register
class Mine(Full):
    name = "mine"
    def core_macs(self, grid):
        return 1
"""


def test_check_runs_the_contract_on_anyones_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin, out = tmp_path / "mine.py", tmp_path / "check.json"
    plugin.write_text(BROKEN)
    words = ["check", "full", "mine", "--plugin", str(plugin), "--json", str(out)]
    done = run(*words)
    assert done.returncode == 1, done.stderr
    assert "18 passed\n" in done.stdout
    assert "17 passed, 1 failed" in done.stdout
    assert "MACs stated" in done.stdout
    found = json.loads(out.read_text())
    assert [(row["spec"], row["check"]) for row in found["rows"] if row["result"] == "failed"] == [("mine", "macs")]
    assert len(found["rows"]) == 2 * len(found["rules"])
    assert inside(capsys, "check", "full", "fll")[0] == 2


def test_exit_codes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = inside(capsys, "--help")
    assert all(text in out for text in ("0 done", "1 a check", "2 a mistake", "130 stopped"))


@pytest.mark.parametrize(("words", "column"), [(["papers"], "table"), (["list", "foveal"], "option")])
def test_columns_are_headed_by_what_they_hold(words: list, column: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = inside(capsys, *words)
    heads = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert column in heads
    assert "attention" not in heads


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "list.json"
    assert inside(capsys, "list", "--json", str(out))[0] == 0
    found = json.loads(out.read_text())
    assert {"name": "full", "options": []} in found["attentions"]
    assert "tome" in [row["name"] for row in found["reducers"]]
    assert set(found) == {"stamp", "attentions", "reducers", "models", "convertible"}
    assert "SAM" in found["convertible"], "what is converted in a copy of timm's own model counts too"


@pytest.mark.parametrize("style", [[], ["--markdown"]])
def test_papers(style: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    code, text, _ = inside(capsys, "papers", "sparsifiner-2", *style, "--json", str(out))
    assert code == 0
    assert "357.7 M" in text
    row = next(r for r in json.loads(out.read_text())["rows"] if r["row"] == "DeiT-S" and r["quantity"] == "MHSA")
    assert row["ours"] == 2 * 12 * 197**2 * 384
    assert row["agrees"] is True
    assert row["paper"] == "357.7"


def test_doctor_tries_bf16_in_a_child(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    assert inside(capsys, "doctor", "--json", str(out))[0] == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert {"torch", "threads", "native kernels", "bf16 products", "extra hf"} <= set(rows)
    assert rows["bf16 products"]["value"]
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    exist = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = [name.removeprefix("extra ") for name in rows if name.startswith("extra ")]
    assert set(extras) == set(re.findall(r"^(\w+) = \[", exist, re.MULTILINE)) - {"docs", "dev"}


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f'{sys.executable} -c "{START.format(["list"])}" | head -n 1',
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_steps_are_told_when_done_if_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    from attendless_cli.output import steps

    with steps() as say:
        say("one")
        assert capsys.readouterr().err == ""
        say("two")
        assert capsys.readouterr().err.startswith("one: 0.")
    assert capsys.readouterr().err.startswith("two: 0.")


def test_bench_prints_the_cap_first_and_rows_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    words = ["vit_tiny_patch16_224", "--attention", "full", "xca", "--size", "32", "48", "--quick", "--budget", "0.02"]
    words += ["--below-breakeven", "keep"]
    code, text, err = inside(capsys, "bench", *words, "--threads", "1", "--json", str(out))
    assert code == 0
    starts = [line.split(":")[0] for line in text.splitlines()[:6]]
    at = ("maximum speed-up at {0} px", "full at {0} px", "xca at {0} px")
    assert starts == [line.format(size) for size in (32, 48) for line in at]
    assert [line.split(":")[0] for line in err.splitlines()] == ["timing 3 models at 32 px", "timing 3 models at 48 px"]
    assert len(json.loads(out.read_text())["rows"]) == 4


@pytest.mark.parametrize("before", [True, False])
def test_a_value_that_is_called_like_a_verb_is_no_verb(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check").write_text("")
    plugin = ("--plugin", "check")
    code, _, err = inside(capsys, *(plugin if before else ()), "papers", *(() if before else plugin))
    assert code == 2
    assert "is not a Python file" in err
    code, out, _ = inside(capsys, "list", "--json", "info")
    assert code == 0
    assert "foveal" in out


def test_list_names_what_can_be_converted_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = inside(capsys, "list")
    for name in ("VisionTransformer", "Swin", "PVT v2", "XCiT", "Dinov2Model", "CLIPVisionModel"):
        assert name in " ".join(out.split())
    for name in ("tome", "evit", "dynamicvit"):
        assert name in out
    assert "tokens merged in each layer" in inside(capsys, "list", "tome")[1]


def command_that(raises: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> None:
        raise raises

    monkeypatch.setattr("attendless_cli.doctor.run", run)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5000000000 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)  # fmt: skip
def test_want_of_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(error, monkeypatch)
    code, _, err = inside(capsys, "doctor")
    assert code == 2
    assert err.startswith("attendless: error: not enough memory")
    assert ("5.0 GB" in err) == ("5000000000" in str(error))


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(RuntimeError("shapes do not fit"), monkeypatch)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main(["doctor"])


@pytest.mark.parametrize("words", [["info", "columnar_micro_patch4_32"], ["train", "--help"]])
def test_ctrl_c_while_torch_is_imported(words: list[str]) -> None:
    """The interrupt comes as soon as torch's own files begin to be imported, which takes seconds."""
    begun = """
import builtins, os, sys
real = builtins.__import__
def watch(name, *rest, **more):
    if name == "torch":
        builtins.__import__ = real
        print("importing", flush=True)
    return real(name, *rest, **more)
builtins.__import__ = watch
from attendless_cli.main import run; run({!r})
"""
    with subprocess.Popen(
        [sys.executable, "-c", begun.format(words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "importing\n"
        time.sleep(0.05)
        os.kill(child.pid, signal.SIGINT)
        assert child.stderr.read() == "attendless: stopped\n"
    assert child.returncode == 130


def test_ctrl_c_in_a_verb(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr("attendless_cli.doctor.run", run)
    assert main(["doctor"]) == 130
    assert capfd.readouterr().err == "attendless: stopped\n"


def test_training_acknowledges_ctrl_c_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    from attendless.train.process import Stop

    with Stop().listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        assert "stopping after this step, and saving" in capsys.readouterr().err


def told(seconds_each: float, total: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a job whose items take so long each, by a clock of its own."""
    now = 0.0
    lines = Lines("images", total, lambda: now)
    for _ in range(total):
        now += seconds_each
        lines.advance(1)
    return capsys.readouterr().err.splitlines()


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(0.01, 1000, capsys) == []  # 10 s: soon over
    lines = told(0.125, 800, capsys)
    assert lines[0] == "images 16/800, 2 s, about 98 s left"  # an estimate, early
    assert lines[1] == "images 96/800, 12 s, about 88 s left"
    assert lines[-1] == "images 800/800, 100 s"
    assert len(lines) == 11
    assert told(30.0, 3000, capsys)[0] == "images 1/3,000, 30 s, about 25 h 0 min left"
    assert told(30.0, 3, capsys)[0] == "images 1/3, 30 s, about 60 s left"


def test_an_error_from_a_process_that_prepares_images_is_said_in_its_own_words() -> None:
    from torch.utils.data import DataLoader

    with pytest.raises(UserError) as caught:
        list(DataLoader(_Unreadable(), num_workers=1))
    assert "Traceback" in str(caught.value)
    assert _own_words(str(caught.value)).strip() == "not one picture can be read"
    assert _own_words("plain") == "plain"


class _Unreadable:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise UserError("not one picture can be read")
