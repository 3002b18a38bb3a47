"""The kernels' tests once more, in a build that stops at the first address or operation that C++ does not allow.

$ATTENDLESS_SANITIZED_EXAMPLES says how many problems each sweep draws.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.builds
ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitized"
CASES = ["foveal", "block", "gather", "sparsifiner", "merge", "bf16", "int8", "bad_input"]


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def tool(name: str) -> str:
    """A program of this environment, or of the machine."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or ""


def missing() -> str | None:
    if importlib.util.find_spec("nanobind") is None:
        return "needs nanobind"
    if not tool("cmake") or not tool("ninja"):
        return "needs cmake and ninja"
    if not shutil.which("g++"):
        return "needs g++"
    return None if Path(library("libasan.so")).is_absolute() else "needs GCC's address sanitizer"


def library(name: str) -> str:
    """Where GCC keeps a library; a bare name if it has none."""
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


def build() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of the suite may share the folder
        options = {
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "CMAKE_CXX_COMPILER": "g++",
            "ATTENDLESS_SANITIZE": "address,undefined",
            "ATTENDLESS_ISAS": "portable;avx2;avx512;avx512bf16;wide",
        }
        defines = [f"-D{key}={value}" for key, value in {**options, "Python_EXECUTABLE": sys.executable}.items()]
        run(tool("cmake"), "-S", ROOT / "native", "-B", BUILD, "-G", "Ninja", *defines)
        run(tool("cmake"), "--build", BUILD)
    (module,) = BUILD.glob("_native.*.so")
    return module


@pytest.fixture(scope="module")
def module() -> Path:
    reason = missing()
    if reason:
        pytest.skip(reason)
    return build()


def test_instruction_sets_share_no_code(module: Path) -> None:
    """Of a function two of them share the linker keeps one copy, perhaps one this machine cannot run."""
    isas = list(module.parent.glob("CMakeFiles/isa_*.dir/isa.cpp.o"))
    assert isas
    for isa in isas:
        name = isa.parent.name.removeprefix("isa_").removesuffix(".dir")
        symbols = run("nm", "-C", "--defined-only", isa).splitlines()
        shared = [line for line in symbols if line.split()[1] in "WVu" and f"attendless::{name}::" not in line]
        assert not [line for line in shared if "DW.ref." not in line]


def test_sanitized(module: Path) -> None:
    environment = {
        "ATTENDLESS_MODULE": str(module),
        "ATTENDLESS_EXAMPLES": os.environ.get("ATTENDLESS_SANITIZED_EXAMPLES", "12"),
        # Python itself leaks; more memory than there is must fail as it does elsewhere.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        # The sanitizer comes first of all, and looks for the C++ library at once.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
        "PYTHONPATH": "tests",
    }
    tests = [f"tests/test_native_{name}.py" for name in CASES]
    said = run(sys.executable, "-m", "pytest", "-s", "-p", "sanitized_module", "-p", "no:xdist", *tests, **environment)
    assert " passed" in said
