"""The documentation keeps its promises: links lead somewhere, commands exist, pictures are current, examples run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attendless
from attendless import Columnar, UserError, plugins
from attendless.attention import registry as attention_registry
from attendless.check.attentions import CHECKS
from attendless.check.trial import attempt
from attendless.sparse import backend as backend_registry
from attendless.sparse import execution, operations
from attendless.sparse import gather as definition
from attendless_cli import main as command_line
from attendless_cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Links ---------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The headings of a page as both GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path, text: str) -> list[str]:
    """The relative links and images of a page that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken(path, path.read_text())


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# Some, title\n")
    text = "[a](there.md#some-title) [b](there.md#no) [c](gone.md) ![d](gone.png) [e](https://example.com)\n"
    assert broken(tmp_path / "here.md", text) == ["there.md#no", "gone.md", "gone.png"]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


# Commands ------------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `attendless` of every command line in a page's fenced blocks."""
    for language, block in FENCE.findall(text):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"([A-Z_]+=\S+ +)*(\$ )?attendless ", line) else []
            words = words[words.index("attendless") + 1 :] if words else []
            if words and "|" not in words:  # `convert | train | …` lists commands
                yield words


@pytest.fixture
def _parse_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line reads its words, and stops there."""
    monkeypatch.setattr(command_line, "_run", lambda args: 0)


COMMANDS = [(name_of(path), words) for path in PAGES for words in commands(path.read_text())]


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 40


@pytest.mark.usefixtures("_parse_alone")
@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{where}: {' '.join(words)}" for where, words in COMMANDS])
def test_commands_exist(where: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(words) == 0
    except SystemExit:
        pytest.fail(f"{where}: attendless {' '.join(words)}: {capsys.readouterr().err}")


@pytest.mark.usefixtures("_parse_alone")
@pytest.mark.parametrize("line", ["bench model --sizes 3", "frobnicate model", "check", "--plugins f info model"])
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(SystemExit):
        main(line.split())


# What pages say of the code ------------------------------------------------------------------------------------------


def test_the_map_is_current() -> None:
    found = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "draw_architecture.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    before = list(sys.path)
    found.loader.exec_module(module)
    sys.path[:] = before
    current = module.draw() == (ROOT / "docs" / "architecture.svg").read_text()
    assert current, "run: python docs/draw_architecture.py docs/architecture.svg"


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", page("reference.md"), re.MULTILINE)


@pytest.mark.parametrize("path", documented())
def test_what_the_reference_names_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found.__doc__


def test_the_reference_names_all_that_is_public() -> None:
    named = {path.rpartition(".")[2] for path in documented()}
    assert set(attendless.__all__) - {"__version__"} <= named


def test_environment_names_every_variable() -> None:
    sources = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bATTENDLESS_[A-Z_]*[A-Z]\b", path.read_text())}
    built = {"ATTENDLESS_SANITIZE", "ATTENDLESS_HARNESS", "ATTENDLESS_OPENMP", "ATTENDLESS_ISAS"}  # options of CMake
    assert used - built <= set(re.findall(r"`(ATTENDLESS_[A-Z_]+)`", page("environment.md")))


def test_what_one_writes_is_in_the_interface() -> None:
    table = page("adding-an-attention.md").split("## What you write")[1].split("## Reading")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert len(names) > 20
    assert names <= {*dir(attendless.Attention), *attendless.Attention.__annotations__}


# Examples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    [("echo", "adding-an-attention.md"), ("similar", "adding-an-attention.md"), ("backend", "writing-a-kernel.md")],
    ids=["echo", "similar", "backend"],
)
def test_the_page_shows_the_file_that_runs(name: str, where: str) -> None:
    assert f"```python\n{(ROOT / 'examples' / f'{name}.py').read_text()}```" in page(where)


@pytest.fixture
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is forgotten when the test is over."""
    known = {op: dict(backends) for op, backends in backend_registry._BACKENDS.items()}
    monkeypatch.setattr(backend_registry, "_BACKENDS", known)
    monkeypatch.setattr(attention_registry, "_ATTENTIONS", dict(attention_registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_sources", dict(plugins._sources))


@pytest.mark.usefixtures("_own_registries")
def test_echo_reads_the_scores_of_the_layer_before() -> None:
    plugins.load_plugin(ROOT / "examples" / "echo.py")
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 5}
    model = Columnar(**shape, attention="full/echo/echo").eval()
    with torch.no_grad():
        steps = list(model.walk(*model.embed(torch.randn(2, 3, 32, 32))))
        scores = [step.context.scores for step in steps]
        block, (_, x, context) = model.blocks[1], steps[1]
        _, _, v = block.attn.project(block.norm1(x))
        expected = block.attn.merge(torch.softmax(scores[1], dim=-1) @ v)
        found, _ = block.attn(block.norm1(x), context)
    torch.testing.assert_close(found, expected)
    assert scores[2] is scores[1], "handed on"
    assert scores[0] is scores[3] is None, "and dropped where nobody reads them"
    with pytest.raises(
        UserError, match=r"echo in blocks.1 reads the scores .* but foveal in blocks.0 does not provide it"
    ):
        Columnar(**shape, attention="foveal/echo/echo")
    with pytest.raises(UserError, match="it is the first layer"):
        Columnar(**shape, attention="echo")


@pytest.mark.usefixtures("_own_registries")
def test_echo_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plugin", str(ROOT / "examples" / "echo.py"), "info", "columnar_micro_patch4_32", "--attention"]
    assert main([*words, "full", "full+echo"]) == 0
    assert "full+echo" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*words, "foveal+echo"])
    refusal = (
        "attendless: error: attention echo in blocks.1 reads the scores of the layer before, but foveal in blocks.0"
    )
    assert refusal in capsys.readouterr().err
    assert refusal in page("adding-an-attention.md")


@pytest.mark.usefixtures("_own_registries")
def test_echo_costs_what_the_page_says() -> None:
    plugins.load_plugin(ROOT / "examples" / "echo.py")
    shown = [line.split() for line in page("adding-an-attention.md").splitlines() if line.startswith("full")]
    assert len(shown) == 2
    for row in shown:
        with torch.device("meta"):
            model = Columnar(img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3, attention=row[0])
        layers = [layer.macs for layer in model.costs()]
        core, total = (sum(getattr(macs, part) for macs in layers) for part in ("core", "total"))
        assert [f"{total / 1e6:,.2f}", f"{core / 1e6:,.2f}"] == [row[5], row[7]]


@pytest.mark.usefixtures("_own_registries")
def test_the_gather_recipe_costs_what_it_states_with_every_backend() -> None:
    plugins.load_plugin(ROOT / "examples" / "similar.py")
    for backend in ("", "torch"):
        verdict = attempt(CHECKS["macs"], "similar", backend)
        assert verdict.result == "passed", verdict.note


@pytest.mark.usefixtures("_own_registries")
@pytest.mark.parametrize("counted", [False, True])
def test_the_backend_computes_the_operation(counted: bool) -> None:
    plugins.load_plugin(ROOT / "examples" / "backend.py")
    q, k, v = (torch.randn(2, 3, 20, 8, requires_grad=True) for _ in range(3))
    lists = torch.randint(20, (2, 3, 20, 7), dtype=torch.int32)
    counts = torch.randint(8, (2, 3, 20), dtype=torch.int32) if counted else None
    more = {"scale": 0.3, "key_bias": torch.randn(2, 20)}
    case = operations.case_of("gather", operations.Lists(20, 7), q)
    with execution("mine"):
        assert backend_registry.backend("gather", attendless.sparse.choose(case).backend).name == "mine"
        found = operations.gather(q, k, v, lists, counts, **more)
    expected = definition.attend(q, k, v, lists, counts, **more)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_own_registries")
def test_the_backend_is_measured_like_any_other() -> None:
    plugins.load_plugin(ROOT / "examples" / "backend.py")
    mine = backend_registry.backend("gather", "mine")
    (probe,) = mine.probe(backend_registry.samples("gather", 4, torch.float32))
    assert probe.macs == 2 * 16**2 * 192
    assert probe.call().shape == (1, 3, 16, 64)
    large = operations.case_of("gather", operations.Lists(5000, 7), torch.empty(1, 1, 5000, 8))
    with execution("mine"):
        assert attendless.sparse.choose(large).backend != "mine", "what it refuses goes to another"


def test_the_example_prints_a_map(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "seeing.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    whole, window = (
        torch.tensor([list(map(float, line.split())) for line in part]) for part in (lines[1:9], lines[10:])
    )
    assert whole.shape == window.shape == (8, 8)
    assert whole.sum() == pytest.approx(100, abs=4)  # rounded, and the class token has a share
    assert window[:4, :4].sum() == pytest.approx(100, abs=2)
    assert not window[4:].any()
    assert not window[:, 4:].any()
