"""The command line as a user meets it: help without torch, one clear line for mistakes, JSON as promised."""

from __future__ import annotations

import argparse
import importlib
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
from attendless_cli import settings
from attendless_cli.main import COMMANDS, _message_alone, main
from attendless_cli.output import Lines
from attendless_cli.parser import Help, Parser

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
        (["inof"], "unknown command 'inof'. Did you mean 'info'? There are: demo, "),
        (["convrt", "--sise", "1"], "Did you mean 'convert'?"),
        (["--verison"], "unrecognized flag '--verison'. Did you mean '--version'?"),
        (["info", "--sise=32"], "unrecognized flag '--sise'. Did you mean '--size'?"),
        (["info", "deit_tiny_patch16_224", "--zzz"], "unrecognized flag '--zzz' (see attendless info --help)"),
        (["eval", "m", "--dta", "d"], "Did you mean '--data'?"),
        (["eval", "m", "--data", "d", "--limit", "1"], "Give --images N"),
        (["eval", "m", "--data", "d", "--task", "detecton"], "Did you mean 'detection'? There are: classification, "),
        (["compare", "--seeds", "1"], "Give --seed S …"),
        (["bench", "m", "--compile"], "Give --runtime compile"),
        (["show", "dog.jpg", "--model", "m", "--out", "o.png"], "Give MODEL as the first argument"),
        (["show", "m", "dog.jpg", "--layer", "1", "--out", "o.png"], "Give --layers L"),
        (["explore", "m", "--image", "dog.jpg"], "Give IMAGE after MODEL"),
        (["distill", "m", "--weight-decay", "0.1"], "give --set weight_decay=VALUE"),
        (["recipes", "qick"], "unknown recipe 'qick'. Did you mean 'quick'?"),
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


def test_check_runs_the_interface_checks_on_any_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert all(text in out for text in ("0 success", "1 a check", "2 wrong arguments", "130 interrupted"))


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
    assert set(found) == {"stamp", "attentions", "aliases", "reducers", "models", "convertible"}
    assert "SAM" in found["convertible"], "what is converted in a copy of timm's own model counts too"


@pytest.mark.parametrize("style", [[], ["--markdown"]])
def test_papers(style: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    code, text, _ = inside(capsys, "papers", "sparsifiner-2", *style, "--json", str(out))
    assert code == 0
    assert "357.7" in text
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
    for name in ("VisionTransformer", "Swin", "PVT v2", "XCiT", "Hugging Face dinov2", "siglip"):
        assert name in " ".join(out.split())
    for name in ("tome", "evit", "dynamicvit"):
        assert name in out
    assert "tokens removed in each layer" in inside(capsys, "list", "tome")[1]


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


@pytest.mark.parametrize("words", [["info", "columnar_micro_patch4_32"], ["recipes"]])
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
        assert "stopping after this step and saving a checkpoint" in capsys.readouterr().err


def told(seconds_each: float, total: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a job whose items take so long each, by a clock of its own."""
    now = 0.0
    lines = Lines("images", total, lambda: now)
    for _ in range(total):
        now += seconds_each
        lines.advance(1)
    now += 60
    lines.advance(0)  # a watcher may report after the end, and nothing is printed
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


def test_an_error_from_a_process_that_prepares_images_is_said_in_its_message_alone() -> None:
    from torch.utils.data import DataLoader

    with pytest.raises(UserError) as caught:
        list(DataLoader(_Unreadable(), num_workers=1))
    assert "Traceback" in str(caught.value)
    assert _message_alone(str(caught.value)).strip() == "not one picture can be read"
    assert _message_alone("plain") == "plain"


class _Unreadable:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise UserError("not one picture can be read")


# Help ----------------------------------------------------------------------------------------------------------------


def flags(command: str) -> list[argparse.Action]:
    parser = Parser(prog=f"attendless {command}")
    importlib.import_module(f"attendless_cli.{command}").add_arguments(parser)
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def unhelpful(action: argparse.Action) -> str:
    """What the help of an argument lacks."""
    text = Help("attendless")._get_help_string(action) % vars(action)
    if not action.help:
        return "help"
    missing = [str(choice) for choice in action.choices or () if action.metavar and str(choice) not in text]
    if missing:
        return f"choices {missing}"
    optional = bool(action.option_strings) or action.nargs in ("?", "*")
    said = not optional or action.required or action.nargs == 0 or "(default: " in text
    return "" if said else "default"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_every_default_and_choice(command: str) -> None:
    found = {action.dest: unhelpful(action) for action in flags(command)}
    assert {name: lack for name, lack in found.items() if lack} == {}


def test_an_unhelpful_flag_is_found() -> None:
    parser = Parser()
    choices = ("red", "green")
    assert unhelpful(parser.add_argument("--a", help="a thing")) == "default"
    assert unhelpful(parser.add_argument("--b", default=3)) == "help"
    assert unhelpful(parser.add_argument("--c", default=3, help="a thing")) == ""
    assert unhelpful(parser.add_argument("--d", metavar="D", choices=choices, default="red", help="colour")) == ""
    assert (
        unhelpful(parser.add_argument("--e", metavar="E", choices=choices, help="choices: red")) == "choices ['green']"
    )
    assert unhelpful(parser.add_argument("--f", action="store_true", help="a switch")) == ""


#: Flags of one meaning; another spelling of one of them must not come back.
SPELLINGS = {"--layers": "--layer", "--images": "--limit", "--seed": "--seeds", "--runtime": "--compile"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_has_one_spelling_and_commands_stay_small(command: str) -> None:
    given = [flag for action in flags(command) for flag in action.option_strings]
    assert not set(given) & set(SPELLINGS.values())
    shown = [flag for action in flags(command) for flag in action.option_strings if action.help != argparse.SUPPRESS]
    assert len(shown) <= 26
    if command in ("train", "distill", "compare"):
        assert len(flags(command)) <= 21


def test_recipes_lists_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipes.json"
    code, text, _ = inside(capsys, "recipes", "--json", str(out))
    assert code == 0
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == settings.names()
    assert rows["schedule"]["choices"] == ["cosine", "plateau", "constant"]
    assert rows["lr"]["default"] == 5e-4
    assert all(row["help"] and row["type"] for row in rows.values())
    assert {"quick", "small_detection", "imitate"} <= {recipe["name"] for recipe in found["recipes"]}
    assert all(name in text for name in rows)


def test_recipes_of_one_name_shows_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe.json"
    assert inside(capsys, "recipes", "imagenette", "--json", str(out))[0] == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert (rows["epochs"]["default"], rows["size"]["default"]) == (32, [96])
    code, text, _ = inside(capsys, "recipes", "evit")  # a recipe of train, and one of distill
    assert code == 0
    assert "evit (train, compare)" in text
    assert "phase all: loss.label=1, loss.logits=0.5, loss.patches=0.5" in text
