"""The OpenVINO extension's tests once more, in a build that stops at the first address or operation C++ forbids."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attendless.export import extension
from test_native_sanitized import BUILD, ROOT, build, library, missing, run

pytestmark = pytest.mark.slow
#: OpenVINO opens a library in a way the address sanitizer does not allow, and does as well without.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
void* dlopen(const char* file, int flags) {
  void* (*next)(const char*, int) = dlsym(RTLD_NEXT, "dlopen");
  return next(file, flags & ~RTLD_DEEPBIND);
}
"""
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-fno-omit-frame-pointer", "-fvisibility=hidden"]
#: OpenVINO's classes are not built for the check of what an object's class is.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
#: These ask for the usual library, count threads, or are of another runtime.
LEFT_OUT = "not saved and not why and not threads_openvino and not OnnxRuntime"


def test_sanitized(tmp_path: Path) -> None:
    if reason := missing() or extension.available():
        pytest.skip(reason)
    build()
    openvino, target, shim = extension._openvino(), tmp_path / extension.NAME, tmp_path / "shim.so"
    sources = [ROOT / "native" / "openvino.cpp", BUILD / "libattendless.a", *extension._libraries(openvino)]
    run("g++", *FLAGS, *SANITIZE, "-isystem", openvino / "include", *sources, "-Wl,--exclude-libs,ALL", "-o", target)
    (tmp_path / "shim.c").write_text(SHIM)
    run("gcc", "-shared", "-fPIC", tmp_path / "shim.c", "-o", shim, "-ldl")
    environment = {
        "ATTENDLESS_EXTENSION": str(target),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:verify_asan_link_order=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "LD_PRELOAD": f"{shim} {library('libasan.so')} {library('libstdc++.so.6')}",
        "PYTHONPATH": "tests",
    }
    command = [sys.executable, "-m", "pytest", "-s", "-p", "sanitized_extension", "-p", "no:xdist", "-k", LEFT_OUT]
    assert " passed" in run(*command, "tests/test_openvino_extension.py", "tests/test_operators.py", **environment)
