"""The wheel `make wheel` makes, where there is nothing else of ours and no compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from test_native_sanitized import ROOT

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent

#: Run in the new environment; the first argument is its folder.
NATIVE = """
import pathlib, sys, timm, torch, attendless
from attendless.sparse import native
assert attendless.__file__.startswith(sys.argv[1]), attendless.__file__
assert pathlib.Path(attendless.__file__).with_name("py.typed").is_file()
assert native.available, native.reason
assert not native.threading(), native.threading()
fast = attendless.convert(timm.create_model("deit_tiny_patch16_224", img_size=64, depth=2).eval(), "foveal:keep=0.3",
                          below_breakeven="keep")
images, found = torch.randn(2, 3, 64, 64), []
for backend in ("native", "torch"):
    with attendless.execution(backend), torch.no_grad():
        found.append(fast(images))
torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
print(native.instruction_set())
"""
EXTENSION = "from attendless.export import extension; print(extension.available() or extension.path())"


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), env=os.environ | environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module", name="wheel")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("patchelf", path=f"{BIN}{os.pathsep}{os.environ['PATH']}"):
        pytest.skip("needs patchelf")
    if not all(importlib.util.find_spec(name) for name in ("auditwheel", "scikit_build_core", "nanobind", "pip")):
        pytest.skip("needs auditwheel, scikit-build-core, nanobind and pip")
    folder = tmp_path_factory.mktemp("dist")
    run("make", "wheel", "STAMP=", f"BIN={BIN}", f"DIST={folder}")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", name="python")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it. PyTorch and the rest are this one's, to spare the download; files that lead
    to an attendless under development do not count from there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    lent = [path for path in (*sys.path, sysconfig.get_path("purelib")) if path.endswith("site-packages")]
    (site / "lent.pth").write_text("\n".join(dict.fromkeys(lent)))
    return python


def test_it_is_a_manylinux_wheel_without_libraries_of_others(wheel: Path) -> None:
    assert "manylinux_2_" in wheel.name
    assert ".libs" not in run(sys.executable, "-m", "zipfile", "-l", wheel)


def test_its_kernels_run_without_a_compiler(python: Path, tmp_path: Path) -> None:
    said = run(python, "-c", NATIVE, python.parents[1], PATH=str(tmp_path), PYTHONPATH="")
    assert said.strip() in ("avx512", "avx2", "portable")


def test_its_extension_is_built_where_there_is_a_compiler(python: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("needs openvino")
    here = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ""}
    assert "no C++ compiler" in run(python, "-c", EXTENSION, **here, PATH=str(tmp_path), CXX="")
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    assert Path(run(python, "-c", EXTENSION, **here).strip()).is_file()


def test_the_wheel_holds_the_lab_with_its_page(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("attendless", "attendless_lab", "attendless_cli"):
        source = ROOT / "src" / package
        files = [path for path in source.rglob("*") if path.suffix in (".py", ".html", ".js", ".css", ".typed")]
        assert {path.relative_to(ROOT / "src").as_posix() for path in files} <= names
