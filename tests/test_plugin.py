"""The documented example works from a user's own file: in Python, in the interface checks and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attendless.convert.files import read_header

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


def test_passes_the_interface_checks(tmp_path: Path) -> None:
    words = ("-m", "attendless", "check", "neighbours", "neighbours:radius=1", "--plugin", str(EXAMPLE))
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("18 passed") == 2
    assert "failed" not in done.stdout


IMPORTED = """
import json, sys
import timm
sys.path.insert(0, {folder!r})
import neighbours
import attendless
from attendless_lab.compare import compare

if __name__ == "__main__":
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2).eval()
    ours = attendless.convert(model, "neighbours:radius=1", below_breakeven="keep")
    row = attendless.bench(ours, like=model, budget=0.05, throughput=False, parts=False)
    found = compare(
        attentions=["neighbours:radius=1"], seeds=(0,), out="compared", jobs=1, data="scenes:train=64,val=20",
        epochs=1, batch=32, factors=(1,), budget=0.05,
    )
    attendless.save(ours, "ours.safetensors")
    print(json.dumps({{"bench": row.as_dict(), "compare": found.rows}}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """What a script finds that imports an attention as any module, without --plugin."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "script.py").write_text(IMPORTED.format(folder=str(EXAMPLE.parent)))
    done = run("script.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_an_imported_attention_is_known_where_memory_is_measured(imported: tuple[Path, dict]) -> None:
    row = imported[1]["bench"]
    assert row["attention"] == "neighbours:radius=1"
    assert row["peak_memory_mb"] is not None, row["notes"]


def test_an_imported_attention_is_known_where_it_is_trained(imported: tuple[Path, dict]) -> None:
    (row,) = imported[1]["compare"]
    assert row["failed"] is None
    assert row["top1_mean"] is not None
    assert row["peak_memory_mb"] is not None


def test_a_file_says_which_plugin_it_needs(imported: tuple[Path, dict]) -> None:
    folder, _ = imported
    assert read_header(folder / "ours.safetensors")["plugins"] == {"neighbours": "neighbours.py"}
    assert str(ROOT) not in json.dumps(read_header(folder / "ours.safetensors"))
    words = ("-m", "attendless", "info", "ours.safetensors")
    done = run(*words, cwd=folder)
    assert done.returncode == 2
    assert "needs 'neighbours', which came from the plug-in neighbours.py: give it with" in done.stderr
    done = run(*words, "--plugin", str(EXAMPLE), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "neighbours:radius=1" in done.stdout


def test_a_broken_plugin_is_explained(tmp_path: Path) -> None:
    done = run("-m", "attendless", "--plugin", str(tmp_path / "none.py"), "list", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_script_that_measures_while_it_is_imported_ends(tmp_path: Path) -> None:
    """The child that measures memory imports the script as a plug-in, which measures again: but only once."""
    script = tmp_path / "script.py"
    script.write_text(
        EXAMPLE.read_text()
        + "\nimport timm, attendless\n"
        + "model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)\n"
        + "ours = attendless.convert(model, 'neighbours', below_breakeven='keep')\n"
        + "row = attendless.bench(ours, like=model, budget=0.1, throughput=False, parts=False)\n"
        + "open('said.txt', 'a').write(f'{row.performance.peak_memory_mb} {row.notes}\\n')\n"
    )
    done = run(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (own,) = (tmp_path / "said.txt").read_text().splitlines()
    assert own.startswith("None ")
    assert "script.py is being imported as a plug-in" in own


@pytest.mark.slow
def test_an_attention_of_an_installed_package_is_known_to_children(tmp_path: Path) -> None:
    """One file of a package cannot be imported alone."""
    package = tmp_path / "thirdparty"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "consts.py").write_text("X = 1\n")
    (package / "attn.py").write_text("from .consts import X\n" + EXAMPLE.read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "import timm, attendless, thirdparty.attn\n"
        "model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)\n"
        "ours = attendless.convert(model, 'neighbours', below_breakeven='keep')\n"
        "row = attendless.bench(ours, like=model, budget=0.1, throughput=False, parts=False)\n"
        "print(row.performance.peak_memory_mb, *row.notes)\n"
    )
    done = run(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) > 0, done.stdout


def test_a_plugin_that_fails_fails_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(EXAMPLE.read_text().replace('"neighbours"', '"broken_neighbours"') + "\n1 / 0\n")
    said = run(
        "-c",
        "import attendless\nfor _ in range(2):\n    try: attendless.load_plugin('broken.py')\n"
        "    except attendless.UserError as error: print(error)\nprint(attendless.plugins.plugin_files())",
        cwd=tmp_path,
    ).stdout.splitlines()
    assert len(said) == 3
    assert all("ZeroDivisionError" in line for line in said[:2])
    assert said[2] == "[]"
