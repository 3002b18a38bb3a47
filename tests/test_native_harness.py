"""The kernels without Python, by native/harness.cpp: watched for races, by another compiler, on another processor.

The programs needed come with Debian's g++, clang, g++-aarch64-linux-gnu and qemu-user; without one its test is skipped.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from test_native_sanitized import ROOT, run, tool

pytestmark = pytest.mark.builds
HERE = platform.machine() in ("x86_64", "AMD64")


def build(name: str, compiler: str, *defines: str) -> Path:
    for needed in (compiler, "cmake", "ninja"):
        if not tool(needed):
            pytest.skip(f"needs {needed}")
    folder = ROOT / "build" / f"harness-{name}"
    options = {"CMAKE_MAKE_PROGRAM": tool("ninja"), "CMAKE_CXX_COMPILER": compiler, "ATTENDLESS_HARNESS": "ON"}
    given = [f"-D{key}={value}" for key, value in options.items()]
    run(tool("cmake"), "-S", ROOT / "native", "-B", folder, "-G", "Ninja", *given, *(f"-D{x}" for x in defines))
    run(tool("cmake"), "--build", folder)
    return folder / "harness"


def test_no_races() -> None:
    """OpenMP's runtime is not built for the thread sanitizer, so the threads are our own."""
    isas = "portable;avx2" if HERE else "portable"
    harness = build("races", "g++", "ATTENDLESS_SANITIZE=thread", "ATTENDLESS_OPENMP=OFF", f"ATTENDLESS_ISAS={isas}")
    if not works(harness):
        pytest.skip("the thread sanitizer does not start here")
    said = run(harness, "6", TSAN_OPTIONS="halt_on_error=1")
    assert "ok" in said
    assert "own threads: the kernels were compiled without OpenMP" in said


def works(program: Path) -> bool:
    """Some kernels lay memory out in ways the thread sanitizer cannot take."""
    done = subprocess.run([program, "0"], capture_output=True, text=True)
    return "unexpected memory mapping" not in done.stderr


def test_another_compiler() -> None:
    harness = build("clang", "clang++", "ATTENDLESS_ISAS=portable;avx2;avx512;avx512bf16")
    assert " ok " in run(harness, "20")


def test_another_processor() -> None:
    """The kernels for ARM on an emulated one: `portable`, and `armv86` with products of bf16 and int8."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        pytest.skip("needs qemu-aarch64")
    target = ("CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64", "CMAKE_EXE_LINKER_FLAGS=-static")
    harness = build("aarch64", "aarch64-linux-gnu-g++", *target, "ATTENDLESS_OPENMP=OFF")
    assert run(emulator, harness, "5").startswith("armv86 portable ok 100 problems")


@pytest.mark.slow
def test_many_problems_on_every_instruction_set() -> None:
    assert " ok " in run(build("plain", "g++"), "300", "7")
